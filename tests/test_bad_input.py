"""Bad input: an error of ours that says what would work, and an original that trains as before."""

import copy
import importlib.metadata

import pytest
import torch
from exec_cases.training import assert_bitwise_equal, train
from torch import nn

import remat
from remat_graph import plugins
from remat_solvers.core import store_all as plugin_module

LIMIT_SECONDS = 0.1


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 24),
        nn.Sigmoid(), nn.Linear(24, 4),
    )  # fmt: skip


def batch(size=32):
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(1))


def loss(output):
    return output.square().mean()


def trains_as_before(model, fresh, call=lambda m, _: m(batch())):
    assert "forward" not in vars(model)
    assert_bitwise_equal(train(model, call, loss), train(fresh, call, loss))


@pytest.fixture
def original():
    """A model that must train as a fresh one does after the test."""
    model = net()
    state = torch.get_rng_state()
    yield model
    assert torch.equal(torch.get_rng_state(), state)
    trains_as_before(model, net())


def rematerialize(model, args=None, **kwargs):
    kwargs.setdefault("budget", 0.8)
    args = (batch(),) if args is None else args
    return remat.rematerialize(model, args, limit_seconds=LIMIT_SECONDS, **kwargs)


class Branches(nn.Module):
    """Forward with control flow that depends on data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        y = self.layer(x)
        if y.sum() > 0:  # the line that the plan names
            return y
        return -y


def test_control_flow_that_depends_on_data_is_trained_and_the_plan_names_the_line():
    def call(m, step):
        return m(batch() * (-1) ** step)

    model = Branches()
    fresh, eager = copy.deepcopy(model), copy.deepcopy(model)
    made = rematerialize(model, budget="1MiB")
    assert_bitwise_equal(train(made, call, loss, steps=6), train(eager, call, loss, steps=6))
    assert f"{__file__}:" in made.plan.breaks[0]
    assert "if y.sum() > 0" in str(made.plan)
    assert made.plan.measured_peak_bytes <= made.plan.budget_bytes
    model.load_state_dict(fresh.state_dict())
    trains_as_before(model, fresh)


@pytest.mark.parametrize("budget", ["8 parsecs", "plenty", 0, -1, "-1GiB", 0.0, 1.5, None, [1]])
def test_a_budget_that_is_none(original, budget):
    with pytest.raises(remat.BudgetError, match="budget="):
        rematerialize(original, budget=budget)


def test_a_budget_that_is_too_small_names_one_that_is_not(original):
    with pytest.raises(remat.BudgetTooSmall, match="raise the budget") as error:
        rematerialize(copy.deepcopy(original), budget=2000)
    assert error.value.budget_bytes == 2000
    assert error.value.smallest_bytes > 2000
    assert error.value.least_bytes <= error.value.smallest_bytes
    model = rematerialize(copy.deepcopy(original), budget=error.value.smallest_bytes)
    assert model.plan.measured_peak_bytes <= error.value.smallest_bytes


def test_a_lazy_plan_that_fails_leaves_the_model_usable(original):
    model = remat.rematerialize(original, budget=2000, limit_seconds=LIMIT_SECONDS)
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(remat.BudgetTooSmall):
            model(batch())
    with torch.no_grad():
        assert torch.equal(model.eval()(batch()), original.eval()(batch()))
    original.train()
    torch.set_rng_state(state)


def test_example_inputs_on_another_device(original):
    with pytest.raises(RuntimeError, match=r"cpu is not on the expected device meta"):
        rematerialize(original, (batch().to("meta"),))


def test_costs_cannot_be_measured_on_the_meta_device():
    with pytest.raises(remat.CaptureError, match=r"measured on the meta device, or of fake"):
        remat.plan(net().to("meta"), (batch().to("meta"),), budget=0.5)


def test_no_parameter_that_requires_a_gradient_runs_plain_until_one_does():
    model, fresh = net().requires_grad_(False), net()
    made = rematerialize(model)
    assert "not made yet" in str(made.plan)
    record = run_plain(made)
    assert "not made yet" in str(made.plan)
    expected = run_plain(fresh.requires_grad_(False))
    for ours, theirs in zip(record, expected, strict=True):
        assert torch.equal(ours, theirs)
    made.requires_grad_(True)
    fresh.requires_grad_(True)
    call = (lambda m, _: m(batch()), loss)
    assert_bitwise_equal(train(made, *call), train(fresh, *call))
    assert made.plan.measured_peak_bytes <= made.plan.budget_bytes
    model.load_state_dict(net().state_dict())
    trains_as_before(model, net())


def run_plain(model):
    """Run two forwards; give what they return, the buffers and the random state after them."""
    torch.manual_seed(0)
    outputs = [model(batch()), model(batch())]
    assert not any(output.requires_grad for output in outputs)
    return [*outputs, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


def test_an_output_that_depends_on_no_parameter_runs_plain():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return x * 2

    model = rematerialize(Constant())
    output = model(batch())
    assert not output.requires_grad
    assert torch.equal(output, batch() * 2)
    assert "not made yet" in str(model.plan)


def test_an_unknown_solver(original):
    with pytest.raises(remat.SolverError, match=r"no solver is called 'refin'; did you mean 'ref"):
        rematerialize(original, solver="refin")


def test_an_unknown_capture_or_executor(original):
    with pytest.raises(remat.CaptureError, match=r"no capture is called 'aott'; did you mean 'aot"):
        rematerialize(original, capture="aott")
    with pytest.raises(
        remat.ExecutionError, match=r"no executor is called 'eager'; installed are:"
    ):
        rematerialize(original, executor="eager")


class OverBudget(plugin_module.StoreAll):
    """A third party's solver that stores everything, whatever the budget."""

    def solve(self, problem, limit, report):
        import dataclasses

        roomy = dataclasses.replace(problem, budget_bytes=10**12)
        return dataclasses.replace(super().solve(roomy, limit, report), peak_bytes=1)


class Failing(plugin_module.StoreAll):
    """A third party's solver that fails."""

    def solve(self, problem, limit, report):
        raise KeyError("boom")


@pytest.fixture
def third_party(monkeypatch):
    """Offer solvers of this module, and one that does not import, by entry points."""
    installed = importlib.metadata.entry_points
    plugin_module.OverBudget, plugin_module.Failing = OverBudget, Failing
    points = [
        importlib.metadata.EntryPoint(name, f"remat_solvers.{target}", "remat.solvers")
        for name, target in (
            ("over", "core.store_all:OverBudget"), ("failing", "core.store_all:Failing"),
            ("missing", "nowhere:Nothing"),
        )
    ]  # fmt: skip

    def entry_points(**params):
        found = installed(**params)
        if params.get("group") == "remat.solvers":
            return importlib.metadata.EntryPoints([*found, *points])
        return found

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    plugins._find_on.cache_clear()
    yield
    plugins._find_on.cache_clear()
    del plugin_module.OverBudget, plugin_module.Failing


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(
    ("solver", "message"),
    [("over", "over the budget"), ("failing", "KeyError"), ("missing", "does not load")],
)
def test_a_broken_solver_of_a_third_party_is_named(original, solver, message):
    assert solver in remat.list_solvers()
    with pytest.raises(remat.SolverError, match=f"solver '{solver}' of .*{message}"):
        rematerialize(original, solver=solver)


@pytest.mark.usefixtures("third_party")
def test_a_broken_solver_disturbs_no_other(original):
    assert rematerialize(copy.deepcopy(original)).plan.recomputations >= 0


def test_a_second_backward(original):
    model = rematerialize(copy.deepcopy(original))
    torch_state = torch.get_rng_state()
    output = loss(model(batch()))
    output.backward(retain_graph=True)
    with pytest.raises(remat.BackwardError, match="run forward again"):
        output.backward()
    torch.set_rng_state(torch_state)


def test_a_batch_of_another_shape_that_the_model_cannot_take(original):
    model = rematerialize(copy.deepcopy(original))
    plan, state = model.plan, torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 9, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    call = (lambda m, _: m(batch()), loss)
    assert_bitwise_equal(train(model, *call), train(net(), *call))
    assert model.plan is plan
    torch.set_rng_state(state)


class Picky(nn.Module):
    """Forward that raises an error of its own for some batches."""

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x):
        if len(x) != 32:
            raise ValueError(f"a batch of {len(x)} is not 32")
        return self.layers(x)


class Masked(nn.Module):
    """Adds what may not fit; masks by tensors as indices, at which TorchDynamo's tracing fails."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y, at=None):
        x = self.first(x).tanh() + y
        if at is not None:
            mask = torch.ones(4, 8, dtype=torch.bool)
            mask[at.argmax(), at.argmin()] = False
            x = x * mask
        return self.last(x)


def test_sizes_that_do_not_fit_together_are_told_as_by_eager_and_change_no_plan():
    model = remat.rematerialize(Masked(), budget="1MiB", costs="estimate")
    x = torch.ones(4, 8)
    for _ in range(4):
        with pytest.raises(RuntimeError, match=r"size of tensor a \(4\) must match .* b \(3\)"):
            model(x, torch.ones(3, 8))
    loss(model(x, x)).backward()
    assert model.plan.is_one_region, "planned in parts after what was the user's error"


def test_what_dynamo_fails_to_trace_runs_as_it_is_and_the_rest_by_plans():
    plain, original = Masked(), Masked()
    model = remat.rematerialize(original, budget="1MiB", costs="estimate")
    call = lambda m, _: m(torch.ones(4, 8), torch.ones(4, 8), torch.arange(3.0))  # noqa: E731
    assert_bitwise_equal(train(model, call, loss), train(plain, call, loss))


@pytest.mark.parametrize("example", [None, batch()], ids=["planned later", "planned before"])
def test_an_error_of_the_forward_is_the_users_own_and_training_goes_on(example):
    def call(m, step):
        if step == 1:
            with pytest.raises(ValueError, match="a batch of 5 is not 32"):
                m(batch(5))
        return m(batch())

    model = remat.rematerialize(Picky(), example, budget=0.8, limit_seconds=LIMIT_SECONDS)
    assert_bitwise_equal(train(model, call, loss, steps=3), train(Picky(), call, loss, steps=3))
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


def test_an_error_of_the_forward_in_an_example_call_is_the_users_own():
    model = Picky()
    with pytest.raises(ValueError, match="a batch of 5 is not 32"):
        rematerialize(model, batch(5))
    trains_as_before(model, Picky())


def test_a_model_in_eval_mode_is_planned_as_it_is():
    model, eager = net().eval(), net().eval()
    made = rematerialize(model, budget=1.0)
    plan = made.plan
    call = (lambda m, _: m(batch()), loss)
    assert_bitwise_equal(train(made, *call), train(eager, *call))
    assert made.plan is plan
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert int(made[1].num_batches_tracked) == 0


def test_something_that_is_no_module():
    with pytest.raises(remat.RematError, match=r"need a torch\.nn\.Module, not a function"):
        rematerialize(net)


def test_costs_that_are_none(original):
    with pytest.raises(remat.CaptureError, match="costs='guess'"):
        rematerialize(original, costs="guess")


def test_progress_that_fails_is_the_users_own_error(original):
    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rematerialize(original, progress=fail)


def test_a_negative_time_limit(original):
    with pytest.raises(remat.SolverError, match="limit_seconds=-1"):
        remat.rematerialize(original, batch(), budget=0.8, limit_seconds=-1)
