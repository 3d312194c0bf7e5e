"""Regions that no backward comes to: outside the loss, in some steps alone, or interrupted."""

import copy

import pytest
import torch
from integration_cases.broken import assert_same
from torch import nn

import remat
from remat_exec import measure_peak


class Aside(nn.Module):
    """Two outputs, each of regions of its own."""

    def __init__(self):
        super().__init__()
        self.enter, self.aside = nn.Linear(64, 64), nn.Linear(64, 64)
        self.fails = False

    def forward(self, x):
        y = self.enter(x)
        torch._dynamo.graph_break()
        other = torch.sin(self.aside(y))
        torch._dynamo.graph_break()
        if self.fails:
            raise KeyboardInterrupt
        for _ in range(6):
            y = torch.sin(y) + x
        return y, other


@pytest.mark.parametrize("held", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_an_output_outside_the_loss_does_not_keep_a_step_from_ending(held):
    torch.manual_seed(0)
    plain, x = Aside(), torch.randn(64, 64)
    model = copy.deepcopy(plain)

    def trained(model):
        model.zero_grad()
        y, other = model(x)
        y.square().mean().backward()
        return other if held else None

    with measure_peak() as peak:
        trained(plain)
    budget = int(0.7 * peak.peak_bytes)
    model = remat.rematerialize(model, budget=budget)
    _other = None
    for _ in range(6):  # what was returned last is let go of while the next step runs, if at all
        _other = trained(model)
    assert model.plan.measured_peak_bytes <= budget
    with measure_peak() as peak:
        _other = trained(model)
    assert peak.peak_bytes <= budget
    assert_same(model, plain)


class UsedAtTimes(nn.Module):
    """A second output that reads what is changed in place later, and is not always in the loss."""

    def __init__(self):
        super().__init__()
        self.enter, self.aside, self.leave = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        y = self.enter(x)
        torch._dynamo.graph_break()
        other = self.aside(torch.tanh(2 * y) + 1)
        torch._dynamo.graph_break()
        y.mul_(3)
        return self.leave(torch.tanh(y)), other


def test_a_region_without_a_backward_is_planned_for_and_right_once_it_has_one():
    """What it reads is held twice until it is known whether later code changes it."""
    torch.manual_seed(0)
    plain, x = UsedAtTimes(), torch.randn(256, 64)
    original = copy.deepcopy(plain)

    def trained(model, outputs):
        model.zero_grad()
        sum(output.square().mean() for output in model(x)[:outputs]).backward()

    with measure_peak() as peak:
        trained(plain, 2)
    budget = int(1.2 * peak.peak_bytes)
    model = remat.rematerialize(original, budget=budget)
    for outputs in (1, 1, 1, 1, 2, 2, 2, 1, 2):
        trained(plain, outputs)
        trained(model, outputs)
        assert_same(model, plain)
    for outputs in (1, 2):
        with measure_peak() as peak:
            trained(model, outputs)
        assert peak.peak_bytes <= budget
    model = remat.rematerialize(original, budget=budget)
    for _ in range(6):
        trained(model, 1)
    assert not model.plan.is_one_region
    assert model.plan.measured_peak_bytes <= budget


def raises(gradient):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "step"), [pytest.param("backward", 1, marks=pytest.mark.sweep), ("forward", 4)]
)
def test_a_step_after_one_that_was_interrupted_is_right_and_within_the_budget(where, step):
    torch.manual_seed(0)
    plain, x = Aside(), torch.randn(64, 64)
    model = copy.deepcopy(plain)

    def trained(model):
        model.zero_grad()
        (y, other) = model(x)
        (y.square().mean() + other.square().mean()).backward()

    with measure_peak() as peak:
        trained(plain)
    budget = int(0.9 * peak.peak_bytes)
    model = remat.rematerialize(model, budget=budget, limit_seconds=0.001)
    kept = []
    for number in range(9):
        if number == step:
            model.fails = where == "forward"
            hook = model.enter.weight.register_hook(raises) if where == "backward" else None
            with pytest.raises(KeyboardInterrupt) as error:
                trained(model)
            kept.append(error)  # and with it the frames, and what they hold
            model.fails = False
            if hook is not None:
                hook.remove()
        trained(model)
        assert_same(model, plain)
    assert model.plan.measured_peak_bytes <= budget
    model.zero_grad()
    with measure_peak() as peak:
        trained(model)
    assert peak.peak_bytes <= budget


class TrainsBesideItsPlan(nn.Module):
    """The region that is planned has no part in the backward; the other runs as it is."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        y = self.norm(x)
        torch._dynamo.graph_break()
        self.seen.add_(y.mean(0))  # differentiable, and the module holds it: not planned
        for _ in range(4):
            x = self.linear(x).tanh()
        return x


def test_a_step_whose_backward_no_region_takes_part_in_is_within_the_budget_or_refused():
    x = torch.randn(256, 16)
    plain = TrainsBesideItsPlan()
    with remat.measure_peak() as taken:
        plain(x).square().mean().backward()
    model = remat.rematerialize(TrainsBesideItsPlan(), budget=taken.peak_bytes // 2)
    model(x).square().mean().backward()
    with pytest.warns(remat.BudgetWarning, match="step 1 took"):
        output = model(x)
    output.square().mean().backward()
    with pytest.raises(remat.BudgetTooSmall) as error:
        model(x)
    assert error.value.smallest_bytes > taken.peak_bytes // 2
