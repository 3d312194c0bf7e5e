"""Axes that are cut as one.

An operator that can be cut along each of two neighbouring axes, row by row and with all else placed
alike, makes each row of the one for each of the other by itself. So it can be cut along both as
one: a slice then holds any rows, such as tokens of several sentences, as if they were of one.
"""

from __future__ import annotations

from collections.abc import Mapping

from remat_graph.torch.calls import Call, TensorFacts
from remat_graph.torch.slices.placement import Place, Placement, Size, Sliced

__all__ = ["with_joined"]


def with_joined(
    call: Call, ways: tuple[Placement, ...], facts: Mapping[str, TensorFacts]
) -> tuple[Placement, ...]:
    """Add to the ways of running a call in slices those that cut several axes as one."""
    by_row = [way for way in ways if way.is_sliced and _is_by_row(call, way, facts)]
    known_ways, new = dict.fromkeys(ways), by_row
    while new:
        pairs = [_joined(call, one, other, facts) for one in new for other in by_row]
        new = [way for way in pairs if way is not None and way not in known_ways]
        known_ways.update(dict.fromkeys(new))
    return tuple(known_ways)


def _is_by_row(call: Call, way: Placement, facts: Mapping[str, TensorFacts]) -> bool:
    return set(way.lengths(call, facts)) == {way.units(call, facts)}


def _joined(
    call: Call, one: Placement, other: Placement, facts: Mapping[str, TensorFacts]
) -> Placement | None:
    """Join two ways, of which the first cuts the axes in front; `None` if they do not fit."""
    names = (*call.variables, *call.results)
    pairs = zip(names, (*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True)
    places = [_place(name, front, behind, facts) for name, front, behind in pairs]
    sizes = [_size(front, behind) for front, behind in zip(one.sizes, other.sizes, strict=False)]
    known_places = [place for place in places if place is not None]
    known_sizes = [size for size in sizes if size is not None]
    if (
        len(known_places) < len(places)
        or not len(known_sizes) == len(one.sizes) == len(other.sizes)
        or (one.replaced, one.by_share) != (other.replaced, other.by_share)
    ):
        return None
    inputs, outputs = known_places[: len(one.inputs)], known_places[len(one.inputs) :]
    return Placement(tuple(inputs), tuple(outputs), tuple(known_sizes), one.replaced, one.by_share)


def _place(
    name: str | None, front: Place, behind: Place, facts: Mapping[str, TensorFacts]
) -> Place | None:
    if not isinstance(front, Sliced) or not isinstance(behind, Sliced):
        return front if front == behind else None
    between = range(front.axis + 1, behind.first)
    if behind.first <= front.axis or (between and name is None):
        return None
    if name is not None and any(facts[name].shape[axis] != 1 for axis in between):
        return None
    return Sliced(behind.axis, behind.axis - front.first)


def _size(front: Size, behind: Size) -> Size | None:
    if front.argument != behind.argument or front.position is None or behind.position is None:
        return None
    joined = behind.position - front.position + front.joined
    return Size(behind.argument, behind.position, joined)
