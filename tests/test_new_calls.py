"""A call that differs from what was planned for is planned anew, never run by the stale plan."""

import warnings

import pytest
import torch
from exec_cases.training import assert_close, train
from integration_cases.new_calls import LIMIT_SECONDS, batch, loss, net, planned, run
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import remat


@pytest.mark.sweep
def test_batches_of_several_shapes_have_their_plans():
    model = planned()
    plans = {32: model.plan}
    for size in (5, 17):
        model(batch(size))
        plans[size] = model.plan
    assert len({id(plan) for plan in plans.values()}) == 3
    for size in (17, 32, 5):
        model(batch(size))
        assert model.plan is plans[size]
    sizes = [batch(size) for size in (32, 32, 5, 32, 17)]
    assert_close(run(model := planned(), *sizes), run(net(), *sizes))


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.sweep)])
def test_sizes_that_torch_compile_leaves_open_have_their_plans(dynamic):
    """TorchDynamo gives one graph for all sizes from the second on; a plan is for one size."""
    torch.compiler.reset()
    plans = []
    budget = 14_000
    options = {"budget": budget, "limit_seconds": LIMIT_SECONDS, "on_plan": plans.append}
    original, plain = (nn.Sequential(net()[0], *net()[2:3], *net()[4:]) for _ in range(2))
    model = torch.compile(original, backend="remat", options=options, dynamic=dynamic)
    calls = [batch(size) for size in (8, 16, 24, 12, 16, 24)]
    assert_close(run(model, *calls), run(plain, *calls))
    assert len({id(plan) for plan in plans}) == 4
    for call in calls:
        with remat.measure_peak() as peak:
            loss(model(call)).backward()
        assert peak.peak_bytes <= budget
    with pytest.raises(remat.BudgetTooSmall):
        model(batch(512))


class Factored(nn.Module):
    """Reads a float that is handed over, and one of its own."""

    def __init__(self, checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop, self.checkpointed = nn.Linear(8, 4), nn.Dropout(0.2), checkpointed
        self.count = 0

    def forward(self, x, factor):
        self.count += 1
        x = self.layer(x)
        x = checkpoint(self.drop, x, use_reentrant=False) if self.checkpointed else self.drop(x)
        return x.tanh() * factor


@pytest.mark.parametrize(
    ("budget", "checkpointed"), [pytest.param("1MiB", True, marks=pytest.mark.sweep), (1, False)]
)
def test_floats_that_torch_compile_leaves_open_are_read(budget, checkpointed):
    torch.compiler.reset()
    original, plain = Factored(checkpointed), Factored(checkpointed)
    options = {"budget": budget, "limit_seconds": LIMIT_SECONDS, "on_infeasible": "plain"}
    model = torch.compile(original, backend="remat", options=options)

    def call(m, step):
        (original if m is model else m).drop.p = 0.1 * step
        return m(batch(), 1.0 + 0.5 * (step % 3))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.BudgetWarning)
        assert_close(train(model, call, loss, steps=5), train(plain, call, loss, steps=5))
    assert original.count == plain.count == 5


def test_a_shape_with_the_same_operations_is_planned_without_solving():
    told = []
    model = remat.rematerialize(
        net(), batch(), budget=0.8, limit_seconds=LIMIT_SECONDS, progress=told.append
    )
    assert told
    for _ in range(2):  # it is found out that the output is let go of
        loss(model(batch())).backward()
    told.clear()
    for size in (64, 48):
        loss(model(batch(size))).backward()
        assert model.plan.solution.solver == "known schedule"
        assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    assert not told


def test_a_size_whose_operators_take_more_than_is_estimated_is_planned_by_measured_costs():
    """Making a matrix orthogonal takes several times what the rest of the step does."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 32),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(32, 32)),
        parametrizations.orthogonal(nn.Linear(32, 32)),
    )
    budget = 232_920  # storing everything takes a little more
    model = remat.rematerialize(model, budget=budget, limit_seconds=LIMIT_SECONDS)
    for size in (8, 5):
        loss(model(torch.randn(size, 32))).backward()
        assert model.plan.measured_peak_bytes <= budget


@pytest.mark.sweep
def test_what_an_output_let_go_of_leaves_free_is_planned_for():
    class WithLogits(nn.Module):
        def __init__(self):
            super().__init__()
            layers = (
                nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.GELU(), nn.Linear(32, 8))
                for _ in range(3)
            )
            self.body, self.head = nn.Sequential(*layers), nn.Linear(8, 40)

        def forward(self, x):
            logits = self.head(self.body(x))
            return logits.mean(), logits

    model = remat.rematerialize(WithLogits(), budget=0.7, limit_seconds=LIMIT_SECONDS)
    plans = []
    for size in (96, 96, 96, 64):
        model(batch(size))[0].backward()
        plans.append(model.plan)
    first, second, third, other_size = plans
    assert first.recomputations > second.recomputations
    assert second.kinds[0].released_outputs
    assert second.solution.solver != "known schedule"
    assert third is second
    assert other_size.solution.solver == "known schedule"


def test_every_plan_is_kept():
    model = planned(nn.Linear(8, 4), budget="1MiB")
    plans = {32: model.plan}
    for size in range(2, 14):
        model(batch(size))
        plans[size] = model.plan
    assert len({id(plan) for plan in plans.values()}) == 13
    for size, plan in plans.items():
        model(batch(size))
        assert model.plan is plan


def test_an_input_that_requires_a_gradient_where_the_example_did_not():
    model, eager = planned(), net()
    found = []
    for each in (model, eager):
        torch.manual_seed(1)
        x = batch().requires_grad_()
        loss(each(x)).backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_autocast_switched_on_later():
    model, eager = planned(), net()
    for each in (model, eager):
        loss(each(batch())).backward()
    outputs = []
    for each in (model, eager):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(each(batch()))
    assert outputs[0].dtype == torch.bfloat16
    torch.testing.assert_close(*outputs)


def test_other_memory_formats_and_types():
    convolution = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    image = torch.randn(2, 2, 8, 8)
    model = remat.rematerialize(convolution, image, budget=1.0, limit_seconds=LIMIT_SECONDS)
    first = model.plan
    expected = torch.autograd.grad(convolution(image).sum(), list(convolution.parameters()))
    other = image.to(memory_format=torch.channels_last)
    got = torch.autograd.grad(model(other).sum(), list(model.parameters()))
    assert model.plan is not first
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_another_budget_is_had_by_starting_from_the_original():
    original = net()
    model, other = planned(original, 1.0), planned(original, 0.7)
    assert other.plan.budget_bytes < model.plan.budget_bytes
    with pytest.raises(remat.RematError, match="rematerialized already; start from the original"):
        remat.rematerialize(model, batch(), budget=0.5)


def test_a_backward_over_other_outputs_is_run_within_the_budget_or_replanned():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Tanh())
            self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            x = self.trunk(x)
            return self.left(x), self.right(x)

    torch.manual_seed(0)
    original = Heads()
    model = remat.rematerialize(original, batch(), budget=0.8, limit_seconds=LIMIT_SECONDS)
    for attempt in range(3):
        model.zero_grad()
        try:
            model(batch())[0].square().mean().backward()
        except remat.BudgetExceeded:
            assert attempt == 0
            continue
        break
    got = [p.grad for p in model.parameters()]
    expected = torch.autograd.grad(
        original(batch())[0].square().mean(), list(original.parameters()), allow_unused=True
    )
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_new_sizes_are_traced_anew_without_a_word(caplog):
    model = remat.rematerialize(nn.Sequential(nn.Linear(4, 4)), budget="1MB", costs="estimate")
    for size in range(1, 12):
        model(torch.rand(size, 4)).sum().backward()
    assert "traced anew" not in caplog.text


class Giving(nn.Module):
    """Gives what it computes on the way, too, where it is asked to."""

    def __init__(self, breaks):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.breaks = breaks
        self.double()

    def forward(self, x, inner=0):
        hidden = nn.functional.gelu(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        out = self.second(hidden + hidden.sin())
        return out, *[hidden, out.exp()][:inner]


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize(
    "counts",
    [(1, 1, 1, 0, 0, 1, 0), pytest.param((2, 2, 2, 0, 0, 1, 1, 0, 2, 0), marks=pytest.mark.sweep)],
)
def test_calls_that_return_fewer_tensors_than_those_before(counts, breaks):
    """What steps have shown is of outputs by their positions: of other outputs it says nothing."""
    plain = Giving(breaks)
    model = remat.rematerialize(Giving(breaks), budget="1MiB", costs="estimate")
    x = torch.randn(32, 16).double()
    for count in counts:
        for each in (plain, model):
            each.zero_grad()
            sum(given.sum() for given in each(x, count)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


class InPlaces(Giving):
    """Computes with sizes, and gives one, too, beside an output that nobody differentiates."""

    def __init__(self):
        super().__init__(breaks=False)

    def forward(self, x, reads):
        hidden = nn.functional.gelu(self.first(x))
        if reads == "a size as one thing":
            hidden = hidden.view(torch.Size([*x.size()[:-1], 64]))
        if reads == "an assertion":
            torch._check(x.shape[0] <= 512)
        out = self.second(hidden)
        if reads == "a size that is given":
            return {"size": len(x), "logits": out, "loss": out.square().mean()}
        return {"logits": out, "loss": out.square().mean()}


@pytest.mark.parametrize("reads", ["a size as one thing", "an assertion", "a size that is given"])
def test_another_size_is_planned_for_what_the_first_has_shown(reads):
    """TorchDynamo's graph of a second size has nodes for numbers, which the first has not."""
    torch.compiler.reset()
    model = remat.rematerialize(InPlaces(), budget="1MiB", costs="estimate")
    plans = []
    for size in (24, 40, 40):
        model(torch.randn(size, 16).double(), reads)["loss"].backward()
        plans.append(model.plan)
    assert plans[2] is plans[1]
