"""Inputs that share memory with others, where the forward writes to one of them."""

from __future__ import annotations

from collections import Counter

import torch

from remat_exec.errors import ExecutionError

__all__ = ["check_apart"]


def check_apart(tensors: list[torch.Tensor], written: list[int]) -> None:
    """Refuse inputs that are written to and overlap with others.

    Raises:
        ExecutionError: naming the two.
    """
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    counts = Counter(storages)
    for position in written:
        if counts[storages[position]] == 1 or not storages[position]:
            continue
        for other, storage in enumerate(storages):
            if other == position or storage != storages[position]:
                continue
            first, second = _span(tensors[position]), _span(tensors[other])
            if max(first.start, second.start) < min(first.stop, second.stop):
                raise ExecutionError(
                    f"the forward writes in place to a tensor of shape "
                    f"{list(tensors[position].shape)} that shares memory with another one that it "
                    f"reads, of shape {list(tensors[other].shape)}; clone one of them first"
                )


def _span(tensor: torch.Tensor) -> range:
    """Find the bytes, within its storage, between a tensor's first and last element."""
    if not tensor.numel():
        return range(0)
    start = tensor.storage_offset()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start * tensor.itemsize, (start + last + 1) * tensor.itemsize)
