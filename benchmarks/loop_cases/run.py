"""What a training loop is handed: models as they are or rematerialized, and batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loop_cases.models import SMALL, Blocks, Size, batch, made

__all__ = ["Kept", "Run", "state"]

Kept = dict[str, Tensor]


def _as_it_is(model: nn.Module, **_: Any) -> Any:
    return model


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a loop. Two runs keep the same tensors if training is the same.

    `wrap(model, **options)` gives the model to train, with options of `remat.rematerialize` that
    the loop needs, or by `torch.compile` with `backend=True`; as it is if the run is plain.
    `step()` is entered around each forward and backward.
    """

    wrap: Callable[..., Any] = _as_it_is
    step: Callable[[], AbstractContextManager[Any]] = nullcontext
    size: Size = SMALL
    steps: int = 4

    @property
    def plain(self) -> bool:
        """Whether models are trained as they are."""
        return self.wrap is _as_it_is

    def model(self, kind: Callable[..., nn.Module] = Blocks, **options: Any) -> Any:
        """Make the model to train."""
        return self.wrap(made(kind, self.size.width, self.size.depth), **options)

    def batch(self, step: int, rows: int | None = None) -> Tensor:
        """Make the batch of a step."""
        return batch(step, rows or self.size.rows, self.size.width)


def state(model: nn.Module) -> Kept:
    """Copy parameters and buffers, by name; sharded ones are put together."""
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


def _whole(tensor: Any) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return torch.clone(full).detach()
