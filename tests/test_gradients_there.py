"""Gradients that are there before a step, of parameters that are frozen or are added to."""

import copy
import warnings

import pytest
import torch
from torch import nn

import remat


class Net(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.low = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.high = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.last, self.breaks = nn.Linear(64, 32), breaks

    def forward(self, x):
        x = self.low(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(self.high(x))


def trained(net):
    net(torch.randn(4, 32)).sum().backward()
    return net


def frozen(net):
    net.low.requires_grad_(False)
    net.high[0].requires_grad_(False)
    return net


@pytest.mark.parametrize("freezes", [True, False])
def test_a_step_over_the_budget_is_told_of_though_gradients_are_there(freezes):
    net = trained(Net())
    net = frozen(net) if freezes else net
    model = remat.rematerialize(net, budget=400_000, limit_seconds=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            y = model(torch.randn(256, 32))
            torch.cat([y] * 40).sin().square().mean().backward()
            model.zero_grad(set_to_none=False)
    assert any("a step took" in str(each.message) for each in told)


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
def test_what_is_frozen_is_not_waited_for_in_steps_of_several_regions():
    plain = frozen(trained(Net(breaks=True)))
    model = remat.rematerialize(copy.deepcopy(plain), budget=0.9, limit_seconds=0.1)
    for _ in range(5):
        x = torch.randn(512, 32)
        for each in (plain, model):
            for part in each.parameters():
                part.grad = torch.zeros_like(part) if not part.requires_grad else None
            each(x).square().mean().backward()
        for part, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(part.grad, other.grad, rtol=0, atol=0)
