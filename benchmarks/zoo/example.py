"""What every family of the zoo returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["Example", "Size", "distance_to"]

Size = Literal["tiny", "peers", "medium"]


@dataclass(frozen=True, slots=True)
class Example:
    """A model, what it is called with, and the loss of what it returns."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]

    def step(self, model: nn.Module | None = None) -> Tensor:
        """Run one forward and backward, of `model` if given, and return the loss."""
        chosen = self.model if model is None else model
        loss = self.loss(chosen(*self.args, **self.kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def to(self, device: str | torch.device) -> Example:
        """Move the model, in place, and a copy of the batch."""

        def moved(item: Any) -> Any:
            return item.to(device) if isinstance(item, Tensor) else item

        return replace(
            self,
            model=self.model.to(device),
            args=tuple(moved(item) for item in self.args),
            kwargs={name: moved(item) for name, item in self.kwargs.items()},
        )


def distance_to(target: Tensor) -> Callable[[Any], Tensor]:
    """Make the loss that is the mean squared distance of an output to a fixed target."""
    return lambda output: nn.functional.mse_loss(output, target.to(output.device))
