"""The encoder-decoder of `torch.nn.Transformer`, with a causal mask for the decoder."""

from __future__ import annotations

import torch
from torch import nn

from zoo.example import Example, Size, distance_to

__all__ = ["build", "build_without_dropout", "make"]

# layers of each half, width, heads, batch, length
_SIZES = {"tiny": (2, 32, 2, 6, 16), "peers": (6, 128, 4, 4, 64), "medium": (6, 192, 6, 12, 64)}


def build(size: Size, dropout: float = 0.1) -> Example:
    """Build with dropout."""
    return make("transformer" if dropout else "transformer-no-dropout", _SIZES[size], dropout)


def build_without_dropout(size: Size) -> Example:
    """Build the deterministic one."""
    return build(size, dropout=0.0)


def make(name: str, setting: tuple[int, int, int, int, int], dropout: float = 0.1) -> Example:
    """Build of these layers in each half, width, heads, batch and length."""
    layers, width, heads, batch, length = setting
    model = nn.Transformer(
        width, heads, layers, layers, 4 * width, dropout=dropout, batch_first=True
    )
    source, target, goal = (torch.randn(batch, length, width) for _ in range(3))
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    return Example(
        name,
        model,
        (source, target),
        {"tgt_mask": mask, "tgt_is_causal": True},
        distance_to(goal),
    )
