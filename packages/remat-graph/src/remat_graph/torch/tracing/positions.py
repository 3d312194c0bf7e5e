"""Indices that are tensors of one number, `x[position]`, without a look at the number.

Eager reads the number and gives a view. A trace cannot read it: here the tensor is an index of one
row, whose result is a copy. The copy stands for the view unless either is written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat_graph.torch.errors import CaptureError
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
    """Rows that were read of a tensor by some items, and the versions at which both agreed."""

    tensor: torch.Tensor
    items: tuple[Any, ...]
    rows: torch.Tensor
    source: str
    versions: tuple[int, int] = (0, 0)

    def agree(self) -> None:
        """See that they agree now."""
        self.versions = self.tensor._version, self.rows._version

    def is_written_back(self, tensor: torch.Tensor, items: tuple[Any, ...], values: Any) -> bool:
        """Whether this is the end of `tensor[position] += …`."""
        unchanged = tensor is self.tensor and tensor._version == self.versions[0]
        same = len(items) == len(self.items) and all(map(_is_same, items, self.items))
        return values is self.rows and unchanged and same


class _AsIndices(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._reads: list[_Read] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function, and what reads or writes at a position by an index."""
        if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
            tensor, index, *values = args
            items = index if isinstance(index, tuple) else (index,)
            positions = sum(map(_is_position, items))
            if positions and not values:
                return self._read(tensor, items)
            if positions == 1 and all(map(_is_plain, items)):
                return self._write(tensor, items, *values)
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: torch.Tensor, items: tuple[Any, ...]) -> torch.Tensor:
        rows = tensor
        for place, axis in reversed(list(_axes(tensor, items))):
            rows = torch.ops.aten.index(rows, [None] * axis + [items[place].reshape(1)])
            rows = rows.squeeze(axis)
        others = tuple(item for item in items if not _is_position(item))
        rows = rows[others] if others else rows
        self._reads.append(_Read(tensor, items, rows, noted_now()[1]))
        self._reads[-1].agree()
        return rows

    def _write(self, tensor: torch.Tensor, items: tuple[Any, ...], values: Any) -> None:
        back = [read for read in self._reads if read.is_written_back(tensor, items, values)]
        ((place, axis),) = _axes(tensor, items)
        behind = tensor.dim() - axis - 1
        if isinstance(values, torch.Tensor) and values.dim() > behind:
            values = values.unsqueeze(values.dim() - behind)
        tensor[(*items[:place], items[place].reshape(1), *items[place + 1 :])] = values
        for read in back:
            read.agree()

    def check(self, returned: Iterable[Any], held: Iterable[Any]) -> None:
        """See that nothing was written to that was read, and that the caller sees no difference."""
        if not self._reads:
            return
        given = {id(_base(each)) for each in returned if isinstance(each, torch.Tensor)}
        seen = given | {id(_base(each)) for each in held if isinstance(each, torch.Tensor)}
        for read in self._reads:
            at = f" at {read.source}" if read.source else ""
            if read.versions != (read.tensor._version, read.rows._version):
                raise CaptureError(_NO_COPY.format(at=at, what=_WRITTEN))
            if id(_base(read.rows)) in given and id(_base(read.tensor)) in seen:
                raise CaptureError(_NO_COPY.format(at=at, what=_RETURNED))


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _is_position(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in _NUMBERS


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
    is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if is_mask else 1
