"""What gradients for a tangent of one need beside them: the real tangent, and a mean's weight.

A backward is linear in its tangent, so what it gives for a tangent of one is scaled once the real
one is there. Infinities and what is no number are not scaled (of a gradient of zero they make none,
and plain autograd leaves out the rows that a loss ignores): the backward itself is run for them.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

__all__ = ["SliceRun", "scaled", "scaled_in_place", "total_weight"]


class SliceRun(Protocol):
    """What runs slice by slice, and gives one gradient."""

    def bounds(self, slices: int) -> list[int]:
        """Give where each of so many slices begins, and where the last one ends."""

    def run(
        self, tensors: Any, bounds: Any, after_slice: Any = None, *, into: Any = ()
    ) -> list[torch.Tensor]:
        """Give the outputs, in the tensors `into` if there are any."""


def scaled(
    gradient: torch.Tensor,
    tangent: torch.Tensor,
    backward: SliceRun,
    slices: int,
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """Give the gradient for a tangent, of that for a tangent of one.

    `backward` makes it of `inputs`, the tangent among them, in so many slices.
    """
    factor = tangent.item()
    if math.isfinite(factor):
        return gradient * factor
    return backward.run(inputs, backward.bounds(slices))[0]


def scaled_in_place(
    gradient: torch.Tensor,
    tangent: torch.Tensor,
    backward: SliceRun,
    slices: int,
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """Do as `scaled`, in the buffer of the gradient."""
    factor = tangent.item()
    if not math.isfinite(factor):
        backward.run(inputs, backward.bounds(slices), into=(gradient,))
    elif factor != 1:
        gradient.mul_(factor)
    return gradient


def total_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sum the weights of classes over the targets that are not ignored, as `nll_loss` does."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum().to(dtype)
    weights = weight[target.masked_fill(~counted, 0)]
    return weights.masked_fill_(~counted, 0).sum().to(dtype)
