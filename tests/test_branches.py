"""A branch on data that is an operator, `torch.cond`, is in the graph with what it may run."""

import copy

import pytest
import torch
from torch import nn

import remat

WIDTH = 16


class Branches(nn.Module):
    """Two branches that differ in their bodies alone; one draws a mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, states):
        x = self.body(states)
        is_first = states.sum() > 0
        x = torch.cond(is_first, lambda x: self.other(x).sin(), lambda x: x.cos(), (x,))
        return torch.cond(
            is_first,
            lambda x: (self.other(x) * 2).sin(),
            lambda x: nn.functional.dropout(x, 0.25),
            (x,),
        )


def trained(model):
    """Train on batches of three sizes; give all losses and gradients, and the next draw."""
    torch.manual_seed(1)
    seen = []
    for rows, sign in ((64, 1), (64, -1), (32, 1), (48, -1)):
        model.zero_grad()
        loss = model(sign * torch.rand(rows, WIDTH)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(each.grad for each in model.parameters()), torch.rand(1)]
    return seen


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's own
def test_branches_train_as_in_eager():
    original = Branches()
    model = remat.rematerialize(copy.deepcopy(original), budget=10**9, limit_seconds=0.1)
    for got, expected in zip(trained(model), trained(original), strict=True):
        assert torch.equal(got, expected)
    assert not model.plan.breaks
