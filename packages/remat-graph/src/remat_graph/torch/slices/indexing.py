"""Rules of reading and writing by indices: along other axes, or one slice of indices at a time.

Rows that are read by slices of indices come sliced; the backward of that, which adds rows up, is
summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from remat_graph.torch.calls import Variable
from remat_graph.torch.slices.placement import SUMMED, WHOLE, Place, Placement, Reading

__all__ = ["RULES"]

aten = torch.ops.aten


def _embedding(c: Reading) -> Iterator[Placement]:
    """Cut the indices, or the columns of the table."""
    shape = c.shape("indices")
    for axis, size in enumerate(shape):
        if size > 1:
            yield c.placement({"indices": axis}, [axis])
    if c.shape("weight")[1] > 1:
        yield c.placement({"weight": 1}, [len(shape)])


def _embedding_backward(c: Reading) -> Iterator[Placement]:
    """Add up the rows of the slices, unless they are scaled by how often each comes in all."""
    shape = c.shape("grad_output")
    for axis, size in enumerate(shape[:-1]):
        if size > 1 and not c["scale_grad_by_freq"]:
            yield c.placement({"grad_output": axis, "indices": axis}, [SUMMED])
    if shape[-1] > 1:
        yield c.placement({"grad_output": len(shape) - 1}, [1])


def _index_select(c: Reading) -> Iterator[Placement]:
    shape = c.shape("self")
    dim = c.axis("dim", len(shape))
    for axis, size in enumerate(shape):
        if axis != dim and size > 1:
            yield c.placement({"self": axis}, [axis])
    if c.rank("index") and c.shape("index")[0] > 1:
        yield c.placement({"index": 0}, [dim])


def _index_add(c: Reading) -> Iterator[Placement]:
    shape = c.shape("self")
    dim = c.axis("dim", len(shape))
    for axis, size in enumerate(shape):
        if axis != dim and size > 1:
            yield c.placement({"self": axis, "source": axis}, [axis])


def _gather(c: Reading) -> Iterator[Placement]:
    """Follow axes, and cut the indices along the axis that they index."""
    shape, indices = c.shape("self"), c.shape("index")
    if len(shape) != len(indices):
        return
    dim = c.axis("dim", len(shape))
    for axis, size in enumerate(indices):
        if axis == dim and size > 1:
            yield c.placement({"index": axis}, [axis])
        elif size == shape[axis] > 1:
            yield c.placement({"self": axis, "index": axis}, [axis])


def _scatter(c: Reading) -> Iterator[Placement]:
    """Follow axes along which all tensors have one length."""
    shapes = {name: facts.shape for name, facts in c.tensors}
    shape = c.shape("self")
    dim = c.axis("dim", len(shape))
    if {len(each) for each in shapes.values()} == {len(shape)}:
        for axis, size in enumerate(shape):
            if axis != dim and size > 1 and all(each[axis] == size for each in shapes.values()):
                yield c.placement(dict.fromkeys(shapes, axis), [axis])


@dataclass(frozen=True, slots=True)
class _Axes:
    """Axes of what is indexed by tensors, and where they are in the result.

    `stay` pairs the axes that are not indexed with theirs; those of the indices, broadcast, are as
    many as `new` and come at `first`: in front, where indices do not stand side by side.
    """

    stay: tuple[tuple[int, int], ...]
    first: int
    new: int

    @property
    def rank(self) -> int:
        """The dimensions of the result."""
        return len(self.stay) + self.new


def _axes(c: Reading) -> _Axes | None:
    """Read them off a call; `None` if an index is a mask."""
    axes = [axis for axis, index in enumerate(c["indices"]) if isinstance(index, Variable)]
    indices = [c.facts_of(c["indices"][axis]) for axis in axes]
    if not axes or any(facts.dtype in (torch.bool, torch.uint8) for facts in indices):
        return None
    new = max(len(facts.shape) for facts in indices)
    beside = axes == list(range(axes[0], axes[-1] + 1))
    first = axes[0] if beside else 0
    stay = [axis for axis in range(c.rank("self")) if axis not in axes]
    pairs = ((axis, at if at < first else at + new) for at, axis in enumerate(stay))
    return _Axes(tuple(pairs), first, new)


def _index(c: Reading) -> Iterator[Placement]:
    """Follow the axes that are not indexed, and cut the indices along theirs."""
    axes = _axes(c)
    if axes is None:
        return
    for axis, target in axes.stay:
        if c.shape("self")[axis] > 1:
            yield c.placement({"self": axis}, [target])
    shapes = [
        c.facts_of(index).shape if isinstance(index, Variable) else () for index in c["indices"]
    ]
    for axis in range(-axes.new, 0):
        places: list[int | Place] = [
            axis + len(shape) if len(shape) >= -axis and shape[axis] > 1 else WHOLE
            for shape in shapes
        ]
        if any(place != WHOLE for place in places):
            yield c.placement({"indices": places}, [axes.first + axes.new + axis])


def _index_put(c: Reading) -> Iterator[Placement]:
    """Follow the axes that are not indexed."""
    axes = _axes(c)
    if axes is None:
        return
    shape, values = c.shape("self"), c.shape("values")
    for axis, at in axes.stay:
        own = at - axes.rank + len(values)
        places = {"self": axis}
        if own >= 0 and values[own] > 1:
            places["values"] = own
        if shape[axis] > 1:
            yield c.placement(places, [axis])


RULES = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_select.default: _index_select,
    aten.index_add.default: _index_add,
    aten.gather.default: _gather,
    **dict.fromkeys(
        (
            aten.scatter.reduce,
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter.value_reduce,
            aten.scatter_add.default,
        ),
        _scatter,
    ),
    **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), _index),
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), _index_put),
}
