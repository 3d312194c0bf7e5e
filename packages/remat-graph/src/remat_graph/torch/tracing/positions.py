"""Indices that are tensors of one number, `x[position]`, without a look at the number.

Eager reads the number and gives a view. A trace cannot read it: here the tensor is an index of one
row, whose result is a copy. The copy stands for the view unless either is written to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.kernels.masked_writes import is_mask
from remat_graph.torch.tracing.fakes import storage_key, writes_seen
from remat_graph.torch.tracing.provenance import noted_now

__all__ = ["positions_as_indices"]

_NO_COPY = (
    "forward reads tensor[position]{at}, where position is a tensor of one number, and {what}: "
    "write int(position) there. In remat.rematerialize, which runs the model, that makes regions "
    "of what is before and after it"
)
_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_WRITTEN = "writes to what it read, or to the tensor, afterwards"
_RETURNED = "returns it, where eager gives a view of what the caller has, too"


@contextmanager
def positions_as_indices() -> Iterator[Callable[..., None]]:
    """Trace reads and writes at positions that are tensors.

    Gives what checks, with the tensors that are returned and those that the caller has, that a copy
    did where eager has a view. It raises a `CaptureError` if not.
    """
    mode = _AsIndices()
    with mode:
        yield mode.check


@dataclass(slots=True)
class _Read:
    """Rows that were read of a tensor by some items, and the writes to both when both agreed."""

    tensor: torch.Tensor
    items: tuple[Any, ...]
    rows: torch.Tensor
    source: str
    moves: tuple[Any, ...]  # writes to the positions
    writes: tuple[Any, Any] = (0, 0)

    def agree(self) -> None:
        """See that they agree now."""
        self.writes = writes_seen(self.tensor), writes_seen(self.rows)

    def agrees(self) -> bool:
        """Whether neither was written to since they agreed."""
        return self.writes == (writes_seen(self.tensor), writes_seen(self.rows))

    def refused(self, what: str) -> CaptureError:
        """Give an error that names the line."""
        at = f" at {self.source}" if self.source else ""
        return CaptureError(_NO_COPY.format(at=at, what=what))

    def is_written_back(self, tensor: torch.Tensor, items: tuple[Any, ...], values: Any) -> bool:
        """Whether this is the end of `tensor[position] += …`, if only the rows were written to."""
        unchanged = tensor is self.tensor and writes_seen(tensor) == self.writes[0]
        same = len(items) == len(self.items) and all(map(_is_same, items, self.items))
        return values is self.rows and unchanged and same and _moves(items) == self.moves


class _AsIndices(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._reads: list[_Read] = []
        self._read_of: dict[int, _Read] = {}  # by the id of its rows
        self._last: _Read | None = None  # whose rows the last call may have written to, as first

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function, and what reads or writes at a position by an index."""
        last, self._last = self._last, self._read_of.get(id(args[0])) if args else None
        if self._last is not None and not self._last.agrees():
            self._last = None
        if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
            tensor, index, *values = args
            items = index if isinstance(index, tuple) else (index,)
            positions = sum(map(_is_position, items))
            if positions and not values:
                return self._read(tensor, items)
            if positions == 1 and all(map(_is_plain, items)):
                return self._write(tensor, items, values[0], last)
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: torch.Tensor, items: tuple[Any, ...]) -> torch.Tensor:
        rows = tensor
        for place, axis in reversed(list(_axes(tensor, items))):
            rows = torch.ops.aten.index(rows, [None] * axis + [_as_index(items[place])])
            rows = rows.squeeze(axis)
        others = tuple(item for item in items if not _is_position(item))
        rows = rows[others] if others else rows
        read = _Read(tensor, items, rows, noted_now()[1], _moves(items))
        read.agree()
        self._reads.append(read)
        self._read_of[id(rows)] = read
        return rows

    def _write(
        self, tensor: torch.Tensor, items: tuple[Any, ...], values: Any, last: _Read | None
    ) -> None:
        # between `+=` and the write nothing may run: it would see the tensor without the sum
        is_end = last is not None and last.is_written_back(tensor, items, values)
        ((place, axis),) = _axes(tensor, items)
        behind = tensor.dim() - axis - 1
        if isinstance(values, torch.Tensor):
            values = values.to(tensor.dtype)
            if values.dim() > behind:
                values = values.unsqueeze(values.dim() - behind)
        tensor[(*items[:place], _as_index(items[place]), *items[place + 1 :])] = values
        if last is not None and is_end:
            last.agree()

    def check(self, returned: Iterable[Any], held: Iterable[Any]) -> None:
        """See that nothing was written to that was read, and that the caller sees no difference."""
        if not self._reads:
            return
        for read in self._reads:
            if not read.agrees():
                raise read.refused(_WRITTEN)
        view_of = {storage_key(read.rows): storage_key(read.tensor) for read in self._reads}
        given, seen = _memory(returned), Counter[int]()
        for key in given | _memory(held):
            seen[_root(key, view_of)] += 1
        for read in self._reads:
            key = storage_key(read.rows)
            if key in given and seen[_root(key, view_of)] > 1:
                raise read.refused(_RETURNED)


def _memory(tensors: Iterable[Any]) -> set[int]:
    dense = (
        each for each in tensors if isinstance(each, torch.Tensor) and each.layout is torch.strided
    )
    return set(map(storage_key, dense))


def _root(key: int, view_of: Mapping[int, int]) -> int:
    """Find the memory that is viewed, in eager."""
    while key in view_of:
        key = view_of[key]
    return key


def _as_index(position: torch.Tensor) -> torch.Tensor:
    """Make it one, that stays when the position changes: a backward reads it again."""
    return position.reshape(1).long().clone()


def _is_position(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in _NUMBERS


def _moves(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(writes_seen(item) for item in items if _is_position(item))


def _is_same(one: Any, other: Any) -> bool:
    are_slices = isinstance(one, slice) and isinstance(other, slice)
    return bool(one is other or (are_slices and one == other))


def _is_plain(item: Any) -> bool:
    """Whether it is a position, or slices."""
    return item is Ellipsis or isinstance(item, slice) or _is_position(item)


def _axes(tensor: torch.Tensor, items: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    """Give the place of each position among the items, and the axis that it is along."""
    lengths = [_dims(item) for item in items]
    axis = 0
    for place, (item, length) in enumerate(zip(items, lengths, strict=True)):
        if _is_position(item):
            yield place, axis
        axis += tensor.dim() - sum(lengths) if item is Ellipsis else length


def _dims(item: Any) -> int:
    """Count the dimensions that an item is along."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and is_mask(item) else 1
