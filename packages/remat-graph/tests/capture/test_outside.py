"""What a forward reads outside of module and arguments: its changes are noticed, and named."""

import cProfile
import sys
import weakref
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from remat_graph.torch import capture

X = torch.rand(3, 4)

SCALE = 2.0
ARGS = Namespace(gain=1.0, epoch=0)
MIXED = {
    "gain": 1.0,
    "out": Path("runs"),
    "model": nn.Linear(2, 2),
    "more": {"deep": {"gain": 1.0}},
}
WHOLE = {"a": 1.0}
TABLES = [[[float(i * j + k) for j in range(31)] for i in range(31)] for k in range(3)]
CACHE = {"warm": 1}
CLIP = 1.0
LATEST = None
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


def clipped(gradient):
    return torch.stack([part * CLIP for part in gradient])


def closures(power):
    count = 0

    def inner(x):
        nonlocal count
        count += 1
        return sum([part * power for part in (x, x) if x is not None])

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
        global CALLS, CACHED, LATEST  # noqa: PLW0603
        CALLS += 1
        if CACHED is None:
            CACHED = 1.0
        if not self.training:
            LATEST = CALLS
        SEEN[CALLS] = CACHE.setdefault(CALLS if not self.training else "warm", 1)
        x = x * MIXED["gain"] * MIXED["more"]["deep"]["gain"] * sum(WHOLE.values())
        x = x * sum(row[1] for row in TABLES[1]) * sum(row[1] for row in TABLES[2])
        x = self.activate(self.layer(x)) * SCALE * ARGS.gain * CACHED
        x = OWNER.shifted(helper(Tripled.apply(x))).to(DTYPE) * OWNER.inner.weight
        x.register_hook(lambda gradient: clipped(gradient))
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
    "attribute of a global": (
        lambda p: p.setattr(ARGS, "gain", 2.0),
        "ARGS.gain was 1.0 and is 2.0",
    ),
    "entry among others": (
        lambda p: p.setitem(MIXED, "gain", 2.0),
        "MIXED['gain'] was 1.0 and is 2.0",
    ),
    "deep entry": (
        lambda p: p.setitem(MIXED["more"]["deep"], "gain", 2.0),
        "MIXED['more']['deep']['gain'] was 1.0",
    ),
    "entry of a dict": (lambda p: p.setitem(WHOLE, "a", 2.0), "WHOLE was changed"),
    "second large table": (
        set_here("TABLES", [*TABLES[:2], TABLES[1]]),
        "TABLES[2] was changed",
    ),
    "read in a hook of a tensor": (set_here("CLIP", 0.5), "CLIP was 1.0 and is 0.5"),
    "nested entry": (
        lambda p: p.setitem(TABLE["a"], "b", 2.0),
        "TABLE['a']['b'] was 1.0 and is 2.0",
    ),
    "dtype": (set_here("DTYPE", torch.float64), "DTYPE was changed"),
    "value in a module": (lambda p: p.setattr(settings, "FACTOR", 2.0), "settings.FACTOR was 1.0"),
    "attribute of an attribute": (
        lambda p: p.setattr(OWNER.inner, "weight", 2.0),
        "OWNER.inner.weight was 1.0",
    ),
    "method of an object": (
        lambda p: p.setattr(Owner, "shifted", lambda self, x: x),
        "OWNER.shifted was changed",
    ),
    "function": (set_here("helper", lambda x: x), "helper was changed"),
    "read in a backward": (set_here("BACK", 1.0), "BACK was 3.0 and is 1.0"),
    "attribute of a subclass": (
        lambda p: p.setattr(Net, "slope", 0.1, raising=False),
        "Net.slope was 0.5 and is 0.1",
    ),
    "attribute of a class": (lambda p: p.setattr(Base, "slope", 0.1), "Net.slope was 0.5 and"),
    "method of a class": (lambda p: p.setattr(Base, "activate", nn.ReLU()), "Net.activate was"),
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
        patch.setattr(ARGS, "epoch", 1)
        patch.setitem(MIXED, "out", Path("elsewhere"))
        patch.setitem(CACHE, "later", 1)
        assert check() is None


class Odd:
    """Raises wherever it is looked at, as an object bound to a context does outside of it."""

    @property
    def __class__(self):
        raise RuntimeError

    @property
    def __dict__(self):
        raise RuntimeError


class OddEntries(dict):
    def __iter__(self):
        raise RuntimeError


def test_what_cannot_be_read_does_not_disturb(monkeypatch):
    odd = {"odd": Odd(), "entries": OddEntries(a=1), "gone": weakref.proxy(Owner())}
    for name, value in odd.items():
        monkeypatch.setitem(globals(), name, value)
    reading = eval(
        "lambda x: x * SCALE * len([odd, entries, x is None and (gone.a, odd.a)])", globals()
    )
    net = Calling(reading)
    check = capture(net, (X,), costs="estimate").state.bind(net)
    monkeypatch.setitem(globals(), "odd", 1)
    assert check() is None
    monkeypatch.setitem(globals(), "SCALE", Odd())
    assert "SCALE was changed" in check()


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
