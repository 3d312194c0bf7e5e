"""Find memory that changed between forward and backward, by sums over its bits.

torch counts changes in place, and autograd compares the count. torch does not count writes through
`.data`, numpy or DLPack, or by a kernel of the user's. So the bits are summed up as 64-bit words,
each times a random odd factor, modulo 2**64. The change of a single word is always seen; any other
change is seen unless 64 bits agree by chance. The sum takes about a third of the time of a ReLU. On
the CPU it takes nothing from torch's allocator, elsewhere 8 MiB at most; there the sums stay on the
device until they are compared.

Hooks of what is saved may give back copies, which lie elsewhere and otherwise. So a sum depends on
the bits and their order alone; where hooks are active it is the order of the elements, else that of
memory, which is faster.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from remat_exec.errors import BackwardError, MemoryChanged
from remat_graph.torch import saves_through_hooks

__all__ = ["changed", "check", "checksum", "note"]

_ROW = 4096  # words
_ROW_BYTES = 8 * _ROW
_ROWS = 192  # that are multiplied at a time, where that takes memory
_BLOCK = 1 << 20  # bytes that are copied at a time, of what lies in pieces or not at a word
_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_HOOKS = "saved through hooks"
_OR_BY_HOOKS = ", or saved-tensor hooks, which were active, gave it back with other bits"

_Words = npt.NDArray[np.int64]
_Array = TypeVar("_Array", npt.NDArray[Any], torch.Tensor)


def note(states: dict[str, Any], **tensors: torch.Tensor) -> None:
    """Keep the checksums of tensors, by the names of their variables."""
    by_elements = states.setdefault(_HOOKS, saves_through_hooks())
    sums = {_key(n): checksum(tensor, by_elements=by_elements) for n, tensor in tensors.items()}
    states.update(sums)


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
    before = {name: states[_key(name)] for name in tensors}
    by_elements = states.get(_HOOKS, False)
    for name in changed(before, tensors, by_elements=by_elements):
        raise MemoryChanged(
            f"an input, a parameter, a buffer or an output of the model was written to between "
            f"forward and backward where torch does not count it, as through .data, numpy or "
            f"DLPack{_OR_BY_HOOKS * by_elements}, and the plan computes from it again "
            f"({name}, of shape {list(tensors[name].shape)}, in its code); run backward "
            f"before, or give the model, or change, a copy (tensor.clone())"
        )


def changed(
    before: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, by_elements: bool = False
) -> list[str]:
    """Name the tensors that are not as they were, by their checksums."""
    after = tuple(checksum(tensors[name], by_elements=by_elements) for name in before)
    same = _are_equal(tuple(before.values()), after)
    return [name for name, equal in zip(before, same, strict=True) if not equal]


def checksum(tensor: torch.Tensor, *, by_elements: bool = False) -> int | torch.Tensor:
    """Sum up the bits of a tensor: a number on the CPU, elsewhere a tensor on the device.

    A copy has the same sum if it lies in the same way; `by_elements`, if it lies in any.
    """
    tensor = tensor.detach()
    on_cpu = tensor.device.type == "cpu"
    if tensor.is_conj() or tensor.is_neg():
        if by_elements:
            summed = _sum_on_device(tensor)
            return int(summed) % 2**64 if on_cpu else summed
    elif on_cpu and tensor.is_contiguous():
        return _sum_on_cpu(_array(tensor))
    plain = _as_integers(tensor)
    if not by_elements:
        plain = _dense(plain)
    return _sum_on_cpu(_array(plain)) if on_cpu else _sum_on_device(plain)


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Give the memory of a tensor to numpy; `.numpy()` would keep the storage from being resized.

    FSDP resizes storages, to nothing between the halves.
    """
    size, address = tensor.itemsize, tensor.data_ptr()
    if not address:
        return np.empty(0, np.uint8)
    if tensor.is_contiguous():
        whole = (ctypes.c_uint8 * (size * tensor.numel())).from_address(address)
        return np.frombuffer(memoryview(whole), np.uint8)
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


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a tensor as integers."""
    if tensor.is_conj():
        tensor = tensor.conj()  # of the same memory, as is the negative below
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_TYPES[tensor.itemsize])


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor in the order of memory, without what only repeats."""
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


def _blocks(array: _Array, size: int) -> Iterator[_Array]:
    """Cut an array into parts of at most so many bytes, in the order of its elements."""
    if array.nbytes <= size:
        yield array
    elif len(array) == 1:
        yield from _blocks(array[0], size)
    else:
        some = max(1, size // (array.nbytes // len(array)))
        for first in range(0, len(array), some):
            yield from _blocks(array[first : first + some], size)


def _sum_on_cpu(array: npt.NDArray[Any]) -> int:
    """Sum up the bytes of an array, in the order of its elements."""
    if array.flags.c_contiguous and array.ctypes.data % 8 == 0:
        return _sum_of_bytes(array.reshape(-1).view(np.uint8))
    sums, left = list[_Words](), np.empty(0, np.uint8)
    for part in _blocks(array, _BLOCK):
        data = np.concatenate([left, part.copy().reshape(-1).view(np.uint8)])
        whole = len(data) // _ROW_BYTES * _ROW_BYTES if array.nbytes > _ROW_BYTES else 0
        sums.append(_sums_of_rows(data[:whole].view(np.int64)))
        left = data[whole:]
    return _sum_of_bytes(np.concatenate([*(each.view(np.uint8) for each in sums), left]))


def _sum_of_bytes(data: npt.NDArray[np.uint8]) -> int:
    end = len(data) // 8 * 8
    words = data[:end].view(np.int64)
    while len(words) > _ROW:
        whole = len(words) // _ROW * _ROW
        words = np.concatenate([_sums_of_rows(words[:whole]), words[whole:]])
    total = int(words @ _factors()[: len(words)])
    if end < len(data):
        total += int(_factors()[-1]) * int.from_bytes(data[end:].tobytes(), "little")
    return total % 2**64


def _sums_of_rows(words: _Words) -> _Words:
    sums: _Words = words.reshape(-1, _ROW) @ _factors()
    return sums


@functools.cache
def _factors_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_factors()).to(device)


def _sum_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Sum up as on the CPU; a product takes memory here, so it is made of some rows at a time."""
    first = tensor.storage_offset() * tensor.itemsize
    is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if is_plain and tensor.data_ptr() % 8 == first % 8 == 0:
        return _sum_of_bytes_on_device(tensor.reshape(-1).view(torch.uint8))
    sums = list[torch.Tensor]()
    left = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    for part in _blocks(tensor, _BLOCK):
        data = torch.cat([left, _copied(part).reshape(-1).view(torch.uint8)])
        whole = len(data) // _ROW_BYTES * _ROW_BYTES if tensor.nbytes > _ROW_BYTES else 0
        sums += _sums_of_rows_on_device(data[:whole].view(torch.int64))
        left = data[whole:]
    return _sum_of_bytes_on_device(torch.cat([*(each.view(torch.uint8) for each in sums), left]))


def _sum_of_bytes_on_device(data: torch.Tensor) -> torch.Tensor:
    factors = _factors_on(data.device)
    end = len(data) // 8 * 8
    words = data[:end].view(torch.int64)
    while len(words) > _ROW:
        whole = len(words) // _ROW * _ROW
        words = torch.cat([*_sums_of_rows_on_device(words[:whole]), words[whole:]])
    total = (words * factors[: len(words)]).sum()
    if end < len(data):
        last = torch.cat([data[end:], data.new_zeros(8 - len(data) + end)]).view(torch.int64)
        total = total + (last * factors[-1]).sum()
    return total


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    resolved = tensor.resolve_conj().resolve_neg()
    return resolved.clone(memory_format=torch.contiguous_format)


def _sums_of_rows_on_device(words: torch.Tensor) -> list[torch.Tensor]:
    factors = _factors_on(words.device)
    parts = torch.split(words.view(-1, _ROW), _ROWS)
    return [(part * factors).sum(1) for part in parts]
