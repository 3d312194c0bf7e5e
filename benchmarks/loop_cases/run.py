"""What a training loop is handed: models as they are or rematerialized, and batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loop_cases.models import SMALL, Blocks, Size, batch, made, tokens

__all__ = ["DRAWS", "Kept", "Run", "state"]

DRAWS = 10  # steps whose sizes are drawn; others have those of one of them

Kept = dict[str, Tensor]


def _as_it_is(model: nn.Module, **_: Any) -> Any:
    return model


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a loop. Two runs keep the same tensors if training is the same.

    `wrap(model, **options)` gives the model to train, with options of `remat.rematerialize` that
    the loop needs, or by `torch.compile` with `backend=True`; as it is if the run is plain.
    `step()` is entered around each forward and backward. With `draws` each of ten steps has batches
    of another size, from half of `size` to half more; then they come again.
    """

    wrap: Callable[..., Any] = _as_it_is
    step: Callable[[], AbstractContextManager[Any]] = nullcontext
    size: Size = SMALL
    steps: int = 4
    draws: bool = False

    @property
    def plain(self) -> bool:
        """Whether models are trained as they are."""
        return self.wrap is _as_it_is

    def model(self, kind: Callable[..., nn.Module] = Blocks, **options: Any) -> Any:
        """Make the model to train."""
        return self.wrap(made(kind, self.size.width, self.size.depth), **options)

    def rows(self, step: int) -> int:
        """Give how many rows the batch of a step has."""
        return self._drawn(self.size.rows, step)

    def words(self, step: int) -> int:
        """Give how long the sentences of a step are."""
        return self._drawn(self.size.words, step)

    def _drawn(self, size: int, step: int) -> int:
        number = step % DRAWS
        if not self.draws or number == 0:
            return size
        return random.Random(number).randint(size // 2, size + size // 2)

    def batch(self, step: int, rows: int | None = None) -> Tensor:
        """Make the batch of a step."""
        return batch(step, rows or self.rows(step), self.size.width)

    def tokens(self, step: int, size: int = 4) -> Tensor:
        """Make the sentences of a step."""
        return tokens(step, size, self.words(step))


def state(model: nn.Module) -> Kept:
    """Copy parameters and buffers, by name; sharded ones are put together."""
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


def _whole(tensor: Any) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return torch.clone(full).detach()
