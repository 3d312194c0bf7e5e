"""What a loss outside the module takes between forward and backward.

A step holds about the most memory there, so a plan must leave room for the loss. A loss that the
user gives is run and measured; for an unknown one a plan leaves room by a rule.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
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
"""A function of what a module returns, and of the arguments of the call if it asks for them."""


def with_call(loss: Loss, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Loss:
    """Make a loss of the output alone, from one that may ask for the arguments of the call, too.

    A loss asks for them by a second argument without a default, by `*args`, or by `**kwargs`.
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
        alias = leaf.new_empty(0)
        return alias.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def as_handed(leaf: torch.Tensor) -> torch.Tensor:
    """Make a tensor that is no leaf in the memory of a leaf, as a module returns it.

    It can be changed in place. Its gradient is that of `leaf`.
    """
    if not leaf.requires_grad:
        return leaf
    tensor: torch.Tensor = _Handed.apply(leaf)  # type: ignore[no-untyped-call]
    return tensor


def loss_gradients(
    loss: Loss, returned: Any, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Differentiate the loss of `returned` with respect to `tensors`, of which it was made.

    The first list has a gradient for each tensor; `None` if it needs none, or the loss does not
    depend on it. The second list is what stays in memory during the backward: the gradients of all
    else that the loss depends on, such as its own parameters, and the loss itself. The user holds
    the loss, and its buffer may be large: that of `mse_loss` is as large as its input.

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
    own = set(map(id, wanted))
    others = [leaf for leaf in _leaves(value) if id(leaf) not in own]
    computed: list[torch.Tensor | None] = []
    if value.requires_grad:
        try:
            computed = list(torch.autograd.grad(value, [*wanted, *others], allow_unused=True))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise LossError(f"loss= cannot be differentiated: {error}") from error
    if not any(gradient is not None for gradient in computed[: len(wanted)]):
        raise LossError(
            "loss= depends on nothing that the model returned and that requires a gradient; "
            "compute it from its argument, without detach() or no_grad()"
        )
    gradients = iter(computed[: len(wanted)])
    kept = [*computed[len(wanted) :], value.detach()]
    return [next(gradients) if tensor.requires_grad else None for tensor in tensors], kept


def _leaves(value: torch.Tensor) -> list[torch.Tensor]:
    """List the leaves on which a tensor depends, as its graph of autograd has them."""
    leaves: dict[int, torch.Tensor] = {}
    seen = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            leaves[id(leaf)] = leaf
        waiting += [source for source, _ in node.next_functions]
    return list(leaves.values())


def measure_loss(
    loss: Loss, returned: Callable[[], Any], tensors: list[torch.Tensor], device: torch.device
) -> tuple[LossCost, list[bool]]:
    """Measure what a loss takes, and find which of `tensors` get a gradient.

    `returned` makes what the module returns out of `tensors`, in their memory.

    Raises:
        LossError: as `loss_gradients` does.
    """
    with torch.enable_grad():
        loss_gradients(loss, returned(), tensors)  # to warm up: what a library allocates once
        with measure_peak(device, collect=False) as peak:
            gradients, _left = loss_gradients(loss, returned(), tensors)
    gradient_bytes = turned_bytes = 0
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None:
            size = gradient.untyped_storage().nbytes()
            gradient_bytes += size
            turned_bytes += size if gradient.stride() != tensor.stride() else 0
    kept = max(0, peak.kept_bytes - gradient_bytes)
    # Gradients that come in another layout than their outputs are held while they are copied.
    workspace = max(0, peak.peak_bytes - gradient_bytes - kept, turned_bytes)
    return LossCost(workspace, kept), [gradient is not None for gradient in gradients]


def stand_in_loss(
    cost: LossCost, outputs: Sequence[torch.Tensor | None], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Allocate at once what a loss may take and the gradients that it gives, of these outputs.

    Its workspace is freed. Gives what it keeps, and the gradients, which are ones.
    """
    kept = torch.empty(cost.kept_bytes, dtype=torch.uint8, device=device)
    _workspace = torch.empty(cost.workspace_bytes, dtype=torch.uint8, device=device)
    return kept, [None if output is None else torch.ones_like(output) for output in outputs]
