"""Find memory that changed between forward and backward, by sums over its bits.

torch counts changes in place, and autograd compares the count. torch does not count writes through
`.data`, numpy or DLPack, or by a kernel of the user's. So the bits are summed up as 64-bit words,
each times a random odd factor, modulo 2**64. The change of a single word is always seen; any other
change is seen unless 64 bits agree by chance. The sum takes about a third of the time of a ReLU. On
the CPU it takes nothing from torch's allocator, elsewhere 8 MiB at most; there the sums stay on the
device until they are compared.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from remat_exec.errors import BackwardError, MemoryChanged
from remat_graph.torch import saves_through_hooks

__all__ = ["changed", "check", "checksum", "note"]

_ROW = 4096  # words
_ROWS = 256  # that are multiplied at a time, where that takes memory
_BLOCK = 1 << 20  # bytes that are copied at a time, of what lies in pieces
_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_HOOKS = "saved through hooks"
_OR_BY_HOOKS = ", or saved-tensor hooks, which were active, gave it back with other bits"

_Words = npt.NDArray[np.int64]


def note(states: dict[str, Any], **tensors: torch.Tensor) -> None:
    """Keep the checksums of tensors, by the names of their variables."""
    if saves_through_hooks():
        states[_HOOKS] = True
    states.update({_key(name): checksum(tensor) for name, tensor in tensors.items()})


def check(states: dict[str, Any], **tensors: torch.Tensor) -> None:
    """See that tensors are as they were noted.

    Raises:
        MemoryChanged: naming the first that is not.
        BackwardError: if one was not noted.
    """
    lacking = [name for name in tensors if _key(name) not in states]
    if lacking:
        raise BackwardError(
            f"this backward, over other outputs than planned for, computes from {lacking[0]} "
            f"again, which the forward did not expect; run forward again, it will be planned anew"
        )
    for name in changed({name: states[_key(name)] for name in tensors}, tensors):
        raise MemoryChanged(
            f"an input, a parameter, a buffer or an output of the model was written to between "
            f"forward and backward where torch does not count it, as through .data, numpy or "
            f"DLPack{_OR_BY_HOOKS * (_HOOKS in states)}, and the plan computes from it again "
            f"({name}, of shape {list(tensors[name].shape)}, in its code); run backward "
            f"before, or give the model, or change, a copy (tensor.clone())"
        )


def changed(before: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Name the tensors that are not as they were, by their checksums."""
    after = tuple(checksum(tensors[name]) for name in before)
    same = _are_equal(tuple(before.values()), after)
    return [name for name, equal in zip(before, same, strict=True) if not equal]


def checksum(tensor: torch.Tensor) -> int | torch.Tensor:
    """Sum up the bits of a tensor: a number on the CPU, elsewhere a tensor on the device."""
    on_cpu = tensor.device.type == "cpu"
    if on_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return _sum_of_memory(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
    plain = _dense(tensor.detach())
    return _sum_on_cpu(_array(plain)) if on_cpu else _sum_on_device(plain.reshape(-1))


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Give the memory of a tensor to numpy; `.numpy()` would keep the storage from being resized.

    FSDP resizes storages, to nothing between the halves.
    """
    size, address = tensor.itemsize, tensor.data_ptr()
    if not address:
        return np.empty(0, np.uint8)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (size * (last + 1))).from_address(address)
    strides = [size * step for step in tensor.stride()]
    return np.ndarray(tensor.shape, f"i{size}", memoryview(memory), strides=strides)


def _key(name: str) -> str:
    return f"checksum of {name}"


def _are_equal(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[bool]:
    """Compare checksums, those of one device all at a time: the host waits for it."""
    equal = [a == b for a, b in zip(before, after, strict=True)]
    devices = {item.device for item in equal if isinstance(item, torch.Tensor)}
    for device in devices:
        at = [i for i, e in enumerate(equal) if isinstance(e, torch.Tensor) and e.device == device]
        for position, same in zip(at, torch.stack([equal[i] for i in at]).tolist(), strict=True):
            equal[position] = same
    return equal


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers, in the order of memory, without what only repeats."""
    if tensor.is_conj():
        tensor = tensor.conj()  # of the same memory, as is the negative below
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    tensor = tensor.view(_TYPES[tensor.itemsize])
    if tensor.is_contiguous():
        return tensor
    for dimension in reversed(range(tensor.dim())):
        if tensor.stride(dimension) == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.select(dimension, 0)
    layout = [*zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor.permute(sorted(range(tensor.dim()), key=lambda d: layout[d], reverse=True))


@functools.cache
def _factors() -> _Words:
    drawn = np.random.default_rng(0).integers(0, 2**64, _ROW, np.uint64)
    return drawn.view(np.int64) | 1


def _sum_of_memory(address: int, size: int) -> int:
    """Sum up so many bytes, as they lie there."""
    if not address or not size:
        return 0
    if address % 8:
        memory = memoryview((ctypes.c_uint8 * size).from_address(address))
        return _sum_on_cpu(np.frombuffer(memory, np.uint8))
    words, rest = divmod(size, 8)
    data = memoryview((ctypes.c_int64 * words).from_address(address))
    total = _sum_of_words(np.frombuffer(data, np.int64)) if words else 0
    if rest:
        last = ctypes.string_at(address + 8 * words, rest)
        total += int(_factors()[-1]) * int.from_bytes(last, "little")
    return total % 2**64


def _sum_on_cpu(array: npt.NDArray[Any]) -> int:
    total = 0
    flat = array.reshape(-1) if array.flags.c_contiguous else array
    for part in np.array_split(flat, max(1, min(len(flat), flat.nbytes // _BLOCK))):
        block = part.copy()
        total = total * int(_factors()[0]) + _sum_of_memory(block.ctypes.data, block.nbytes)
    return total % 2**64


def _sum_of_words(words: _Words) -> int:
    factors = _factors()
    while len(words) > _ROW:
        rows = len(words) // _ROW
        sums = words[: rows * _ROW].reshape(rows, _ROW) @ factors
        words = np.concatenate([sums, words[rows * _ROW :]])
    return int(words @ factors[: len(words)])


@functools.cache
def _factors_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_factors()).to(device)


def _sum_on_device(words: torch.Tensor) -> torch.Tensor:
    """Sum up as on the CPU; a product takes memory here, so it is made of some rows at a time."""
    factors = _factors_on(words.device)
    words = words.contiguous()
    size = words.numel() * words.itemsize
    if words.itemsize < 8 and size % 8 == 0 and words.storage_offset() * words.itemsize % 8 == 0:
        words = words.view(torch.int64)
    while len(words) > _ROW:
        rows = len(words) // _ROW
        blocks = torch.split(words[: rows * _ROW].view(rows, _ROW), _ROWS)
        sums = [(block * factors).sum(1) for block in blocks]
        words = torch.cat([*sums, words[rows * _ROW :].to(torch.int64)])
    return (words * factors[: len(words)]).sum()
