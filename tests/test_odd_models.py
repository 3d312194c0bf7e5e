"""Models as people write them: the right result, or an error of ours that says why not."""

import copy
import random

import numpy as np
import pytest
import torch
from exec_cases.training import assert_bitwise_equal, assert_close, train
from integration_cases.made import Made, linear, rows, squares
from integration_cases.odd_models import IN_PARTS, REFUSED, RIGHT
from integration_cases.sweeps import swept
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat

LIMIT_SECONDS = 0.1


def rematerialized(model, args, kwargs):
    try:
        return remat.rematerialize(model, args, kwargs, budget=0.6, limit_seconds=LIMIT_SECONDS)
    except remat.BudgetTooSmall as error:
        enough = int(1.05 * error.smallest_bytes)  # found in half a second this time, too
        return remat.rematerialize(model, args, kwargs, budget=enough, limit_seconds=LIMIT_SECONDS)


ONE_OF_A_KIND = (
    "codes that are overwritten, and a scalar beside the output", "lstm",
    "made to require a gradient", "complex", "checkpoint inside", "custom function", "views",
    "bfloat16", "norms under autocast", "channels last", "draws of every kind", "experts",
    "rolling buffer",
    "assigned in place", "gradient inside", "unused parameter", "stopped gradient",
    "hook on a tensor", "expanded input", "detached and changed by what it was detached from",
    "buffer returned",
)  # fmt: skip
ONE_OF_A_KIND_IN_PARTS = (
    "reentrant checkpoint", "rows chosen by data",
    "old spectral norm", "tensor from outside",
    "compiled inside", "branch in a checkpoint", "loop over data", "stored tensor and counter",
    "layers dropped by python's random numbers",
)  # fmt: skip


@pytest.mark.parametrize("name", swept(RIGHT, ONE_OF_A_KIND))
@pytest.mark.filterwarnings(
    "ignore:(a step took|step 1 took|no plan leaves room):remat.BudgetWarning"
)
def test_trains_as_eager_does(name):
    make, args, kwargs, loss = RIGHT[name]
    torch.manual_seed(0)
    original = make().train()
    records = []
    for model in (rematerialized(copy.deepcopy(original), args, kwargs), original):
        records.append(train(model, lambda m, _: m(*args, **kwargs), loss))
    low = any(p.dtype in (torch.bfloat16, torch.half) for p in original.parameters())
    assert_close(*records, rtol=2e-2 if low else 1e-4)


@pytest.mark.parametrize("name", swept(IN_PARTS, ONE_OF_A_KIND_IN_PARTS))
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.(spectral|weight)_norm` is .*deprecated")
def test_trains_in_parts_as_eager_does(name):
    """Six steps: the plan for several regions is made after the first or second."""
    make, x = IN_PARTS[name]
    records, models, random_states = [], [], []
    for rematerialize in (True, False):
        torch.manual_seed(0)
        model = make().train()
        random.seed(5)
        np.random.seed(5)
        if rematerialize:
            before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
            state = copy.deepcopy(model.state_dict())
            model = remat.rematerialize(model, x, budget="1MiB", limit_seconds=LIMIT_SECONDS)
            assert random.getstate() == before[0]
            assert np.array_equal(np.random.get_state()[1], before[1])
            assert torch.equal(torch.get_rng_state(), before[2])
            assert all(torch.equal(t, state[key]) for key, t in model.state_dict().items())
        records.append(train(model, lambda m, _: m(x), first_squares, steps=6))
        models.append(model)
        random_states.append((random.getstate(), np.random.get_state()[1]))
    assert_close(*records)
    assert random_states[0][0] == random_states[1][0]
    assert np.array_equal(random_states[0][1], random_states[1][1])
    for key in ("calls", "last", "average", "kept"):
        if hasattr(models[1], key):
            torch.testing.assert_close(getattr(models[0], key), getattr(models[1], key))
    plan = models[0].plan  # of a pattern that never comes again, it is not measured
    assert (plan.measured_peak_bytes or plan.predicted_peak_bytes) <= plan.budget_bytes


@pytest.fixture
def compiled_by_others():
    """Compiles a model by torch alone, which passes its code by from then on."""
    yield lambda model, x: first_squares(torch.compile(model, backend="eager")(x)).backward()
    torch.compiler.reset()


def test_code_that_another_compilation_passes_by_is_planned(compiled_by_others):
    make, x = IN_PARTS["loop over data"]
    compiled_by_others(make().train(), x)
    torch.manual_seed(0)
    model = remat.rematerialize(make().train(), budget="1MiB", limit_seconds=LIMIT_SECONDS)
    for _ in range(2):
        for _ in range(3):
            first_squares(model(x)).backward()
        assert "calls of regions" in str(model.plan)
        calls = len(model.plan.calls)
        compiled_by_others(make().train(), x)
    assert calls == len(model.plan.calls)


def first_squares(output):
    return squares(output[0] if isinstance(output, tuple) else output)


def test_a_returned_value_requires_a_gradient_of_its_own():
    make, x = IN_PARTS["made to require a gradient, and returned"]
    torch.manual_seed(0)
    eager = make()
    model = remat.rematerialize(copy.deepcopy(eager), budget="1MiB", limit_seconds=LIMIT_SECONDS)
    for _ in range(3):
        gradients = []
        for each in (model, eager):
            output, derived, leaf = each(x)
            (squares(output) + squares(derived)).backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)


@pytest.mark.sweep
def test_parts_are_computed_again_within_the_budget():
    def made():
        torch.manual_seed(0)
        return nn.Sequential(
            *(Made(halves, first=linear(64, 64), second=linear(64, 64)) for _ in range(4))
        )

    def halves(m, x):
        for layer in (m.first, m.first, m.second):
            x = torch.tanh(torch.sin(layer(x)))
        torch._dynamo.graph_break()
        return x + torch.exp(torch.sin(m.second(x)))

    x = rows(64, 64)
    roomy = remat.rematerialize(made(), x, budget="16MiB", limit_seconds=LIMIT_SECONDS)
    train(roomy, lambda m, _: m(x), squares, steps=4)
    budget = int(0.75 * roomy.plan.measured_peak_bytes)
    model = remat.rematerialize(made(), x, budget=budget, limit_seconds=LIMIT_SECONDS)
    records = [train(each, lambda m, _: m(x), squares, steps=6) for each in (model, made())]
    assert_bitwise_equal(*records)
    assert model.plan.predicted_overhead > 0
    assert model.plan.measured_peak_bytes <= budget
    model.zero_grad()
    with remat.measure_peak() as peak:
        squares(model(x)).backward()
    assert peak.peak_bytes <= budget


def one_more(y):
    y.register_hook(lambda gradient: gradient + 1)
    return y


@pytest.mark.parametrize(
    "operator",
    [lambda y: torch.where(y > 0, y, 0.1 * y), lambda y: y.cumsum(-1), one_more],
    ids=["where", "cumsum", "hook"],
)
def test_a_parameter_behind_an_output_outside_the_loss_has_no_gradient(operator):
    def forward(m, x):
        return m.used(x), operator(m.unused(x))

    model = Made(forward, used=linear(), unused=linear())
    model = remat.rematerialize(model, rows(), budget="1MiB", limit_seconds=LIMIT_SECONDS)
    for _ in range(3):  # the first backward shows which outputs get a gradient
        squares(model(rows())[0]).backward()
        assert model.used.weight.grad is not None
        assert model.unused.weight.grad is None


def test_a_checkpointed_batch_norm_counts_each_batch_once():
    """In eager the checkpoint counts it again in the backward; a traced one does not."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16)
    model = Made(
        lambda m, x: checkpoint(m.norm, m.layer(x), use_reentrant=False), layer=linear(), norm=norm
    )
    plain = Made(lambda m, x: m.norm(m.layer(x)), layer=model.layer, norm=norm)
    plain = copy.deepcopy(plain)
    model = remat.rematerialize(model, rows(), budget=1.0, limit_seconds=LIMIT_SECONDS)
    records = [train(each, lambda m, _: m(rows()), squares) for each in (model, plain)]
    assert_bitwise_equal(*records)


@pytest.mark.parametrize("example", [(), (rows(),)], ids=["at first", "of an example"])
def test_an_uninitialised_layer_is_planned_once_it_has_a_shape(example):
    records = []
    for rematerialize in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(linear(), nn.Tanh(), nn.LazyLinear(4))
        if rematerialize:
            lazy, options = model[2], {"budget": "1MiB", "limit_seconds": LIMIT_SECONDS}
            model = remat.rematerialize(model, *example, **options)
            assert type(lazy) is nn.LazyLinear
            assert lazy.has_uninitialized_params()
        model(rows())
        records.append(train(model, lambda m, _: m(rows()), squares))
        if rematerialize:
            assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    assert_bitwise_equal(*records)


def test_a_layer_is_made_at_the_first_call():
    def forward(model, x):
        if not hasattr(model, "act"):
            model.act = nn.Tanh()
        return model.act(model.layer(x))

    plain = Made(forward, layer=linear())
    model = remat.rematerialize(copy.deepcopy(plain), budget="1MiB", limit_seconds=LIMIT_SECONDS)
    records = [train(each, lambda m, _: m(rows()), squares) for each in (model, plain)]
    assert_bitwise_equal(*records)


@pytest.mark.parametrize(("make", "x", "message"), REFUSED.values(), ids=REFUSED)
def test_is_refused_with_a_reason_and_trains_on(make, x, message):
    torch.manual_seed(0)
    original = make().train()
    with pytest.raises(remat.CaptureError, match=message):
        remat.rematerialize(original, x, budget=0.6, limit_seconds=LIMIT_SECONDS)
    original(x).sum().backward()
    assert any(parameter.grad is not None for parameter in original.parameters())


@pytest.mark.sweep
def test_the_last_batch_is_smaller():
    torch.manual_seed(0)
    original = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.1), linear(16, 4))
    batches = [rows(64, 16), rows(64, 16), rows(3, 16)]
    records = [
        train(model, lambda m, step: m(batches[step]), squares, steps=3)
        for model in (rematerialized(copy.deepcopy(original), (batches[0],), {}), original)
    ]
    assert_close(*records)


def test_gradients_accumulate_over_batches_and_are_scaled_in_place():
    torch.manual_seed(0)
    original = nn.Sequential(linear(), nn.Tanh(), linear(16, 4))
    found = []
    for model in (rematerialized(copy.deepcopy(original), (rows(),), {}), original):
        for _ in range(3):
            squares(model(rows())).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        found.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_unit_of_a_larger_model_is_rematerialized():
    torch.manual_seed(0)
    original = nn.Sequential(linear(), nn.Sequential(linear(), nn.Tanh(), linear()), linear(16, 4))
    model = copy.deepcopy(original)
    model[1] = remat.rematerialize(model[1], budget=0.9, limit_seconds=LIMIT_SECONDS)
    records = [train(each, lambda m, _: m(rows()), squares) for each in (model, original)]
    assert_close(*records)
    assert model[1].plan.measured_peak_bytes <= model[1].plan.budget_bytes


def test_a_model_with_rematerialized_units_is_rematerialized_as_one():
    torch.manual_seed(0)
    original = nn.Sequential(linear(), nn.Sequential(linear(), nn.Tanh(), linear()), linear(16, 4))
    model = copy.deepcopy(original)
    unit = model[1] = remat.rematerialize(model[1], budget=0.9, limit_seconds=LIMIT_SECONDS)
    forward = unit.forward
    whole = rematerialized(model, (rows(),), {})
    records = [train(each, lambda m, _: m(rows()), squares) for each in (whole, original)]
    assert_close(*records)
    assert unit.forward is forward


def test_a_number_that_is_no_number_is_planned_for_once():
    def scaled(m, x, limit):
        return m.layer(x) * (2.0 if limit != limit else 1.0)  # noqa: PLR0124

    model = rematerialized(Made(scaled, layer=linear()), (rows(), float("nan")), {})
    plan = model.plan
    model(rows(), float("nan"))
    assert model.plan is plan
    model(rows(), 1.0)
    assert model.plan is not plan


def test_a_loss_of_torch_that_looks_at_its_input_is_planned_around_that():
    torch.manual_seed(0)
    x, y = torch.randn(32, 8, requires_grad=True), torch.randn(32, 8)
    variance = torch.rand(32, 8)
    nn.GaussianNLLLoss()(x, y, variance).backward()
    expected, x.grad = x.grad, None
    model = remat.rematerialize(nn.GaussianNLLLoss(), budget=10**6)
    model(x, y, variance).backward()
    assert torch.equal(x.grad, expected)


def test_a_forward_of_views_alone_needs_no_plan():
    x = torch.ones(4, 2, 3, requires_grad=True)
    model = remat.rematerialize(nn.Flatten(), x, budget="1MiB")
    (3 * model(x)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
    assert "not made yet" in str(model.plan)
    assert remat.rematerialize(nn.Identity(), budget="1MiB")(x) is x


def test_what_cannot_be_planned_at_all_says_why():
    model = remat.rematerialize(nn.CTCLoss(), budget=10**6)
    scores = torch.randn(12, 2, 5).log_softmax(2).requires_grad_()
    lengths = torch.full((2,), 12), torch.full((2,), 3)
    with pytest.raises(remat.RematError, match=r"ctc_loss\.\w+`'s output shape depends"):
        model(scores, torch.randint(1, 5, (2, 3)), *lengths)
