"""What a forward reads outside of module and arguments: its changes are noticed, and named."""

import cProfile
import sys
from argparse import Namespace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from remat_graph.torch import capture

X = torch.rand(3, 4)

SCALE = 2.0
ARGS = Namespace(gain=1.0, names=("a", "b"))
TABLE = {"a": {"b": 1.0}}
DTYPE = torch.float32
CALLS = 0
CACHED = None
BACK = 3.0
SEEN = {}
RESULT = [torch.zeros(2)]

settings = ModuleType("settings")
settings.FACTOR = 1.0


class Owner:
    bias = 0.0

    def __init__(self):
        self.inner = SimpleNamespace(weight=1.0)

    def shifted(self, x):
        return x + self.bias


OWNER = Owner()


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * BACK


def helper(x):
    return x * TABLE["a"]["b"]


def closures(power):
    count = 0

    def inner(x):
        nonlocal count
        count += 1
        return x * power

    def set_power(value):
        nonlocal power
        power = value

    def count_on():
        nonlocal count
        count += 1

    return inner, set_power, count_on


class Base(nn.Module):
    slope = 0.5

    def activate(self, x):
        return nn.functional.leaky_relu(x, self.slope)


class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        global CALLS, CACHED  # noqa: PLW0603
        CALLS += 1
        if CACHED is None:
            CACHED = 1.0
        SEEN[CALLS] = 1
        x = self.activate(self.layer(x)) * SCALE * ARGS.gain * CACHED
        x = OWNER.shifted(helper(Tripled.apply(x))).to(DTYPE) * OWNER.inner.weight
        return x * settings.FACTOR * sum(v for v in (SCALE,))


@pytest.fixture(scope="module")
def check():
    net = Net()
    found = capture(net, (X,), costs="estimate").state.bind(net)
    found.keep = net
    return found


def set_here(name, value):
    return lambda patch: patch.setattr(sys.modules[__name__], name, value)


CHANGES = {
    "global": (set_here("SCALE", 2.5), "SCALE was 2.0 and is 2.5"),
    "type of a global": (set_here("SCALE", 2), "SCALE was 2.0 and is 2"),
    "removed global": (lambda p: p.delattr(sys.modules[__name__], "SCALE"), "SCALE is gone"),
    "attribute of a global": (lambda p: p.setattr(ARGS, "gain", 2.0), "ARGS was changed"),
    "nested entry": (lambda p: p.setitem(TABLE["a"], "b", 2.0), "TABLE was changed"),
    "dtype": (set_here("DTYPE", torch.float64), "DTYPE was changed"),
    "value in a module": (lambda p: p.setattr(settings, "FACTOR", 2.0), "settings.FACTOR was 1.0"),
    "attribute of an attribute": (
        lambda p: p.setattr(OWNER.inner, "weight", 2.0),
        "OWNER.inner was changed",
    ),
    "method of an object": (
        lambda p: p.setattr(Owner, "shifted", lambda self, x: x),
        "OWNER.shifted was changed",
    ),
    "function": (set_here("helper", lambda x: x), "helper was changed"),
    "read in a backward": (set_here("BACK", 1.0), "BACK was 3.0 and is 1.0"),
    "attribute of a class": (lambda p: p.setattr(Base, "slope", 0.1), "Base.slope was 0.5 and"),
    "method of a class": (lambda p: p.setattr(Base, "activate", nn.ReLU()), "Base.activate was"),
    "forward of a class": (lambda p: p.setattr(Net, "forward", nn.ReLU()), "Net.forward was"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_forward_read_outside_is_guarded_and_named(check, name):
    change, message = CHANGES[name]
    assert check() is None
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        assert message in check()
    assert check() is None


class Calling(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


def test_a_variable_of_a_closure_is_guarded():
    raised, set_power, count_on = closures(2.0)
    other, set_other_power, _ = closures(4.0)
    net = Calling(raised)
    check = capture(net, (X,), costs="estimate").state.bind(net)
    set_power(3.0)
    assert check() == "power of closures.<locals>.inner was 2.0 and is 3.0"
    set_power(2.0)
    set_other_power(9.0)  # of a function with the same code that was not called
    other(X)
    count_on()
    assert check() is None


def test_what_the_forward_itself_changes_is_a_side_effect(check):
    """As is what it does not read, and tensors, which capture refuses where they count."""
    check.keep.eval()(X)
    check.keep.train()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CALLS", 99), ("SEEN", {}), ("RESULT", []), ("X", None)):
            set_here(name, value)(patch)
        patch.setattr(ARGS, "names", ("a", "b"))
        assert check() is None


def test_a_profiler_goes_on_after_a_capture():
    profiler = cProfile.Profile()
    profiler.enable()
    net = Net()
    state = capture(net, (X,), costs="estimate").state
    abs(-1)
    profiler.disable()
    assert any("abs" in str(entry.code) for entry in profiler.getstats())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "SCALE", 5.0)
        assert "SCALE" in state.bind(net)()

    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        capture(net, (X,), costs="estimate")
        before = len(calls)
        abs(-1)
        assert len(calls) > before
    finally:
        sys.setprofile(None)
