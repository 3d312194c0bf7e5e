"""A forward that is set on a rematerialized model later, as trainers set it."""

import copy
import functools
import pickle
import threading
import types
import warnings

import pytest
import torch
from torch import nn

import remat

STEPS = 4


class Model(nn.Module):
    """A body and a head; draws, and counts its forwards."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3))
        )
        self.head = nn.Linear(16, 8)
        self.calls = 0

    def forward(self, x, fused=False):
        self.calls += 1
        return self.head(self.body(x + torch.rand_like(x)))


def submodules_in_place(model):
    """A loss that needs no output of the whole, after a draw, as TRL sets it."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, x, fused=False):
        if not fused:
            return original(x)
        x = x + torch.rand_like(x)
        return self.head(self.body(x)).square().mean(-1, keepdim=True)

    model.forward = types.MethodType(forward, model)


def something_around(model):
    """A cast of what is returned, as Accelerate sets it."""
    original = model.forward.__func__

    def forward(self, *args, **kwargs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return original(self, *args, **kwargs).float()

    model.forward = types.MethodType(forward, model)


def both(model):
    """One around the other."""
    submodules_in_place(model)
    something_around(model)


def both_turned(model):
    """The other around the one, which it calls now and then."""
    something_around(model)
    submodules_in_place(model)


def parameters_alone(model):
    """No submodule is called."""

    def forward(self, x, fused=False):
        return nn.functional.linear(x, self.head.weight, self.head.bias).sigmoid()

    model.forward = types.MethodType(forward, model)


def made():
    torch.manual_seed(0)
    return Model()


def train(model, ways, seen=None):
    """Give losses, gradients and draws of steps."""
    found = []
    torch.manual_seed(1)
    for fused in ways:
        x = torch.randn(64, 16)
        model.zero_grad()
        loss = model(x, fused=fused).square().mean()
        loss.backward()
        found += [
            loss.detach(),
            torch.rand(1),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]
        if seen is not None:
            seen.append(str(model.plan))
    return found


def assert_same(found, expected):
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", [submodules_in_place, pytest.param(both, marks=pytest.mark.sweep)])
def test_what_runs_the_submodules_is_planned_from_its_first_call_on(kind):
    eager = made()
    kind(eager)
    expected = train(eager, [True] * STEPS)
    model = remat.rematerialize(made(), budget=0.8, limit_seconds=0.1)
    entered = []
    model.register_forward_pre_hook(lambda *_: entered.append(1))
    kind(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(model, [True] * STEPS), expected)
    assert len(entered) == STEPS
    assert model.plan.recomputations > 0
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    with torch.no_grad():
        assert model(torch.randn(3, 16)).shape == (3, 8)


def test_what_calls_the_planned_forward_stays_around_it():
    eager = made()
    something_around(eager)
    expected = train(eager, [False] * STEPS)
    model = remat.rematerialize(made(), budget=0.8, limit_seconds=0.1)
    something_around(model)
    around = model.forward
    assert_same(train(model, [False] * STEPS), expected)
    assert model.__dict__["forward"] == around
    assert model.plan.recomputations > 0
    assert model.calls == eager.calls


def test_one_that_does_either_is_planned_for_both():
    ways = [False, True, True, False, True]
    eager = made()
    submodules_in_place(eager)
    expected = train(eager, ways)
    model = remat.rematerialize(made(), budget=1.0, limit_seconds=0.1)
    submodules_in_place(model)
    with pytest.warns(remat.BudgetWarning, match="ran as it is, over any budget") as told:
        assert_same(train(model, ways), expected)
    assert len(told) == 1
    assert model.calls == eager.calls


@pytest.mark.parametrize(
    "kind", [pytest.param(submodules_in_place, marks=pytest.mark.sweep), both_turned]
)
def test_one_that_begins_with_the_submodules_is_planned_for_both(kind):
    ways = [True, False, False, True]
    eager = made()
    kind(eager)
    expected = train(eager, ways)
    model = remat.rematerialize(made(), budget=1.0, limit_seconds=0.1)
    kind(model)
    plans = []
    assert_same(train(model, ways, plans), expected)
    assert all("peak, measured" in plan for plan in plans)


def test_one_that_uses_parameters_alone_is_told_of_and_then_planned():
    eager = made()
    parameters_alone(eager)
    expected = train(eager, [True] * STEPS)
    model = remat.rematerialize(made(), budget="1MiB", limit_seconds=0.1)
    parameters_alone(model)
    with pytest.warns(remat.BudgetWarning, match="ran as it is, over any budget"):
        assert_same(train(model, [True] * STEPS), expected)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


def test_one_is_set_over_another():
    eager = made()
    submodules_in_place(eager)
    expected = train(eager, [True] * 2)
    something_around(eager)
    expected += train(eager, [True] * 2)
    model = remat.rematerialize(made(), budget=0.8, limit_seconds=0.1)
    submodules_in_place(model)
    found = train(model, [True] * 2)
    something_around(model)
    assert_same(found + train(model, [True] * 2), expected)


def test_an_error_before_any_submodule_leaves_all_as_it_was():
    model = remat.rematerialize(made(), budget=0.8, limit_seconds=0.1)
    submodules_in_place(model)
    set_later = model.__dict__["forward"]
    with pytest.raises(TypeError):
        model("no tensor", fused=True)
    assert model.__dict__["forward"] is set_later
    assert not any(part._forward_pre_hooks for part in model.body.modules())
    eager = made()
    submodules_in_place(eager)
    assert_same(train(model, [True] * 2), train(eager, [True] * 2))


def test_a_copy_of_one_whose_forward_was_set_trains_and_so_does_what_was_pickled():
    model = remat.rematerialize(made(), budget=0.8, limit_seconds=0.1)
    again = pickle.loads(pickle.dumps(model))
    assert_same(train(again, [False] * 2), train(made(), [False] * 2))
    submodules_in_place(model)
    train(model, [True])
    other, eager = copy.deepcopy(model), made()
    submodules_in_place(eager)
    assert_same(train(other, [True] * 2), train(eager, [True] * 2))
    assert other.plan.recomputations > 0


def test_regions_have_their_own_forwards():
    eager = made()
    submodules_in_place(eager)
    model = remat.rematerialize(made(), budget=1.0, regions="body.*", limit_seconds=0.1)
    submodules_in_place(model)
    assert_same(train(model, [True] * STEPS), train(eager, [True] * STEPS))
    assert "3 calls of regions" in str(model.plan)


def test_it_is_rematerialized_whatever_was_set():
    model = remat.rematerialize(made(), budget=0.8, limit_seconds=0.1)
    submodules_in_place(model)
    with pytest.raises(remat.RematError, match="rematerialized already"):
        remat.rematerialize(model, budget=0.8)


def catches_all(model):
    """A layer that fails is left out, whatever it raises."""

    def forward(self, x, fused=False):
        for layer in (*self.body, self.head):
            try:
                x = layer(x)
            except BaseException:
                x = x * 0
        return x

    model.forward = types.MethodType(forward, model)


def a_teacher_first(model):
    """A pass without gradients, a buffer and a counter come before any layer trains."""
    original = model.forward

    def forward(self, x, fused=False):
        with torch.no_grad():
            target = original(x)
            self.mean.lerp_(x.mean(0), 0.1)
        self.calls += 1
        return self.head(self.norm(self.body(x - self.mean))) - target * self.calls

    model.register_buffer("mean", torch.zeros(16))
    model.norm = nn.BatchNorm1d(16)
    model.forward = types.MethodType(forward, model)


def in_a_thread(model):
    """The planned one runs in another thread."""
    original = model.forward

    def forward(x, fused=False):
        found = []
        thread = threading.Thread(target=lambda: found.append(original(x)))
        thread.start()
        thread.join()
        return found[0]

    model.forward = forward


@pytest.mark.parametrize("kind", [catches_all, a_teacher_first, in_a_thread])
def test_the_first_call_leaves_no_trace(kind):
    eager = made()
    kind(eager)
    model = made()
    if kind is a_teacher_first:
        model.register_buffer("mean", torch.zeros(16))
        model.norm = nn.BatchNorm1d(16)
    model = remat.rematerialize(model, budget=1.0, limit_seconds=0.1)
    kind(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(model, [True] * 3), train(eager, [True] * 3))
    assert_same([*model.buffers()], [*eager.buffers()])
    assert model.calls == eager.calls
    assert "peak, measured" in str(model.plan)


def test_one_that_is_set_around_itself_runs_as_often():
    eager, model = made(), remat.rematerialize(made(), budget=1.0, limit_seconds=0.1)
    found = []
    for each in (eager, model):
        for _ in range(2):
            submodules_in_place(each)
            found.append(train(each, [True, False]))
    for at in range(2):
        assert_same(found[2 + at], found[at])
    assert model.calls == eager.calls


def test_forwards_that_are_set_in_turn_are_planned_once():
    eager = made()
    expected = []
    model = remat.rematerialize(made(), budget=0.9, limit_seconds=0.1)
    first, found, plans = model.forward, [], []
    for fused in [True, False] * 3:
        for each, results in ((eager, expected), (model, found)):
            if fused:
                submodules_in_place(each)
            elif each is eager:
                del each.forward
            else:
                each.forward = first
            torch.manual_seed(2)
            results.extend(train(each, [fused]))
        plans.append(model.plan)
    assert_same(found, expected)
    assert plans[5] is plans[3]
    del model.forward
    assert_same(train(model, [False]), train(made(), [False]))
    assert model.__dict__["forward"] is first
