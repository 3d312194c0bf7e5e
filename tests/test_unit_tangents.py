"""Cuts that make their gradients in the forward: those of the whole, for every tangent."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integration_cases.language import Language
from integration_cases.sliced_models import MODELS, built
from integration_cases.sweeps import swept
from torch import nn
from torch.nn import functional

import remat
from remat.planning.slices import programs_by_cuts
from remat_exec import BackwardError, Executable, MemoryChanged, measure_peak
from remat_graph import Compute, Numerics, simulate
from remat_graph.torch import capture, stretch_from
from remat_graph.torch.slices.placement import Sliced
from remat_graph.torch.ways import unit_tangent
from remat_solvers import store_all

TANGENTS = (1.0, 0.0, -3.0, 2.0**40, math.inf, -math.inf, math.nan)
MADE_AGAIN = {  # two numbers come from outside; a loss apart
    "smoothed labels", "attention", "large scores cost", "focal loss", "entropy beside",
    "straight-through choice",
}  # fmt: skip


def with_gradients(able):
    return [kind for kind, cuts in enumerate(able.cuts) if cuts[0].unit is not None]


def able_to(model, args, costs="estimate"):
    captured = capture(model, args, {}, costs=costs)
    return captured.with_alternatives(Numerics.ROUNDING, laid_out=())


def gradients(run, model, args, tangent=1.0):
    model.zero_grad(set_to_none=True)
    run(*args).backward(torch.tensor(tangent, dtype=torch.float64))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", swept(MODELS, ["head", "smoothed labels", "attention", "images"]))
def test_gradients_made_in_the_forward_are_those_of_the_whole(name):
    model, args = built(name)
    able = able_to(model, args, "measure")
    kinds = with_gradients(able)
    assert bool(kinds) == (name not in MADE_AGAIN)
    for count in (1, 2, 5) if kinds else ():
        sliced = able.in_slices([(kind, count) for kind in kinds])
        executable = Executable(sliced, store_all(sliced.graph))
        predicted = simulate(sliced.graph, executable.schedule).peak_bytes
        for tangent in TANGENTS:
            expected = gradients(model, model, args, tangent)
            with measure_peak() as peak:
                found = gradients(lambda *x: executable(model, list(x))[0], model, args, tangent)  # noqa: B023
            assert peak.peak_bytes <= predicted + 4096
            size = abs(tangent) if math.isfinite(tangent) else 1.0
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=1e-12, atol=1e-13 * max(1.0, size), equal_nan=True
                )


def test_the_loss_is_made_once_and_scaled_in_place():
    model, args = built("head")
    able = able_to(model, args)
    (kind,) = with_gradients(able)
    sliced = able.in_slices([(kind, 4)])
    program, schedule = sliced.program, store_all(sliced.graph)
    assert not any("mm" in op and "scaled" not in op for op in program.backward_ops)
    source = Executable(sliced, schedule).source
    assert source.count("scaled_in_place") == 3  # of the head's weight, and of the norm's two
    assert sum(step == Compute("getitem_4__total") for step in schedule.steps) == 1


class Clipped(torch.autograd.Function):
    """The same in the forward; in the backward no gradient is above one half."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(max=0.5)


class Head(nn.Module):
    """A linear layer and a loss of its scores."""

    def __init__(self, loss):
        super().__init__()
        self.out = nn.Linear(8, 200, bias=False)
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.out(x), y)


def head(loss, dtype=torch.float64):
    torch.manual_seed(0)
    return Head(loss).to(dtype), (torch.randn(12, 8, dtype=dtype), torch.randint(200, (12,)))


@pytest.mark.parametrize(
    ("loss", "dtype", "expected"),
    [
        (functional.cross_entropy, torch.float64, True),
        (functional.cross_entropy, torch.bfloat16, True),
        # its small gradients are what a scaled loss is for
        (functional.cross_entropy, torch.float16, False),
        (lambda x, y: functional.cross_entropy(x.float(), y), torch.float16, False),
        (lambda x, y: functional.cross_entropy(Clipped.apply(x), y), torch.float64, False),
        (lambda x, y: functional.cross_entropy(x, y, reduction="sum"), torch.float64, True),
        (lambda x, y: 3 * functional.cross_entropy(x, y) + 1, torch.float64, True),
        (lambda x, y: functional.cross_entropy(x, y, reduction="none"), torch.float64, False),
    ],
    ids=["double", "bfloat16", "float16", "float16 cast", "clipped", "sum", "scaled loss",
         "a loss for each row"],
)  # fmt: skip
def test_where_gradients_can_be_made_in_the_forward(loss, dtype, expected):
    model, args = head(loss, dtype)
    able = able_to(model, args)
    assert able.cuts
    assert bool(with_gradients(able)) == expected


def test_what_the_loss_decides_is_not_there_before_it():
    def loss(x, y):
        loss = functional.cross_entropy(x, y)
        return torch.where(loss.detach() > 1, loss, 2 * loss)

    model, args = head(loss)
    program = able_to(model, args).program
    body = stretch_from(program, "mm", Sliced(0)).body
    assert "getitem" in body.body.outputs  # the loss
    assert unit_tangent._depend(program, {"gt"}, body)
    assert not unit_tangent._depend(program, set(body.body.inputs), body)


def test_a_kind_that_shares_ops_with_one_before_it_is_left_out():
    model, args = head(functional.cross_entropy)
    able = able_to(model, args)
    (kind,) = with_gradients(able)
    both = able.in_slices([(0, 4), (kind, 4)])
    assert both.program.calls.keys() == able.in_slices([(0, 4)]).program.calls.keys()


class RandomHead(nn.Module):
    """A head and a loss, of parts that are drawn."""

    def __init__(self, draw):
        super().__init__()
        of = lambda *choices: draw(st.sampled_from(choices))  # noqa: E731
        self.norm = of(nn.Identity, nn.LayerNorm, nn.RMSNorm)
        self.norm = self.norm(8) if self.norm is not nn.Identity else self.norm()
        self.first = nn.Linear(8, 8) if of(True, False) else nn.Identity()
        self.out = nn.Linear(8, 120, bias=of(True, False))
        self.cap, self.factor = of(None, 5.0), of(1.0, 0.5)
        self.options = {"reduction": of("mean", "sum"), "ignore_index": of(-100, 3)}
        self.weighted, self.beside = of(True, False), of(True, False)

    def forward(self, x, y, weight):
        hidden = torch.tanh(self.first(x))
        scores = self.out(self.norm(hidden)).flatten(0, -2) * self.factor
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        weight = weight if self.weighted else None
        loss = functional.cross_entropy(scores, y.flatten(), weight, **self.options)
        return loss + hidden.square().mean() if self.beside else loss


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_random_heads(data):
    check_random_head(data.draw)


@pytest.mark.sweep
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_many_random_heads(data):
    check_random_head(data.draw)


def check_random_head(draw):
    torch.manual_seed(draw(st.integers(0, 999)))
    model = RandomHead(draw).double()
    shape = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    x = torch.randn(*shape, 8, dtype=torch.float64)
    args = x, torch.randint(120, shape), torch.rand(120, dtype=torch.float64) + 0.1
    able = able_to(model, args)
    kinds = with_gradients(able)
    assert kinds
    sliced = able.in_slices([(kind, draw(st.integers(1, 15))) for kind in kinds])
    executable = Executable(sliced, store_all(sliced.graph))
    tangent = draw(st.sampled_from((*TANGENTS, 0.3)))
    expected = gradients(model, model, args, tangent)
    found = gradients(lambda *x: executable(model, list(x))[0], model, args, tangent)
    size = abs(tangent) if math.isfinite(tangent) else 1.0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-12, atol=1e-13 * max(1.0, size), equal_nan=True
        )


class Two(Language):
    """It returns its loss, another one and what both are made of."""

    def forward(self, ids):
        x = torch.tanh(self.down(functional.gelu(self.up(self.words(ids)))))
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss, x.square().mean(), x


@pytest.fixture(scope="module")
def two():
    """A model with two losses, the same under a plan, and its inputs."""
    torch.manual_seed(0)
    model = Two().double()
    with measure_peak() as peak:
        model(model.ids)[0].backward()
    model.zero_grad(set_to_none=True)
    budget = int(0.6 * peak.peak_bytes)
    planned = remat.rematerialize(
        copy.deepcopy(model),
        budget=budget,
        numerics="rounding",
        costs="estimate",
        limit_seconds=0.1,
    )
    planned(model.ids)[0].backward()
    assert "1 make gradients in the forward" in str(planned.plan)
    return model, planned, budget


def hidden(model, ids):
    loss, _, x = model(ids)
    (loss * x.sum()).backward()


def twice(model, ids):
    for _ in range(2):
        model(ids)[0].backward()


def scaled(model, ids):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(model(ids)[0]).backward()


def some(model, ids):
    weight = model.get_parameter("up.weight")
    (weight.grad,) = torch.autograd.grad(model(ids)[0], [weight])


LOOPS = {
    "the loss": lambda model, ids: model(ids)[0].backward(),
    "a tangent that is no number": lambda model, ids: (model(ids)[0] * math.inf).backward(),
    "the other loss": lambda model, ids: model(ids)[1].backward(),
    "the other loss after a plan for it": lambda model, ids: model(ids)[1].backward(),
    "both": lambda model, ids: sum(model(ids)[:2]).backward(),
    "gradients that reach the loss from elsewhere": hidden,
    "accumulation": twice,
    "a scaled loss": scaled,
    "some gradients": some,
}


@pytest.mark.parametrize(
    "loop",
    swept(LOOPS, ["a tangent that is no number"]),
)
def test_other_backwards_than_planned(two, loop):
    model, planned, budget = two
    for each in two[:2]:
        each.zero_grad(set_to_none=True)
        LOOPS[loop](each, model.ids)
    pairs = zip(planned.parameters(), model.parameters(), strict=True)
    for one, other in pairs:
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert planned.plan.measured_peak_bytes <= budget


def test_what_no_backward_may_do(two):
    model, planned, _ = two
    loss = planned(model.ids)[0]
    loss.backward()
    with pytest.raises(BackwardError, match="second time"):
        loss.backward()
    loss = planned(model.ids)[0]
    planned.head.weight.data.mul_(1.5)
    with pytest.raises(MemoryChanged):
        loss.backward()
    planned.head.weight.data.div_(1.5)


def test_another_backward_over_a_kept_graph(two):
    model, planned, _ = two
    for each in (model, planned):
        each.zero_grad()
    loss, expected = planned(model.ids)[0], model(model.ids)[0]
    for each in (loss, expected):
        each.backward(retain_graph=True)
        (each * 3).backward()
    for one, other in zip(planned.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a_plan_with_gradients_in_the_forward_is_followed(tmp_path):
    torch.manual_seed(0)
    model = Language()
    with measure_peak() as peak:
        model(model.ids).backward()
    model.zero_grad(set_to_none=True)
    budget = int(0.6 * peak.peak_bytes)
    with torch.device("meta"):
        meta = Language()
    ids = torch.empty(2, 64, dtype=torch.long, device="meta")
    options = {"numerics": "rounding", "limit_seconds": 0.1}
    planned = remat.plan(meta, (ids,), budget=budget, costs="estimate", **options)
    assert "1 make gradients in the forward" in str(planned)
    planned.save(tmp_path / "plan.json")
    followed = remat.rematerialize(
        copy.deepcopy(model), (model.ids,), plan=tmp_path / "plan.json", **options
    )
    with measure_peak() as peak:
        followed(model.ids).backward()
    assert peak.peak_bytes <= budget
    model(model.ids).backward()
    for one, other in zip(followed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_both_forms_are_planned_side_by_side():
    model, args = head(functional.cross_entropy)
    able = able_to(model, args)
    (kind,) = with_gradients(able)
    groups = programs_by_cuts(able, 1)
    assert [{k for k, _ in group.programs[0].sliced} for group in groups] == [{0}, {kind}]
    again, in_forward = (group.programs[0].graph for group in groups)
    assert in_forward.time < again.time
