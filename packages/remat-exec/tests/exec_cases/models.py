"""Tiny models, each with a call and a loss, and what executes them by a schedule."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from remat_exec import Executable
from remat_graph import Numerics
from remat_graph.torch import capture, read_call
from remat_solvers import store_all


class Scheduled(nn.Module):
    """Runs a module by a schedule of its captured graph, whatever it is called with."""

    def __init__(self, module, captured, schedule=None):
        super().__init__()
        self.module = module
        self.training = module.training
        plain = captured.graph.without_alternatives()
        self.executable = Executable(captured, schedule or store_all(plain))

    def forward(self, *args, **kwargs):
        outputs = self.executable(self.module, read_call(args, kwargs).tensors)
        return self.executable.capture.output_structure.rebuild(iter(outputs))


@dataclass(frozen=True)
class Case:
    """A model, the arguments of a call, and the loss of what it returns; equal for each use.

    Captured with alternatives as exact as `numerics` asks for, `None` for none.
    """

    name: str
    make: Callable[[], nn.Module]
    make_args: Callable[[], tuple[Any, ...]]
    loss: Callable[[Any], torch.Tensor]
    numerics: Numerics | None = None

    def model(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().train()

    def args(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.make_args()

    @functools.cached_property
    def captured(self):
        captured = capture(self.model(), self.args())
        return captured if self.numerics is None else captured.with_alternatives(self.numerics)

    def with_alternatives(self, numerics=Numerics.BITWISE):
        """Give the same case, captured with alternatives."""
        return replace(self, name=f"{self.name}-{numerics.value}", numerics=numerics)

    @property
    def store_all(self):
        return store_all(self.captured.graph.without_alternatives())

    def remat(self, schedule=None, model=None):
        """Execute by a schedule; store everything by default."""
        model = self.model() if model is None else model
        return Scheduled(model, self.captured, schedule)

    __hash__ = object.__hash__

    def __repr__(self):
        return self.name


class Shared(nn.Module):
    """One layer used three times, with dropout between."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.leave = nn.Linear(12, 12, bias=False)
        self.leave.weight = self.layer.weight

    def forward(self, x):
        for _ in range(3):
            x = nn.functional.dropout(torch.tanh(self.layer(x)), 0.3, self.training)
        return self.leave(x)


class Heads(nn.Module):
    """Two outputs over one trunk, and a third without a gradient."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh())
        self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 6)

    def forward(self, x):
        x = self.trunk(x)
        return {"left": self.left(x), "right": self.right(x), "index": x.argmax(dim=1)}


class Attention(nn.Module):
    """Causal attention, as operators, with a dropout of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 2, 24).transpose(1, 2).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = nn.functional.dropout(y, 0.2, self.training)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """Convolutions beside a connection that skips them, activated in place, with two limits."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.activation = nn.ReLU(inplace=True)
        self.limited = nn.ReLU6(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x):
        y = self.second(self.limited(self.first(x)))
        y = self.activation(x + y)
        y = self.limited(self.first(y)) + y
        return self.pool(self.activation(self.second(y)))


class Branches(nn.Module):
    """Two outputs, behind convolutions of their own, over one trunk."""

    def __init__(self, width=2):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)
        )
        self.left, self.right = (
            nn.Sequential(
                nn.Conv2d(4, 3, 1), nn.ReLU6(), nn.Conv2d(3, out, 1), nn.Tanh(), nn.AvgPool2d(2)
            )
            for out in (2, width)
        )

    def forward(self, x):
        x = self.trunk(x)
        return {"left": self.left(x), "right": self.right(x)}


def _normed():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5),
    )  # fmt: skip


def _squares(output):
    return output.square().mean()


def _both(output):
    return output["left"].square().mean() + output["right"].exp().mean()


MLP = Case(
    "mlp",
    lambda: nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16),
        nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 4),
    ),
    lambda: (torch.randn(32, 8),),
    _squares,
)  # fmt: skip
SHARED = Case("shared", Shared, lambda: (torch.randn(16, 12),), _squares)
NORMED = Case("normed", _normed, lambda: (torch.randn(4, 2, 6, 6),), _squares)
ATTENTION = Case(
    "attention",
    lambda: nn.Sequential(Attention(), Attention()),
    lambda: (torch.randn(2, 6, 16),),
    _squares,
)
HEADS = Case("heads", Heads, lambda: (torch.randn(32, 8),), _both)
RESIDUAL = Case("residual", Residual, lambda: (torch.randn(9, 3, 5, 7),), _squares)
BRANCHES = Case("branches", Branches, lambda: (torch.randn(5, 2, 8, 8),), HEADS.loss)
WIDE = Case("wide", lambda: Branches(3000), BRANCHES.make_args, HEADS.loss)
CASES = (MLP, SHARED, NORMED, ATTENTION, HEADS)
WITH_ALTERNATIVES = tuple(
    case.with_alternatives() for case in (SHARED, NORMED, ATTENTION, RESIDUAL)
)
