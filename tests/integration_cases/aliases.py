"""Memory that changes between a forward and its backward: whose it is, and how it is written to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

ROWS, WIDTH = 32, 16


class Net(nn.Module):
    """Eager keeps neither `y` nor the biases, the table and the buffer; a tight plan reads them."""

    def __init__(self, handed, *, bias=False, breaks=False):
        super().__init__()
        self.table = nn.Embedding(5000, WIDTH).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.b, self.c = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.handed, self.breaks = handed, breaks
        self.between = None

    def forward(self, x, at):
        y = self.a(x.float() / 128 - 1 + self.shift + self.table(at))
        z = torch.relu(y)
        for _ in range(3):
            z = torch.tanh(torch.sin(z))
        if self.breaks:
            self.change(y)
        out = self.c(torch.tanh(self.b(z)))
        return self.handed(y), out

    @torch.compiler.disable
    def change(self, y):
        if self.between is not None:
            with torch.no_grad():
                self.between(y)


def batch():
    drawn = np.random.default_rng(0)
    x = drawn.integers(0, 256, (4, ROWS, WIDTH), dtype=np.uint8)
    return x, torch.from_numpy(drawn.integers(0, 5000, (4, ROWS)))


def through_dlpack(tensor):
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor.detach()))


@dataclass
class Step:
    """One step between its forward and its backward, and a view of `y` taken at once."""

    model: nn.Module
    buffer: np.ndarray
    x: torch.Tensor
    y: torch.Tensor
    out: torch.Tensor
    view: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.view = self.y[:, 1:].detach()


HANDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda y: y,
    "slice": lambda y: y[:, 1:],
    "transposed": lambda y: y.transpose(1, 2),
    "flat": lambda y: y.flatten(1),
    "reshaped": lambda y: y.reshape(-1, 4),
    "strided": lambda y: y[:, :, ::2],
    "half": lambda y: y.chunk(2, dim=-1)[0],
    "unsafe half": lambda y: torch.unsafe_chunk(y, 2, dim=-1)[0],
    "detached": lambda y: y.detach(),
    "as strided": lambda y: y.as_strided((4, ROWS), (ROWS * 4 * WIDTH, 4 * WIDTH), 2),
}

OF_A_TENSOR: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda y: y.mul_(0),
    "a slice": lambda y: y[1:].add_(1),
    "one number": lambda y: y[0, 0].view(-1)[0].add_(1e-3),
    "detach": lambda y: y.detach().neg_(),
    "data": lambda y: y.data.mul_(2),
    "a slice of data": lambda y: y.data[1:, :1].zero_(),
    "numpy": lambda y: np.copyto(y.detach().numpy(), 0),
    "numpy, shuffled": lambda y: np.random.default_rng(0).shuffle(y.detach().numpy()),
    "dlpack": lambda y: through_dlpack(y).fill_(1),
    "its storage": lambda y: y.untyped_storage().fill_(0),
    "other data": lambda y: y.data.set_(torch.zeros_like(y)),
}
OF_THE_OUTPUT: dict[str, Callable[[Step], Any]] = {
    "a view from before": lambda step: step.view.zero_(),
    **{name: lambda step, change=change: change(step.y) for name, change in OF_A_TENSOR.items()},
}

OF_OTHERS: dict[str, Callable[[Step], Any]] = {
    "buffer refilled": lambda step: step.buffer.fill(7),
    "buffer shuffled": lambda step: np.random.default_rng(0).shuffle(step.buffer),
    "one byte": lambda step: step.buffer.reshape(-1).__setitem__(5, step.buffer.flat[5] ^ 1),
    "input in place": lambda step: step.x.fill_(7),
    "input's data": lambda step: step.x.data.fill_(7),
    "input's storage": lambda step: step.x.untyped_storage().fill_(7),
    "input through dlpack": lambda step: through_dlpack(step.x).fill_(7),
    "a module's buffer": lambda step: step.model.shift.data.mul_(-1),
    "a module's buffer in place": lambda step: step.model.shift.mul_(-1),
    "an embedding": lambda step: step.model.table.weight.data.mul_(-1),
    "an embedding in place": lambda step: step.model.table.weight.mul_(-1),
    "a bias": lambda step: step.model.b.bias.data.mul_(-1),
    "other data of a bias": lambda step: setattr(
        step.model.b.bias, "data", torch.ones_like(step.model.b.bias)
    ),
}


def gradients(model, change=None, *, of_both=True):
    """Run a step, with a change between its halves; give the gradients of its parameters.

    They are `of_both` outputs, or of the second alone.
    """
    buffer, at = batch()
    x = torch.from_numpy(buffer)
    torch.manual_seed(0)
    model.zero_grad()
    y, out = model(x, at)
    if change is not None:
        with torch.no_grad():
            change(Step(model, buffer, x, y, out))
    loss = out.square().sum()
    (loss + y.sum() if of_both and y.requires_grad else loss).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "add": lambda y: y + 1,
    "scale": lambda y: y * 0.5,
    "roll": lambda y: y.roll(1, 1),
    "cumsum": lambda y: y.cumsum(1) / 4,
    "transposed": lambda y: y.transpose(1, 2).contiguous().tanh().transpose(1, 2),
    "reshaped": lambda y: y.reshape(-1, WIDTH).mul(2).view(4, -1, WIDTH),
    "halves": lambda y: torch.cat([part.cos() for part in torch.unsafe_chunk(y, 2, -1)], -1),
    "normed": lambda y: nn.functional.layer_norm(y, (WIDTH,)),
    "dropped": lambda y: nn.functional.dropout(y, 0.3),
    "changed in place": lambda y: y.add(1).clamp_(max=2),
}


class RandomNet(nn.Module):
    """Linear layers among `parts`, in a row; hands out a view of what stands at some of them."""

    def __init__(self, parts, handed, breaks_at):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=number % 2 == 1) for number in range(len(parts))
        )
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.parts, self.handed, self.breaks_at = parts, dict(handed), breaks_at

    def forward(self, x, at):
        y, handed = x.float() / 128 - 1 + self.shift, []
        for number, (layer, part) in enumerate(zip(self.layers, self.parts, strict=True)):
            y = layer(y) if part is None else PARTS[part](y)
            if number in self.handed:
                handed.append(HANDED[self.handed[number]](y))
            if number == self.breaks_at:
                torch._dynamo.graph_break()
        return handed[-1], y


@st.composite
def drawn_nets(draw):
    """Draw a model that hands out at least one view of what it computes on the way."""
    parts = draw(st.lists(st.sampled_from([None, *PARTS]), min_size=3, max_size=9))
    views = st.sampled_from([name for name in HANDED if name != "as strided"])
    places = st.integers(0, len(parts) - 1)
    handed = draw(st.dictionaries(places, views, min_size=1, max_size=3))
    torch.manual_seed(draw(st.integers(0, 99)))
    return RandomNet((None, *parts, None), handed.items(), draw(st.none() | places))
