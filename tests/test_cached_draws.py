"""Functions behind a cache that draw once, such as random projections, in a forward."""

import copy
import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat


@functools.lru_cache
def projection(size):
    return torch.randn(size, size)


@functools.cache
def kept(size):
    return functional.dropout(torch.ones(size), 0.5)


@functools.lru_cache
def factor(_):
    return random.random()


@functools.lru_cache
def positions(size):
    return torch.arange(size) / size


class Cached(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.first, self.last, self.ask = nn.Linear(8, 8), nn.Linear(8, 8), ask

    @functools.lru_cache  # noqa: B019 - as users write it
    def own(self, size):
        return torch.rand(size)

    def forward(self, x):
        return self.last(self.ask(self, self.first(x).tanh()))


ASKED = {
    "by torch": lambda _, y: y @ projection(8),
    "by dropout": lambda _, y: y * kept(8),
    "by Python": lambda _, y: y * factor(8),
    "by a method": lambda model, y: y * model.own(8),
}
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def empty():
    """Empty the caches before a test, and give what does it again."""

    def clear():
        for each in (projection, kept, factor, positions, Cached.own):
            each.cache_clear()

    clear()
    return clear


def losses(model):
    """Train from the same numbers."""
    torch.manual_seed(1)
    random.seed(1)
    found = []
    for _ in range(4):
        model.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        found.append((loss.item(), *(each.grad.clone() for each in model.parameters())))
    return found


@pytest.mark.parametrize(
    ("ask", "example"),
    [  # each at the first call, one for an example, too; the others for one in a sweep
        pytest.param(
            ask, example, id=f"{name}, {'an' if example else 'no'} example",
            marks=() if name == "by torch" or not example else pytest.mark.sweep,
        )
        for name, ask in ASKED.items()
        for example in ((), ((X,),))
    ],
)  # fmt: skip
def test_what_is_drawn_once_is_drawn_once(ask, example, empty):
    torch.manual_seed(0)
    plain = Cached(ask)
    wanted = losses(copy.deepcopy(plain))
    model = remat.rematerialize(plain, *example, budget="1MB", limit_seconds=0.1)
    empty()
    torch.testing.assert_close(losses(model), wanted)


def test_a_cached_table_is_part_of_the_graph():
    model = remat.rematerialize(
        Cached(lambda _, y: y * positions(8)), budget="1MB", limit_seconds=0.1
    )
    losses(model)
    assert model.plan.is_one_region


def test_planning_leaves_what_is_drawn_once_as_it_was():
    model = Cached(lambda _, y: y * kept(8))
    before = model(X)
    remat.plan(model, (X,), budget="1MB", limit_seconds=0.1)
    assert torch.equal(model(X), before)
