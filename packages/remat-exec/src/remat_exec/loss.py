"""A loss outside the module: what it takes between forward and backward.

The memory of a step is highest about here, so a plan must leave room for it. A loss that the user
hands over is run and measured; for one that is not known an allowance is taken.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from remat_exec.errors import LossError
from remat_exec.measure import measure_peak
from remat_graph.torch import LossCost

__all__ = [
    "Loss",
    "as_handed",
    "loss_gradients",
    "measure_loss",
    "stand_in_loss",
    "with_call",
]

Loss = Callable[..., torch.Tensor]
"""A function of what a module returns or, if it needs further arguments, of the call as well."""


def with_call(loss: Loss, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Loss:
    """Give a loss of the output alone: one that asks for more is told the arguments of the call.

    It asks for them by a further argument without a default, by `*args`, or by `**kwargs`.
    """
    return functools.partial(_told, loss, args, kwargs) if _asks_for_call(loss) else loss


def _told(loss: Loss, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
    return loss(output, *args, **kwargs)


def _asks_for_call(loss: Loss) -> bool:
    try:
        _, *others = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # a function that is not written in Python, or takes nothing
        return False
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(other.default is other.empty or other.kind in several for other in others)


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        made = leaf.new_empty(0)
        return made.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def as_handed(leaf: torch.Tensor) -> torch.Tensor:
    """Give a tensor as a module gives it, in the same memory: no leaf, so that it can be changed.

    Gradients with respect to `leaf` are those with respect to what is given.
    """
    if not leaf.requires_grad:
        return leaf
    given: torch.Tensor = _Handed.apply(leaf)  # type: ignore[no-untyped-call]
    return given


def loss_gradients(
    loss: Loss, returned: Any, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Differentiate a loss of what a module returns by `tensors`, which it was made of.

    `None` stands for a tensor that needs no gradient or on which the loss does not depend. The
    second list is what is in memory while the backward goes on: the gradients of whatever else the
    loss depends on, such as parameters of its own, and the loss itself, which the user holds and
    which may lie in a large buffer: that of `mse_loss` is as large as its input.

    Raises:
        LossError: if the loss fails, gives no scalar, or depends on none of the tensors.
    """
    try:
        value = loss(returned)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise LossError(
            f"loss= failed on what the model returned ({type(error).__name__}: {error}); it is "
            f"called with that and, if it has further arguments without a default, with those of "
            f"the call; it must only compute the loss, and take every batch"
        ) from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise LossError(f"loss= must give a tensor of one element, not {shown}")
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    known = set(map(id, wanted))
    others = [leaf for leaf in _leaves(value) if id(leaf) not in known]
    found: list[torch.Tensor | None] = []
    if value.requires_grad:
        try:
            found = list(torch.autograd.grad(value, [*wanted, *others], allow_unused=True))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise LossError(f"loss= cannot be differentiated: {error}") from error
    if not any(gradient is not None for gradient in found[: len(wanted)]):
        raise LossError(
            "loss= depends on nothing that the model returned and that requires a gradient; "
            "compute it from its argument, without detach() or no_grad()"
        )
    gradients = iter(found[: len(wanted)])
    kept = [*found[len(wanted) :], value.detach()]
    return [next(gradients) if tensor.requires_grad else None for tensor in tensors], kept


def _leaves(value: torch.Tensor) -> list[torch.Tensor]:
    """List the leaves on which a tensor depends, as its graph of autograd has them."""
    found: dict[int, torch.Tensor] = {}
    seen = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        waiting += [source for source, _ in node.next_functions]
    return list(found.values())


def measure_loss(
    loss: Loss, returned: Callable[[], Any], tensors: list[torch.Tensor], device: torch.device
) -> tuple[LossCost, list[bool]]:
    """Measure what a loss takes, and which of `tensors` get a gradient.

    `returned` makes what the module returns out of `tensors`, in their memory; errors as above.
    """
    with torch.enable_grad():
        loss_gradients(loss, returned(), tensors)  # to warm up: what a library allocates once
        with measure_peak(device, collect=False) as peak:
            gradients, _left = loss_gradients(loss, returned(), tensors)
    made = turned = 0
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None:
            size = gradient.untyped_storage().nbytes()
            made += size
            turned += size if gradient.stride() != tensor.stride() else 0
    kept = max(0, peak.kept_bytes - made)
    # Gradients that come in another layout than their outputs are held while they are copied.
    workspace = max(0, peak.peak_bytes - made - kept, turned)
    return LossCost(workspace, kept), [gradient is not None for gradient in gradients]


def stand_in_loss(cost: LossCost, device: torch.device) -> torch.Tensor:
    """Take the memory that a loss is allowed, and give what it keeps."""
    kept = torch.empty(cost.kept_bytes, dtype=torch.uint8, device=device)
    torch.empty(cost.workspace_bytes, dtype=torch.uint8, device=device)
    return kept
