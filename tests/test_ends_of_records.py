"""What ends the record of a step, and steps that have none to take."""

import pytest
import torch
from integration_cases.between import Between, is_recorded
from integration_cases.one_step import X, peak_of, run
from torch import nn

import remat

pytestmark = pytest.mark.usefixtures("_no_record_stays")


def test_a_forward_that_no_backward_can_follow_is_recorded_no_further():
    torch.manual_seed(0)
    original = Between()
    budget = int(0.9 * peak_of(original))
    model = remat.rematerialize(original, budget=budget, limit_seconds=0.05)
    output = model(X)
    assert is_recorded()
    del output
    assert not is_recorded()
    run(model)
    run(model)
    assert peak_of(model) <= budget


class NoRegions(nn.Module):
    """Views of a parameter, with a break: there is nothing to plan."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        viewed = self.weight.view(4, 8)
        torch._dynamo.graph_break()
        return (viewed.reshape(32) - x).square().mean()


def test_a_step_that_calls_no_region_is_not_planned_for():
    model, plain = remat.rematerialize(NoRegions(), budget="1MiB"), NoRegions()
    for each in (model, plain):
        for _ in range(3):
            run(each)
    assert torch.equal(model.weight.grad, plain.weight.grad)


class Node:
    def __init__(self, x):
        self.x, self.me = x, self


class TakesANode(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, node):
        x = self.layer(node.x)
        torch._dynamo.graph_break()
        return x.square().mean()


def test_an_argument_may_contain_itself():
    model = remat.rematerialize(TakesANode(), budget="1MiB", limit_seconds=0.05)
    for _ in range(3):
        model(Node(X)).backward()
    assert model.layer.weight.grad is not None


def test_an_evaluation_ends_what_is_recorded():
    model = remat.rematerialize(Between(), budget="4MiB", limit_seconds=0.05)
    run(model)
    assert is_recorded()
    with torch.no_grad():
        model(X)
    assert not is_recorded()
    loss = model(X)
    with torch.no_grad():
        model(X[:8])
    loss.backward()
    assert model.enter[0].weight.grad is not None


class Fails(Between):
    """Fails behind its last region at first."""

    bad = True

    @torch.compiler.disable
    def take(self):
        if self.bad:
            raise ValueError("not yet")
        super().take()


def test_steps_after_a_forward_that_failed_are_planned_and_told_of():
    torch.manual_seed(0)
    original = Fails()
    original.bad = False
    budget = int(0.9 * peak_of(original))
    original.bad = True
    model = remat.rematerialize(original, budget=budget, limit_seconds=0.05)
    with pytest.raises(ValueError, match="not yet"):
        run(model)
    model.bad = False
    for _ in range(3):
        run(model)
    assert peak_of(model) <= budget
    assert model.plan.measured_peak_bytes <= budget
