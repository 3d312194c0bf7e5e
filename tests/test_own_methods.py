"""Keys that are equal, and numbers that compute, in a way of their own, in a forward."""

import copy
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from integration_cases.sweeps import swept
from torch import nn

import remat


class Token:
    """Equal to another by its number; its `weight` is left out."""

    def __init__(self, number, weight=0.0):
        self.number, self.weight = number, weight

    def __eq__(self, other):
        return isinstance(other, Token) and self.number == other.number

    def __hash__(self):
        return hash(self.number)


class Pair(tuple):
    """Equal to another by its first item."""

    __slots__ = ()

    def __eq__(self, other):
        return self[0] == other[0]

    def __hash__(self):
        return hash(self[0])


@dataclass(frozen=True)
class Weighed:
    number: int
    weight: float = field(default=0.0, compare=False)


@dataclass(frozen=True, eq=False)
class Single:
    number: int


@dataclass(frozen=True)
class Alike:
    number: int

    def __eq__(self, other):
        return isinstance(other, Alike)

    def __hash__(self):
        return 1


@dataclass(frozen=True)
class Whole:
    number: int
    weight: float = 0.0


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def times(self, y):
        return y * self.factor


class Negative(float):
    """A number that turns the sign of what it multiplies."""

    def __mul__(self, other):
        return other * -float(self)

    __rmul__ = __mul__


class Named(float):
    """A number like others."""

    def __str__(self):
        return "two"


BEFORE, MINUS, PLUS = Token(3), Negative(2.0), Named(2.0)
TWO, THREE = Scale(2.0), Scale(3.0)


def of_two_objects(y):
    return y * (2.0 if TWO.times == THREE.times else 3.0)


def of_objects_made_there(y):
    one, other = Scale(2.0), Scale(3.0)
    return one.times(y) if one.times == other.times else other.times(y)


USES = {
    "a set": lambda y: y * len({Token(1), Token(1), Token(2)}),
    "a key from before": lambda y: {BEFORE: y}.get(Token(3), 2 * y),
    "keys of dict.fromkeys": lambda y: y * len(dict.fromkeys([Token(1), Token(1)])),
    "a counter": lambda y: y * Counter([Token(1), Token(1), Token(2)])[Token(1)],
    "within a tuple": lambda y: {(Token(1), 0): y}.get((Token(1), 0), 3 * y),
    "a tuple": lambda y: y * len({Pair((1, 2)): 1, Pair((1, 3)): 2}),
    "a field left out": lambda y: y * len({Weighed(1, 2.0), Weighed(1, 3.0)}),
    "a field left out in a tuple": lambda y: {(Weighed(1, 2.0), 0): y}.get((Weighed(1), 0), 3 * y),
    "a dataclass by identity": lambda y: y * len({Single(1): 1, Single(1): 2}),
    "a dataclass with its own": lambda y: y * len({Alike(1): 1, Alike(2): 2}),
    "a number before the forward": lambda y: MINUS * y,
    "a number made there": lambda y: Negative(2.0) * y,
    "methods of two objects": of_two_objects,
    "methods of objects made there": of_objects_made_there,
}
ONE_OF_A_KIND = (
    "a set", "a counter", "within a tuple", "a tuple", "a field left out",
    "a dataclass with its own", "a number made there", "methods of two objects",
)  # fmt: skip
IN_ONE_GRAPH = {
    "a dataclass by its fields": lambda y: {Whole(1): y}.get(Whole(1), 3 * y),
    "other keys": lambda y: y * len({Token(1), Token(2)}),
    "a number with no operators": lambda y: PLUS * y,
    "methods in a set": lambda y: y * (2.0 if len({TWO.times, THREE.times}) > 1 else 3.0),
}


class Using(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use = nn.Linear(4, 4), nn.Linear(4, 4), use

    def forward(self, x):
        return self.last(self.use(self.first(x)).tanh())


def trained(use):
    """Train a model and one planned for, and compare; give the second."""
    torch.manual_seed(0)
    plain = Using(use)
    model = remat.rematerialize(copy.deepcopy(plain), budget="1MB", limit_seconds=0.1)
    for _ in range(3):
        x = torch.randn(3, 4)
        for each in (plain, model):
            each.zero_grad()
            each(x).square().mean().backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad)
    return model


@pytest.mark.parametrize("name", swept(USES, ONE_OF_A_KIND))
def test_a_class_is_asked_as_python_asks_it(name):
    trained(USES[name])


@pytest.mark.parametrize("use", IN_ONE_GRAPH.values(), ids=IN_ONE_GRAPH)
def test_what_torch_has_right_is_one_graph(use):
    assert trained(use).plan.is_one_region
