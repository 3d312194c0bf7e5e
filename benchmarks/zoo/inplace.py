"""What breaks naive captures: in-place writes to views, mutated buffers, `no_grad`, a dict out.

Nobody would train this; every construct in it is common on its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.example import Example, Size, distance_to

__all__ = ["Mixer", "build", "make"]

# blocks, width, length, batch
_SIZES = {"tiny": (3, 16, 16, 4), "medium": (6, 256, 128, 32)}


class Block(nn.Module):
    """A gated layer over the width, then a layer over the length, with a running mean."""

    running_mean: Tensor
    calls: Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width)
        self.mix = nn.Linear(length, length)
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        value, gate = self.gate(x).chunk(2, dim=-1)
        h = value * torch.sigmoid(gate)
        h += x
        y = torch.zeros_like(h)
        y[:, ::2] = h[:, ::2] * weight
        y[:, 1::2] = h.flip(1)[:, 1::2]
        y[..., 0].mul_(2.0)
        with torch.no_grad():
            self.running_mean.lerp_(y.mean(dim=(0, 1)), 0.1)
        self.calls += 1
        y = y - self.running_mean
        mixed: Tensor = self.mix(y.transpose(1, 2)).transpose(1, 2)
        return torch.tanh(mixed) + x


class Mixer(nn.Module):
    """Several blocks; returns a dict of which one entry has no gradient."""

    def __init__(self, blocks: int, width: int, length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, length) for _ in range(blocks))

    def forward(
        self, x: Tensor, *, weight: Tensor, scale: float = 1.0
    ) -> dict[str, Tensor | list[Tensor]]:
        """Return the features, their halves, and statistics taken without gradients."""
        x = x * scale
        for block in self.blocks:
            x = block(x, weight)
        with torch.no_grad():
            spread = x.std()
        return {"features": x, "halves": list(x.chunk(2, dim=1)), "spread": spread}


def build(size: Size) -> Example:
    """Build with keyword arguments, one of them a tensor."""
    return make(_SIZES[size])


def make(setting: tuple[int, int, int, int]) -> Example:
    """Build of these blocks, width, length and batch."""
    blocks, width, length, batch = setting
    x, goal = (torch.randn(batch, length, width) for _ in range(2))
    distance = distance_to(goal)
    return Example(
        "inplace",
        Mixer(blocks, width, length),
        (x,),
        {"weight": torch.rand(width), "scale": 0.5},
        lambda output: distance(output["features"]) + output["halves"][0].square().mean(),
    )
