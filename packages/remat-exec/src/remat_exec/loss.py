"""A loss outside the module: what it takes between forward and backward.

The memory of a step is highest about here, so a plan must leave room for it. A loss that the user
hands over is run and measured; for one that is not known an allowance is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat_exec.errors import LossError
from remat_exec.measure import measure_peak
from remat_graph.torch import LossCost

__all__ = ["Loss", "loss_gradients", "measure_loss", "stand_in_loss"]

Loss = Callable[[Any], torch.Tensor]


def loss_gradients(
    loss: Loss, returned: Any, tensors: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Differentiate a loss of what a module returns by `tensors`, which it was made of.

    `None` stands for a tensor that needs no gradient or on which the loss does not depend.

    Raises:
        LossError: if the loss fails, gives no scalar, or depends on none of the tensors.
    """
    try:
        value = loss(returned)
    except Exception as error:
        raise LossError(
            f"loss= failed on what the model returned ({type(error).__name__}: {error}); it is "
            f"called with nothing else, and must take every batch that is trained on"
        ) from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise LossError(f"loss= must give a tensor of one element, not {shown}")
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    found: list[torch.Tensor | None] = []
    if value.requires_grad:
        found = list(torch.autograd.grad(value, wanted, allow_unused=True))
    if not any(gradient is not None for gradient in found):
        raise LossError(
            "loss= depends on nothing that the model returned and that requires a gradient; "
            "compute it from its argument, without detach() or no_grad()"
        )
    gradients = iter(found)
    return [next(gradients) if tensor.requires_grad else None for tensor in tensors]


def measure_loss(
    loss: Loss, returned: Any, tensors: list[torch.Tensor], device: torch.device
) -> tuple[LossCost, list[bool]]:
    """Measure what a loss takes, and which of `tensors` get a gradient; errors as above."""
    with torch.enable_grad():
        loss_gradients(loss, returned, tensors)  # to warm up: what a library allocates once
        with measure_peak(device) as peak:
            gradients = loss_gradients(loss, returned, tensors)
    made = sum(g.untyped_storage().nbytes() for g in gradients if g is not None)
    kept = max(0, peak.kept_bytes - made)
    cost = LossCost(max(0, peak.peak_bytes - made - kept), kept)
    return cost, [gradient is not None for gradient in gradients]


def stand_in_loss(cost: LossCost, device: torch.device) -> torch.Tensor:
    """Take the memory that a loss is allowed, and give what it keeps."""
    kept = torch.empty(cost.kept_bytes, dtype=torch.uint8, device=device)
    torch.empty(cost.workspace_bytes, dtype=torch.uint8, device=device)
    return kept
