"""What packs a tensor into fewer bytes, and what reads it: vectorised and exact for any size.

One bit for each element of a mask: the buffer is cut into eight parts, and part i of it is bit i of
the packed bytes, so that each step runs over whole parts. Packed and unpacked tensors are dense,
and their elements are taken in the order in which they lie in memory. Of max-pooling, the offset of
each maximum within its window, in 8 or 16 bits; it is done in parts of the batch, to take little
beside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = [
    "backward_of_kept",
    "backward_of_pool",
    "keep_in_place",
    "mask_workspace",
    "offset_type",
    "offsets_workspace",
    "pack_above",
    "pack_mask",
    "pack_offsets",
    "pack_within",
    "packed_bytes",
    "unpack_mask",
]

aten = torch.ops.aten
_PARTS = 8
_SCALAR_BYTES = 64  # torch makes small tensors of Python's numbers


def packed_bytes(count: int) -> int:
    """Give the size of so many packed bits."""
    return -(-count // 8)


def mask_workspace(size: int) -> int:
    """Bound what packing into so many bytes takes, or reading them: two masks of an eighth."""
    return 2 * size + _SCALAR_BYTES


def pack_mask(mask: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Pack a tensor of booleans into a vector of bytes, in the order of a dense layout."""
    return _pack(mask, stride, lambda part: part)


def pack_above(tensor: torch.Tensor, stride: Sequence[int], threshold: float) -> torch.Tensor:
    """Pack where a tensor is not at most a threshold, so where `threshold_backward` keeps."""
    return _pack(tensor, stride, lambda part: (part <= threshold).logical_not_())


def pack_within(
    tensor: torch.Tensor, stride: Sequence[int], least: float, most: float
) -> torch.Tensor:
    """Pack where a tensor is between two limits, so where `hardtanh_backward` keeps.

    Of a NaN that operator keeps the gradient or not, by the place where it lies; here never.
    """
    return _pack(tensor, stride, lambda part: (part > least).logical_and_(part < most))


def _pack(
    tensor: torch.Tensor,
    stride: Sequence[int],
    mask_of: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    flat = _in_memory_order(_laid_out(tensor, stride))
    packed = flat.new_zeros(packed_bytes(len(flat)), dtype=torch.uint8)
    for bit, part in enumerate(_eighths(flat)):
        packed[: len(part)].add_(mask_of(part).view(torch.uint8), alpha=1 << bit)
    return packed


def unpack_mask(packed: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Make the dense tensor of booleans again."""
    mask = packed.new_empty_strided(shape, stride, dtype=torch.bool)
    for bit, part in enumerate(_eighths(_in_memory_order(mask))):
        torch.ne(packed[: len(part)] & (1 << bit), 0, out=part)
    return mask


def backward_of_kept(
    grad: torch.Tensor, packed: torch.Tensor, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Give the gradient where the packed mask says so, and zero elsewhere, in a given layout."""
    unpacked = grad.new_empty_strided(shape, stride)
    for bit, part in enumerate(_eighths(_in_memory_order(unpacked))):
        part.copy_(packed[: len(part)] & (1 << bit))
    aten.threshold_backward.grad_input(grad, unpacked, 0, grad_input=unpacked)
    return unpacked


def keep_in_place(
    grad: torch.Tensor, packed: torch.Tensor, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Put zeros into a gradient, of the given shape, where the packed mask does not say so."""
    if not _is_laid_out(grad, stride):
        return grad.copy_(backward_of_kept(grad, packed, shape, stride))
    for bit, part in enumerate(_eighths(_in_memory_order(grad))):
        part.masked_fill_((packed[: len(part)] & (1 << bit)).eq_(0).view(torch.bool), 0)
    return grad


def _laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Give a tensor in the layout that was planned, which may not be what came."""
    if _is_laid_out(tensor, stride):
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def _is_laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    dimensions = zip(tensor.shape, tensor.stride(), stride, strict=True)
    return all(size == 1 or came == planned for size, came, planned in dimensions)


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _eighths(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    length = packed_bytes(len(flat))
    for start in range(0, len(flat), max(length, 1)):
        yield flat[start : start + length]


def offset_type(window: int) -> torch.dtype | None:
    """Choose the type of offsets within windows of so many elements, `None` if none is small."""
    if window <= torch.iinfo(torch.uint8).max:
        return torch.uint8
    return torch.int16 if window <= torch.iinfo(torch.int16).max else None


def offsets_workspace(shape: Sequence[int]) -> int:
    """Bound what packing or reading offsets of this shape takes, without the operator itself."""
    rows = -(-shape[0] // _PARTS)
    return 32 * (math.prod(shape[1:]) * rows + max(shape)) + _SCALAR_BYTES


def pack_offsets(
    indices: torch.Tensor, sizes: Sequence[int], window: Sequence[Sequence[int]], dtype: torch.dtype
) -> torch.Tensor:
    """Pack the indices of a max-pooling, each within one sample and channel, as offsets in windows.

    `sizes` are those of its input, without samples and channels; `window` is the size, stride,
    padding and dilation of the pooling, for each of these dimensions. Gives a vector.
    """
    packed = indices.new_zeros(indices.shape, dtype=dtype)
    for part, offsets in zip(_parts(indices), _parts(packed), strict=True):
        rest, step = part, 1
        for axis in reversed(range(len(sizes))):
            place = (rest % sizes[axis]).sub_(_starts(part, axis - len(sizes), window, axis))
            offsets.add_(place.floor_divide_(window[3][axis]).to(dtype), alpha=step)
            del place
            rest = rest // sizes[axis]
            step *= window[0][axis]
    return packed.view(-1)


def backward_of_pool(
    operator: Any,
    grad: torch.Tensor,
    packed: torch.Tensor,
    pooled: Sequence[int],
    shape: Sequence[int],
    stride: Sequence[int],
    window: Sequence[Sequence[int]],
    ceil_mode: bool,
) -> torch.Tensor:
    """Run the backward of a max-pooling on packed offsets, without the input that was pooled.

    `operator` is the overload that writes into `grad_input`; `pooled` is the shape of what was
    pooled, `shape` and `stride` are those of its gradient. All that the operator reads of the input
    is its sizes and layout, so the result stands in for it.
    """
    result = grad.new_empty_strided(shape, stride)
    sizes = shape[len(shape) - len(window[0]) :]
    parts = zip(_parts(packed.view(pooled)), _parts(grad), _parts(result), strict=True)
    for offsets, part, into in parts:
        indices = _unpack_offsets(offsets, sizes, window)
        operator(part, into, *window, ceil_mode, indices, grad_input=into)
        del indices
    return result


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut a batch into at most eight parts."""
    return torch.split(tensor, max(1, -(-len(tensor) // _PARTS)))


def _unpack_offsets(
    offsets: torch.Tensor, sizes: Sequence[int], window: Sequence[Sequence[int]]
) -> torch.Tensor:
    indices = torch.zeros_like(offsets, dtype=torch.int64)
    step, stride = 1, 1
    for axis in reversed(range(len(sizes))):
        place = (offsets // step).remainder_(window[0][axis]).to(torch.int64)
        place.mul_(window[3][axis]).add_(_starts(offsets, axis - len(sizes), window, axis))
        indices.add_(place, alpha=stride)
        step *= window[0][axis]
        stride *= sizes[axis]
    return indices.clamp_(0, stride - 1)  # costs are measured on offsets that are made up


def _starts(
    like: torch.Tensor, dim: int, window: Sequence[Sequence[int]], axis: int
) -> torch.Tensor:
    """Give where each window starts along a dimension, in a shape that broadcasts to `like`."""
    first = torch.arange(like.shape[dim], device=like.device)
    return first.mul_(window[1][axis]).sub_(window[2][axis]).view((-1,) + (1,) * (-dim - 1))
