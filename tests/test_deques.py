"""Deques that the forward reads and fills are in a graph what they are in Python, bound and all."""

import copy
from collections import deque

import pytest
import torch
from torch import nn

import remat

STATES = torch.randn(7, 64, 16, generator=torch.Generator().manual_seed(0))


class LastStates(nn.Module):
    """Adds the means of the last batches, and scales by how many are kept at most."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.last = deque(maxlen=2)

    def forward(self, states):
        states = self.body(states)
        self.fill(states.detach().mean(0))
        return (states + sum(self.last)) / self.last.maxlen

    def fill(self, mean):
        self.last.append(mean)


class FirstStates(LastStates):
    def fill(self, mean):
        self.last.appendleft(mean)


def trained(model):
    """Train with a bound that changes; give all losses and gradients, and what is kept."""
    seen = []
    for step, states in enumerate(STATES):
        if step == 4:  # as long as before, with another bound
            model.last = deque(model.last, maxlen=3)
        model.zero_grad()
        loss = model(states).square().mean()
        loss.backward()
        seen += [loss.detach(), *(each.grad for each in model.parameters()), *model.last]
    return seen


@pytest.mark.parametrize("kind", [LastStates, FirstStates])
def test_a_full_deque_lets_go_of_what_is_at_its_other_end(kind):
    original = kind()
    model = remat.rematerialize(copy.deepcopy(original), budget=10**9, limit_seconds=0.1)
    for got, expected in zip(trained(model), trained(original), strict=True):
        assert torch.equal(got, expected)
    assert len(model.last) == 3
    assert not model.plan.breaks


class NoStates(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(16, 16), deque(maxlen=0)

    def forward(self, states):
        states = self.body(states)
        self.last.append(states)
        return states * (1 + len(self.last))


def test_nothing_stays_in_a_deque_that_holds_nothing():
    torch.manual_seed(0)
    original = NoStates()
    model = remat.rematerialize(copy.deepcopy(original), budget=10**9, limit_seconds=0.1)
    for states in STATES[:3]:
        assert torch.equal(model(states), original(states))
        model(states).square().mean().backward()
