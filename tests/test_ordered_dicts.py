"""Subclasses of `OrderedDict` that store items in a way of their own, in a forward."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import remat


class Doubled(OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2)


class Counted(Doubled):
    def __init__(self, **items):
        super().__init__(**items)
        self.count = len(self)


class Named(OrderedDict):
    """As outputs of models that are attributes, too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


def by_setting(model, y):
    items = Doubled()
    items.setdefault("a", y)
    items |= {"b": y}
    return items["a"] + items["b"]


def of_the_model(model, y):
    model.held.update(a=y.mean())
    return y * model.held["a"]


READ = {
    "made of items": lambda model, y: Doubled(a=y)["a"],
    "made of pairs": lambda model, y: Doubled([("a", y)])["a"],
    "a copy": lambda model, y: Doubled(a=y).copy()["a"],
    "for keys": lambda model, y: Doubled.fromkeys("ab", y)["b"],
    "by super": lambda model, y: Counted(a=y)["a"] * Counted(a=y).count,
    "an attribute": lambda model, y: Named(a=y).a,
    "set": by_setting,
    "held": of_the_model,
}


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer, self.read, self.held = nn.Linear(4, 4), read, Doubled()

    def forward(self, x):
        return self.read(self, torch.tanh(self.layer(x))).square().sum()


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_items_are_stored_as_in_eager(read):
    plain = Reading(read)
    model = remat.rematerialize(copy.deepcopy(plain), budget="1MiB", limit_seconds=0.1)
    for _ in range(2):
        x = torch.randn(3, 4)
        for each in (model, plain):
            each.zero_grad()
            each(x).backward()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)
        assert list(model.held) == list(plain.held)


def test_one_with_the_items_of_its_base_breaks_nothing():
    class Plain(OrderedDict):
        pass

    model = remat.rematerialize(
        Reading(lambda model, y: Plain(a=y)["a"]), torch.randn(3, 4), budget="1MiB"
    )
    assert not model.plan.breaks
