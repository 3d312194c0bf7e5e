"""The gradient of what is written by a mask, `x[mask] = values`, as one operator of known size.

Autograd reads the gradient at the mask and adds up what the values were broadcast to. How many
elements the mask has is then a size on the way, which no static graph has; the size of the gradient
is known. The same kernels run in the same order, so the bits are those of eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["gradient_of_values", "is_mask", "of_whole_masks", "put_of_whole_masks"]

_SCHEMA = "gradient_of_values(Tensor grad, Tensor?[] indices, SymInt[] size) -> Tensor"

_library = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(_SCHEMA)  # type: ignore[no-untyped-call]

Indices = Sequence[torch.Tensor | None]


@torch.library.impl(_library, "gradient_of_values", "CompositeExplicitAutograd")
def _run(grad: torch.Tensor, indices: Indices, size: Sequence[int]) -> torch.Tensor:
    rows: torch.Tensor = torch.ops.aten.index.Tensor(grad, indices)
    return rows.sum_to_size(size)  # itself, if it has this size


@torch.library.register_fake("remat::gradient_of_values", lib=_library)  # type: ignore[untyped-decorator]
def _predict(grad: torch.Tensor, _: Indices, size: Sequence[int]) -> torch.Tensor:
    return grad.new_empty(size)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad, indices, size = inputs
    ctx.of_size = None if size else []  # torch takes an empty list for one of tensors
    ctx.shape, ctx.is_there = grad.shape, [index is not None for index in indices]
    ctx.save_for_backward(*(index for index in indices if index is not None))


def _differentiate(ctx: Any, of_result: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate again, where the forward computes gradients: what it does for an index."""
    there = iter(ctx.saved_tensors)
    indices = [next(there) if is_there else None for is_there in ctx.is_there]
    zeros = of_result.new_zeros(ctx.shape)
    of_grad = torch.ops.aten.index_put.default(zeros, indices, of_result, True)
    return of_grad, [None] * len(indices), ctx.of_size


torch.library.register_autograd(
    "remat::gradient_of_values", _differentiate, setup_context=_keep, lib=_library
)

gradient_of_values = torch.ops.remat.gradient_of_values.default


def is_mask(index: torch.Tensor | None) -> bool:
    """Whether an index says of each element whether it is meant."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def put_of_whole_masks(
    tensor: torch.Tensor, indices: Indices, values: torch.Tensor, *others: bool
) -> tuple[object, ...]:
    """Give arguments of a write by masks that take the most memory: see `of_whole_masks`."""
    return (tensor, _filled(tensor, indices, values.shape), values, *others)


def of_whole_masks(
    grad: torch.Tensor, indices: Indices, size: Sequence[int]
) -> tuple[torch.Tensor, Indices, Sequence[int]]:
    """Give arguments of `gradient_of_values` for which it takes the most memory.

    Masks are true everywhere. Where the values are not broadcast along what a mask chooses, or
    there are indices beside it, they are true as often as these say.
    """
    return grad, _filled(grad, indices, size), size


def _filled(tensor: torch.Tensor, indices: Indices, size: Sequence[int]) -> Indices:
    filled = list(indices)
    if any(map(is_mask, indices)):
        count = _count(tensor, indices, size)
        for at, index in enumerate(indices):
            if index is not None and is_mask(index):
                mask = torch.zeros(index.numel(), dtype=index.dtype, device=index.device)
                mask[:count] = 1
                filled[at] = mask.view(index.shape)
    return filled


def _count(tensor: torch.Tensor, indices: Indices, size: Sequence[int]) -> int:
    """Give how many elements the masks may have: as many each."""
    indexed, lengths, most = list[bool](), list[int](), tensor.numel()
    for index in indices:
        if index is None or not is_mask(index):
            indexed.append(index is not None)
            lengths += [] if index is None else index.shape[-1:]
        else:
            indexed += [True] * index.dim()
            most = min(most, index.numel())
    if True not in indexed:  # masks of one element each
        return most
    indexed += [False] * (tensor.dim() - len(indexed))
    first, last = indexed.index(True), len(indexed) - indexed[::-1].index(True)
    # what is indexed comes in front where indices do not stand side by side
    behind = tensor.dim() - last if all(indexed[first:last]) else indexed.count(False)
    if len(size) > behind:
        lengths.append(size[-behind - 1])
    return next((length for length in lengths if length != 1), most)
