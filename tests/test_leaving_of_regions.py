"""Gradients of several regions that hooks let go of at once."""

import warnings

import pytest
import torch
from torch import nn

import remat
from remat.errors import BudgetWarning
from remat_exec import measure_peak

WIDTH = 256
LAYER = (WIDTH + 1) * WIDTH * 4
HELD = 6 * LAYER  # by all gradients
TIGHT = 7 * LAYER // 2  # enough for those of one region alone
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))


def half():
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


class Halves(nn.Module):
    """Two regions; with a `tied` one the second runs the first layer again."""

    def __init__(self, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = half(), half()
        if tied:
            self.second[0] = self.first[0]

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().sum()


class Hooks:
    """Steps an optimizer in the backward, unless it `keeps` gradients."""

    keeps = False

    def __init__(self, module):
        for parameter in module.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.01)
            parameter.register_post_accumulate_grad_hook(lambda p, own=optimizer: self.step(p, own))

    def step(self, parameter, optimizer):
        if not self.keeps:
            optimizer.step()
            parameter.grad = None


def hooked(**options):
    eager, module = (Halves(**options) for _ in range(2))
    return eager, module, [Hooks(each) for each in (eager, module)]


def step(model):
    with measure_peak() as peak:
        model(X).backward()
    return peak.peak_bytes


def told_by(act):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", BudgetWarning)
        act()
    return " ".join(str(each.message) for each in found)


def check_alike(eager, module):
    for expected, given in zip(eager.parameters(), module.parameters(), strict=True):
        assert torch.equal(expected, given)
        assert (expected.grad is None) == (given.grad is None)
        assert expected.grad is None or torch.equal(expected.grad, given.grad)


def predicted(model):
    return model.plan.predicted_peak_bytes


@pytest.mark.parametrize(
    "regions",
    [None, pytest.param(["first", "second"], marks=pytest.mark.sweep)],
    ids=["a graph break", "regions="],
)
def test_they_are_seen_and_planned_for(regions):
    eager, module, _ = hooked()
    held = remat.rematerialize(Halves(), budget=4 * HELD, regions=regions, limit_seconds=0.1)
    model = remat.rematerialize(module, budget=4 * HELD, regions=regions, limit_seconds=0.1)
    for _ in range(4):
        step(eager)
        measured = step(model)
        step(held)
        held.zero_grad()
        check_alike(eager, module)
    assert "gradients leave" in str(model.plan)
    assert "12, 1.5 MiB" in str(model.plan)
    assert measured <= predicted(model) < predicted(held) - 4 * LAYER


def test_what_no_plan_with_the_gradients_of_a_region_reaches_is_reached():
    eager, module, _ = hooked()
    budget = int(2.5 * LAYER)  # the gradients of one region take three times that of a layer
    model = remat.rematerialize(module, budget=budget, limit_seconds=0.1)
    for at in range(5):
        step(eager)
        peaks = []
        told = told_by(lambda peaks=peaks: peaks.append(step(model)))
        assert bool(told) == (at == 1)  # of the first step
        assert not at or peaks[0] <= budget
        check_alike(eager, module)
    assert "gradients leave" in str(model.plan)
    assert predicted(model) <= budget


@pytest.mark.sweep
def test_those_that_stay_later_are_told_of_and_planned_for():
    eager, module, hooks = hooked()
    model = remat.rematerialize(module, budget=HELD + LAYER, limit_seconds=0.1)
    for _ in range(3):
        step(eager)
        step(model)
    low = predicted(model)
    assert low < TIGHT
    for each in hooks:
        each.keeps = True
    assert "gradients stayed" in told_by(lambda: step(model))
    step(eager)
    check_alike(eager, module)
    for _ in range(4):  # clipped, say, and stepped by hand
        for each in (eager, module):
            each.zero_grad()
        step(eager)
        assert step(model) <= HELD + LAYER
        check_alike(eager, module)
    assert "gradients leave" not in str(model.plan)
    assert predicted(model) > HELD
    for each in hooks:  # once seen to stay, they are held in all later plans
        each.keeps = False
    for each in (eager, module):
        each.zero_grad()
    step(eager)
    step(model)
    check_alike(eager, module)
    assert predicted(model) > HELD


def test_where_they_stay_and_nothing_fits_it_is_refused():
    _, module, (_, hooks) = hooked()
    model = remat.rematerialize(module, budget=TIGHT, limit_seconds=0.1)
    for _ in range(3):
        step(model)
    hooks.keeps = True
    assert "gradients stayed" in told_by(lambda: step(model))
    module.zero_grad()
    step(model)
    module.zero_grad()
    with pytest.raises(remat.BudgetTooSmall):
        step(model)


def test_accumulated_ones_never_leave():
    eager, module, hooks = hooked()
    model = remat.rematerialize(module, budget=4 * HELD, limit_seconds=0.1)
    for at in range(6):
        for each in hooks:
            each.keeps = at % 2 == 0
        step(eager)
        step(model)
        check_alike(eager, module)
    assert "gradients leave" not in str(model.plan)


@pytest.mark.sweep
def test_one_of_two_regions_stays_to_the_backward_of_the_first():
    eager, module, _ = hooked(tied=True)
    model = remat.rematerialize(module, budget=4 * HELD, limit_seconds=0.1)
    for _ in range(4):
        step(eager)
        measured = step(model)
        check_alike(eager, module)
    assert "8, 1.0 MiB" in str(model.plan)
    assert measured <= predicted(model)


def test_gradients_that_are_asked_for_are_those_of_eager():
    _, module, _ = hooked()
    model = remat.rematerialize(module, budget=TIGHT, limit_seconds=0.1)
    for _ in range(3):
        step(model)
    plain = Halves()
    plain.load_state_dict(module.state_dict())
    expected = torch.autograd.grad(plain(X), list(plain.parameters()))
    with pytest.warns(BudgetWarning, match="gradients stayed"):
        given = torch.autograd.grad(model(X), list(model.parameters()))
    assert all(map(torch.equal, expected, given))


def test_hooks_that_are_gone_leave_gradients_there():
    eager, module, _ = hooked()
    model = remat.rematerialize(module, budget=TIGHT, limit_seconds=0.1)
    for _ in range(3):
        step(eager)
        step(model)
    for each in (*eager.parameters(), *module.parameters()):
        each._post_accumulate_grad_hooks.clear()
    step(eager)
    assert "gradients stayed" in told_by(lambda: step(model))
    check_alike(eager, module)


@pytest.mark.sweep
def test_two_forwards_before_a_backward_and_an_evaluation_between_steps():
    eager, module, _ = hooked()
    model = remat.rematerialize(module, budget=4 * HELD, limit_seconds=0.1)
    for at in range(8):
        if at == 3:
            with torch.no_grad():
                assert torch.equal(eager(X), model(X))
        for each in (eager, model):
            loss = each(X)
            if at > 4:
                loss = loss + each(X.flip(0))
            loss.backward()
        check_alike(eager, module)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.sweep
def test_a_plan_is_saved_and_used(tmp_path):
    _, module, _ = hooked()
    model = remat.rematerialize(module, budget=TIGHT, limit_seconds=0.1)
    for _ in range(4):
        step(model)
    model.plan.save(tmp_path / "plan.json")
    _, other, _ = hooked()
    again = remat.rematerialize(other, plan=tmp_path / "plan.json", limit_seconds=0.1)
    for _ in range(3):
        assert step(again) <= TIGHT
    assert "gradients leave" in str(again.plan)
    assert predicted(again) == predicted(model)
