"""Rules of what takes tensors apart, turns, widens and joins them: an axis is followed.

All of these are linear, so a sum may be viewed before it is finished.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from remat_graph.torch.slices.placement import SUMMED, Placement, Reading, Size, Sliced

__all__ = ["RULES"]

aten = torch.ops.aten


def _followed(
    c: Reading, pairs: Iterable[tuple[int, int]], sizes: str | None = None
) -> Iterator[Placement]:
    """Place the first argument and all results along pairs of axes; `sizes` has those of a result.

    Axes of length one cannot be cut.
    """
    name = c.call.argument_names[0]
    shape, count = c.shape(name), len(c.call.results)
    for source, target in pairs:
        if shape[source] > 1:
            listed = [] if sizes is None else [Size(sizes, target - len(c[sizes]))]
            yield c.placement({name: source}, [target] * count, sizes=listed)
    yield c.placement({name: SUMMED}, [SUMMED] * count)


def _same(c: Reading) -> Iterator[Placement]:
    yield from _followed(c, [(axis, axis) for axis in range(c.rank("self"))])


def _reshaped(c: Reading) -> Iterator[Placement]:
    """Follow the first of the axes that are joined or parted, as one: slices stay in one piece."""
    result = c.result()
    if result is None:
        return
    pairs = _first_axes(c.shape("self"), result.shape)
    for source, place in sorted(pairs, key=lambda pair: pair[0].joined + pair[1].joined):
        size = Size("size", place.axis, place.joined)
        yield c.placement({"self": source}, [place], sizes=[size])
    yield c.placement({"self": SUMMED}, [SUMMED])


def _first_axes(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[Sliced, Sliced]]:
    """Pair the first axes of groups of axes that hold the same elements, one and more of each."""
    if 0 in old:
        return
    left = [axis for axis, size in enumerate(old) if size > 1]
    right = [axis for axis, size in enumerate(new) if size > 1]
    while left:
        one, other = [left.pop(0)], [right.pop(0)]
        while (size := _size(old, one)) != (new_size := _size(new, other)):
            one.append(left.pop(0)) if size < new_size else other.append(right.pop(0))
        for last in one:
            for end in other:
                yield Sliced(last, last - one[0]), Sliced(end, end - other[0])


def _size(shape: tuple[int, ...], axes: list[int]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _permuted(c: Reading) -> Iterator[Placement]:
    rank = c.rank("self")
    yield from _followed(c, [(dim % rank, target) for target, dim in enumerate(c["dims"])])


def _turned(c: Reading) -> Iterator[Placement]:
    """Follow axes of `t`, which leaves a vector as it is, and of `transpose`."""
    axes = list(range(c.rank("self")))
    if c.call.target is aten.t.default:
        axes.reverse()
    else:
        one, other = c.axis("dim0", len(axes)), c.axis("dim1", len(axes))
        axes[one], axes[other] = axes[other], axes[one]
    yield from _followed(c, [(source, target) for target, source in enumerate(axes)])


def _unsqueezed(c: Reading) -> Iterator[Placement]:
    rank = c.rank("self")
    new = c.axis("dim", rank + 1)
    yield from _followed(c, [(axis, axis + (axis >= new)) for axis in range(rank)])


def _squeezed(c: Reading) -> Iterator[Placement]:
    """Follow all axes but those that go if they have one element, as they may in a slice."""
    shape, dim = c.shape("self"), c["dim"]
    dims = {each % len(shape) for each in (dim if isinstance(dim, (list, tuple)) else [dim])}
    gone = {dim for dim in dims if shape[dim] == 1}
    kept = [axis for axis in range(len(shape)) if axis not in gone]
    yield from _followed(c, [(axis, kept.index(axis)) for axis in kept if axis not in dims])


def _expanded(c: Reading) -> Iterator[Placement]:
    """Follow axes; along new ones, a slice repeats the whole as often as it has rows."""
    shape, size = c.shape("self"), c["size"]
    more = len(size) - len(shape)
    there = [axis for axis, length in enumerate(shape) if length > 1]
    yield from _followed(c, [(axis, axis + more) for axis in there], "size")
    for target, length in enumerate(size):
        if length > 1 and target - more not in there:
            yield c.placement({}, [target], sizes=[Size("size", target)])


def _repeated(c: Reading) -> Iterator[Placement]:
    """Follow axes that are not repeated, and repeat what is whole along others."""
    shape, repeats = c.shape("self"), c["repeats"]
    more = len(repeats) - len(shape)
    once = [axis for axis in range(len(shape)) if repeats[axis + more] == 1]
    yield from _followed(c, [(axis, axis + more) for axis in once])
    for target, count in enumerate(repeats):
        if count > 1:
            yield c.placement({}, [target], sizes=[Size("repeats", target)])


def _selected(c: Reading) -> Iterator[Placement]:
    """Follow all axes but the one that goes."""
    rank = c.rank("self")
    gone = c.axis("dim", rank)
    yield from _followed(c, [(a, a - (a > gone)) for a in range(rank) if a != gone])


def _parted(c: Reading) -> Iterator[Placement]:
    """Follow all axes but the one along which parts are taken."""
    rank = c.rank("self")
    dim = c.axis("dimension" if c.call.target is aten.unfold.default else "dim", rank)
    yield from _followed(c, [(axis, axis) for axis in range(rank) if axis != dim])


def _joined(c: Reading) -> Iterator[Placement]:
    """Follow all axes but the one along which tensors are joined.

    Old empty vectors, which `cat` leaves out, are whole.
    """
    shapes = [c.facts_of(item).shape for item in c["tensors"]]
    rank = max(map(len, shapes))
    stacked = c.call.target is aten.stack.default
    dim = c.axis("dim", rank + stacked)
    for axis in range(rank):
        target = axis + (stacked and axis >= dim)
        if target != dim and all(len(shape) == rank for shape in shapes) and shapes[0][axis] > 1:
            yield c.placement({"tensors": [axis] * len(shapes)}, [target])
    yield c.placement({"tensors": [SUMMED] * len(shapes)}, [SUMMED])


def _padded(c: Reading) -> Iterator[Placement]:
    """Follow axes without padding; zeros may be put around a sum."""
    rank, pad = c.rank("self"), c["pad"]
    free = [axis for axis in range(rank) if not any(pad[2 * (rank - 1 - axis) :][:2])]
    for axis in free:
        if c.shape("self")[axis] > 1:
            yield c.placement({"self": axis}, [axis])
    if c["value"] == 0:
        yield c.placement({"self": SUMMED}, [SUMMED])


def _put_back(c: Reading) -> Iterator[Placement]:
    """Follow axes of the backward of `select` and `slice`, which puts a part among zeros."""
    rank = len(c["input_sizes"])
    dim = c.axis("dim", rank)
    gone = c.call.target is aten.select_backward.default
    pairs = [(axis - (gone and axis > dim), axis) for axis in range(rank) if axis != dim]
    yield from _followed(c, pairs, "input_sizes")


def _assigned(c: Reading) -> Iterator[Placement]:
    """Follow axes of an assignment to a part, but the one along which the part is taken."""
    shape = c.shape("self")
    dim = c.axis("dim", len(shape))
    gone = c.call.target is aten.select_scatter.default
    for axis in range(len(shape)):
        if axis != dim and shape[axis] > 1:
            yield c.placement({"self": axis, "src": axis - (gone and axis > dim)}, [axis])
    yield c.placement({"self": SUMMED, "src": SUMMED}, [SUMMED])


RULES = {
    **dict.fromkeys((aten.alias.default, aten.detach.default), _same),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _reshaped),
    aten.permute.default: _permuted,
    **dict.fromkeys((aten.t.default, aten.transpose.int), _turned),
    aten.unsqueeze.default: _unsqueezed,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _squeezed),
    aten.expand.default: _expanded,
    aten.repeat.default: _repeated,
    **dict.fromkeys((aten.select.int, aten.unbind.int), _selected),
    **dict.fromkeys(
        (
            aten.slice.Tensor,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unfold.default,
        ),
        _parted,
    ),
    **dict.fromkeys((aten.cat.default, aten.stack.default), _joined),
    aten.constant_pad_nd.default: _padded,
    **dict.fromkeys((aten.select_backward.default, aten.slice_backward.default), _put_back),
    **dict.fromkeys((aten.select_scatter.default, aten.slice_scatter.default), _assigned),
}
