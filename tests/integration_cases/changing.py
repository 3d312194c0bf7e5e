"""Models whose calls change between steps: what changes, and what each step leaves behind."""

import contextlib
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exec_cases.training import Record
from torch import nn
from torch.nn import functional as F  # noqa: N812

from remat_graph.torch import flatten

REPEATS = 3


class Kind(enum.Enum):
    SIN = "sin"
    COS = "cos"


class Shift(nn.Module):
    slope = 0.5

    def forward(self, x):
        return F.leaky_relu(x, self.slope)


class Net(nn.Module):
    """A few layers, and around them what a case reads."""

    factor = 2.0

    def __init__(self, made=None):
        super().__init__()
        self.enter, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.shift = nn.Dropout(0.2), Shift()
        self.leave, self.tied = nn.Linear(16, 8), nn.Linear(16, 8)
        self.tied.weight = self.leave.weight
        self.parts = nn.ModuleList([nn.Linear(8, 8), nn.ReLU()])
        self.register_buffer("mean", torch.ones(8))
        self.plain, self.kept = torch.ones(8), [torch.ones(8)]
        self.config = SimpleNamespace(scale=2.0, entries={"scale": 2.0}, sizes=[1, 2])
        self.number, self.act = 2.0, torch.tanh
        self.partial = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.array = np.ones(8, dtype=np.float32)
        self.made = made

    def body(self, x):
        x = self.shift(self.drop(torch.tanh(self.norm(self.enter(x)))))
        return self.leave(x) + torch.sin(self.tied(x))

    def forward(self, x, *args, **kwargs):
        if self.made is not None:
            return self.made(self, x, *args, **kwargs)
        for part in self.parts:
            x = part(x)
        return self.body(x) * self.mean


def rows(size=6, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    options.setdefault("dtype", torch.float32)
    return torch.randn(size, 8, generator=generator, **options)


def nothing(model, step, patch):
    """Change nothing."""


def one_batch(model, step):
    return (rows(),), {}


def always(step):
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Case:
    """What changes before the second phase, and is as it was before the third if it can be.

    A phase is three equal steps: guards that held are checked in part only from then on.
    """

    change: Callable[..., Any] = nothing
    made: Callable[..., Any] | None = None
    arguments: Callable[..., Any] = one_batch
    around: Callable[..., Any] = always
    prepare: Callable[[Net], Any] = field(default=lambda model: None)
    phases: int = 3

    def model(self):
        torch.manual_seed(0)
        model = Net(self.made)
        self.prepare(model)
        return model


def train(model, case):
    """Run the steps; keep whatever they leave behind."""
    found: dict[str, torch.Tensor | None] = {}

    def keep(name, tensor):
        found[name] = None if tensor is None else tensor.detach().clone()

    with pytest.MonkeyPatch.context() as patch:
        for step in range(REPEATS * case.phases):
            phase = step // REPEATS
            if step % REPEATS == 0:
                case.change(model, phase, patch)
            torch.manual_seed(step)
            args, kwargs = case.arguments(model, phase)
            model.zero_grad()
            with case.around(phase):
                output = model(*args, **kwargs)
            parts = flatten(output)[0]
            sum(part.square().mean() for part in parts if part.requires_grad).backward()
            for number, tensor in enumerate(parts):
                keep(f"output {number} of step {step}", tensor)
            for number, tensor in enumerate(flatten((args, kwargs))[0]):
                keep(f"argument {number} of step {step}", tensor)
                if tensor.is_leaf:
                    keep(f"gradient of argument {number} of step {step}", tensor.grad)
            for name, parameter in model.named_parameters():
                keep(f"gradient of {name} in step {step}", parameter.grad)
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter.sub_(0.01 * parameter.grad)
            for name, buffer in model.named_buffers():
                keep(f"{name} after step {step}", buffer)
            keep(f"random state {step}", torch.get_rng_state())
    return Record(found)


def on(find, name, *values):
    """Set an attribute of something found from the model."""
    return lambda model, step, patch: setattr(find(model), name, values[step])


def once(change):
    """Change before the second step, and leave it so."""

    def at_step_one(model, step, patch):
        if step == 1:
            change(model)

    return at_step_one


def there_and_back(change, back):
    def in_turn(model, step, patch):
        if step == 1:
            change(model)
        elif step == 2:
            back(model)

    return in_turn


def hooked(register):
    """Add a hook before the second step, remove it before the third."""
    handles = []

    def in_turn(model, step, patch):
        if step == 1:
            handles.append(register(model))
        elif step == 2:
            handles.pop().remove()

    return in_turn


def unhooked(register):
    """Have a hook at first, none from the second step on."""
    handles = {}

    def prepare(model):
        handles[0] = register(model)

    return {"prepare": prepare, "change": once(lambda model: _drop_hooks(model))}


def _drop_hooks(model):
    for part in model.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()


def double(module, args, output):
    return 2 * output


def halve(module, args):
    return (args[0] * 0.5,)


def triple(module, into, out):
    return tuple(None if g is None else 3 * g for g in into)


def batches(*made):
    """Take a batch, or several, for each step."""

    def arguments(model, step):
        args = made[step]() if callable(made[step]) else made[step]
        return (args if isinstance(args, tuple) else (args,)), {}

    return arguments


def cast(*dtypes):
    return lambda step: (
        torch.autocast("cpu", dtype=dtypes[step]) if dtypes[step] else contextlib.nullcontext()
    )


def closure():
    scale = 2.0

    def change(model, step, patch):
        nonlocal scale
        scale = (2.0, 5.0, 2.0)[step]

    return Case(change, lambda m, x: m.body(x) * scale)


def pairs(made, *tensors):
    """Two arguments, of which `tensors` makes both for each step."""
    return Case(made=made, arguments=lambda model, step: (tensors[step](), {}))


def apart():
    return rows(6, 1), rows(6, 2)


def same():
    x = rows(6, 1)
    return x, x


def overlapping():
    x = rows(8, 1)
    return x[:6], x[2:]


def halves():
    x = rows(12, 1)
    return x[:6], x[6:]


def with_gradient(make):
    def made():
        given = make()
        bases = {id(t._base): t._base for t in given if t._base is not None}
        for base in bases.values() or given:
            base.requires_grad_()
        return given if not bases else tuple(t.view_as(t) for t in _again(make, bases))

    return made


def _again(make, bases):
    (base,) = bases.values()
    return [base[: len(base) - 2], base[2:]] if len(base) == 8 else [base[:6], base[6:]]


def adds_in_place(m, a, b):
    b = b.mul_(2)
    return m.body(a) * m.body(b)


def adds_to_the_first(m, x):
    x[0] += 1
    return m.body(x)


def multiplies(m, a, b):
    return m.body(a) * torch.sin(b)


def tie(model):
    model.tied.weight = model.leave.weight


def untie(model):
    model.tied.weight = nn.Parameter(model.leave.weight.detach() * 2)


def new_parameter(model):
    model.enter.weight = nn.Parameter(torch.full((16, 8), 0.1))


def new_data(model):
    model.enter.weight.data = torch.full((16, 8), 0.1)


def transposed_data(model):
    model.enter.weight.data = torch.full((8, 16), 0.1).t()


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def choose(m, x, kind=Kind.SIN, name="tanh", scale=1.0, times=1, flag=False, other=None):
    x = torch.sin(x) if kind is Kind.SIN else torch.cos(x)
    x = m.body(getattr(torch, name)(x) * scale)
    for _ in range(times):
        x = torch.tanh(x)
    return (x if not flag else x * 3) if other is None else x * other


def given(**values):
    """Give keyword arguments that change from step to step."""
    return Case(
        made=choose,
        arguments=lambda model, step: ((rows(),), {k: v[step] for k, v in values.items()}),
        phases=max(map(len, values.values())),
    )
