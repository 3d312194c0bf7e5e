"""What a case of the matrix is: a model to train, a call, and the loss of what it returns."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Built", "Case", "NotRunnable", "output_loss", "seed_everything", "tensors_in"]


class NotRunnable(Exception):
    """A case that plain eager cannot build or run; it says nothing about remat."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model in training mode, and the call of one step.

    `leaves` are tensors of the call whose gradients are compared as those of parameters are.
    `loss` makes a scalar of what the model returned. `inputs` says in words what the call is made
    of, where a case has more than one way.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: tuple[Tensor, ...] = ()
    loss: Callable[[Any], Tensor] = field(default_factory=lambda: output_loss())
    inputs: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A name, such as `transformers/llama`, and how to build it.

    `build` makes equal weights and inputs each time it is called after the same seed. A case may
    have several variants, such as the inputs of a module in `torch.testing`.
    """

    name: str
    variants: Callable[[], list[tuple[str, Callable[[], Built]]]]

    @property
    def kind(self) -> str:
        """The part before the slash."""
        return self.name.partition("/")[0]


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, Python and numpy: models draw from all three."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def tensors_in(value: object) -> Iterator[Tensor]:
    """List the tensors of an output, in order, each once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                yield item
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple)):
            stack.extend(reversed(item))


@functools.cache
def _weights(shape: tuple[int, ...]) -> Tensor:
    """Make the weights of a shape once in a process: no step but those in eager has new ones."""
    elements = math.prod(shape)
    count = max(1, elements)
    weights: Tensor = torch.arange(float(count)).cos() / math.sqrt(count)
    return weights[:elements].reshape(shape)


def output_loss() -> Callable[[Any], Tensor]:
    """Make a loss: the model's own, or else a weighted sum of all outputs with a gradient.

    A plain sum would not do: that of a normalized output is constant.
    """

    def weighted(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        return (tensor * _weights(tuple(tensor.shape)).to(tensor.dtype)).sum()

    def loss(output: Any) -> Tensor:
        own = getattr(output, "loss", None)
        if isinstance(own, Tensor) and own.requires_grad:
            return own if own.dim() == 0 else own.sum()
        parts = [
            weighted(tensor)
            for tensor in tensors_in(output)
            if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        ]
        if not parts:
            raise NotRunnable("no output has a gradient")
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    return loss
