"""What operators make of fake tensors, known from what they made of others that look the same.

Torch keeps such a table, too, but takes most of the time of running an operator for looking it up:
this one is given a key, and makes the tensors. It holds for operators of torch that give a tensor,
or a tuple of them, and write to none, where nothing depends on data, not even on that of the small
constants whose data fake tensors know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from remat_graph.torch.tracing.fakes import new_fake, storage_key

__all__ = ["FakeOutputs", "looks_of"]

_DEPENDENT = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)


def looks_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Describe what an operator and its caller can see of a fake tensor."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.is_neg(),
        tensor.is_conj(),
    )


@dataclass(frozen=True, slots=True)
class _Output:
    """A new tensor, or a view of the tensor at the position `base` of what was read."""

    looks: tuple[Any, ...]
    base: int | None
    mode: FakeTensorMode

    def again(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make it of others."""
        shape, stride, offset, dtype, device, *_ = self.looks
        storage = None if self.base is None else tensors[self.base].untyped_storage()
        return new_fake(self.mode, shape, stride, dtype, device, storage, offset)


class FakeOutputs:
    """What was made before."""

    def __init__(self) -> None:
        self._known: dict[Any, _Output | tuple[_Output, ...]] = {}

    def run(
        self,
        func: Any,
        key: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        run: Callable[[], Any],
    ) -> Any:
        """Give what an operator makes; `key` is of it, its arguments and the looks of `tensors`.

        `run` runs it, if what it makes is not known.
        """
        if not _is_simple(func) or not all(map(_is_plain, tensors)):
            return run()
        whole_key = (torch.get_default_dtype(), *key)
        earlier = self._known.get(whole_key)
        if earlier is not None:
            if isinstance(earlier, tuple):
                return tuple([output.again(tensors) for output in earlier])
            return earlier.again(tensors)
        result = run()
        output = _read_all(result, tensors) if type(result) is tuple else _read(result, tensors)
        if output is not None:
            self._known[whole_key] = output
        return result


@functools.cache
def _is_simple(func: Any) -> bool:
    return (
        isinstance(func, torch._ops.OpOverload)
        and func.namespace == "aten"
        and not func._schema.is_mutable
        and not _DEPENDENT.intersection(func.tags)
    )


def _is_plain(tensor: torch.Tensor) -> TypeGuard[FakeTensor]:
    return (
        type(tensor) is FakeTensor
        and tensor.constant is None
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _read(result: Any, tensors: Sequence[torch.Tensor]) -> _Output | None:
    """Describe what was made, if that can be made again."""
    if not isinstance(result, torch.Tensor) or not _is_plain(result):
        return None
    if any(result is tensor for tensor in tensors):
        return None
    storages = list(map(storage_key, tensors))
    storage = storage_key(result)
    base = storages.index(storage) if storage in storages else None
    if base is None and (result.storage_offset() or result.layout != torch.strided):
        return None
    return _Output(looks_of(result), base, result.fake_mode)


def _read_all(
    results: tuple[Any, ...], tensors: Sequence[torch.Tensor]
) -> tuple[_Output, ...] | None:
    """Describe what was made, if all can be made again, each in a storage of its own."""
    outputs = [_read(result, tensors) for result in results]
    readable = tuple([output for output in outputs if output is not None])
    if len(readable) < len(results) or len(set(map(storage_key, results))) < len(results):
        return None
    return readable
