"""Where boxes and arrows of one block of a picture go: layers from top to bottom.

The usual steps (Sugiyama et al., 1981): a box stands below all that it depends on; an arrow past a
layer gets a lane in it, which all arrows from one source share; layers are ordered by the mean of
their neighbours; then each layer is moved towards its neighbours as far as its order and distances
let it, by isotonic regression, which is exact in linear time. It is good to look at, not optimal.

An arrow past more than `MOST_LANES` layers gets no lanes: all such share one beside the boxes, on
the right, where they cannot be told apart, but where they start and end. So n boxes have at most
`MOST_LANES` * n lanes, and the layout takes O(n log n) for them and time linear in the arrows.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["MOST_LANES", "Layout", "lay_out"]

MOST_LANES = 24

_GAP_X, _GAP_Y = 14.0, 22.0
_LANE = 6.0
_LANE_WEIGHT = 0.1  # of what a box weighs where both want the same place
_SWEEPS = 6
_MOST_IN_A_LAYER = 8

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layout:
    """The upper left corner of each box, the points of each arrow, and the size of it all."""

    corners: tuple[Point, ...]
    routes: tuple[tuple[Point, ...], ...]
    width: float
    height: float


@dataclass(slots=True)
class _Slot:
    """A box, or the lane of the arrows of a box, in one layer."""

    box: int
    layer: int
    width: float
    is_lane: bool
    centre: float = 0.0


def lay_out(sizes: Sequence[Point], arrows: Sequence[tuple[int, int]]) -> Layout:
    """Place boxes of these widths and heights; every arrow goes to a later box."""
    if not sizes:
        return Layout((), (), 0.0, 0.0)
    layers = _layers(len(sizes), arrows)
    slots, links = _slots(sizes, layers, arrows)
    rows: list[list[int]] = [[] for _ in range(max(layers) + 1)]
    for index, slot in enumerate(slots):
        rows[slot.layer].append(index)
    above: list[list[int]] = [[] for _ in slots]
    below: list[list[int]] = [[] for _ in slots]
    for upper, lower in links:
        below[upper].append(lower)
        above[lower].append(upper)
    _arrange(slots, rows, above, below)
    left = min(slot.centre - slot.width / 2 for slot in slots)
    width = max(slot.centre + slot.width / 2 for slot in slots) - left
    tops, bottoms, y = [], [], 0.0
    for row in rows:
        height = max((sizes[slots[i].box][1] for i in row if i < len(sizes)), default=0.0)
        tops.append(y)
        bottoms.append(y + height)
        y += height + _GAP_Y
    corners, centres = [], [slot.centre - left for slot in slots]
    for i, (box_width, box_height) in enumerate(sizes):
        middle = (tops[layers[i]] + bottoms[layers[i]]) / 2
        corners.append((centres[i] - box_width / 2, middle - box_height / 2))
    beside = width + _GAP_X
    if any(layers[target] - layers[source] > MOST_LANES + 1 for source, target in arrows):
        width = beside + _LANE
    lanes = {
        (slot.box, slot.layer): centre
        for slot, centre in zip(slots[len(sizes) :], centres[len(sizes) :], strict=True)
    }
    routes = []
    for source, target in arrows:
        start, end = layers[source], layers[target]
        bottom = corners[source][1] + sizes[source][1]
        points = [(centres[source], bottom), (centres[source], bottoms[start])]
        if end - start > MOST_LANES + 1:
            points += [(beside, tops[start + 1]), (beside, bottoms[end - 1])]
        else:
            for layer in range(start + 1, end):
                lane = lanes[source, layer]
                points += [(lane, tops[layer]), (lane, bottoms[layer])]
        points += [(centres[target], tops[end]), (centres[target], corners[target][1])]
        routes.append(tuple(points))
    return Layout(tuple(corners), tuple(routes), width, bottoms[-1])


def _layers(count: int, arrows: Sequence[tuple[int, int]]) -> list[int]:
    """Put each box below its sources; one without sources goes as low as its readers let it.

    A layer takes so many boxes; what would be one more goes to the next.
    """
    sources: list[list[int]] = [[] for _ in range(count)]
    readers: list[list[int]] = [[] for _ in range(count)]
    for source, target in arrows:
        sources[target].append(source)
        readers[source].append(target)
    layers = [0] * count
    load = [0] * (count + 1)
    for i in range(count):
        layers[i] = 1 + max((layers[source] for source in sources[i]), default=-1)
        while load[layers[i]] == _MOST_IN_A_LAYER:
            layers[i] += 1
        load[layers[i]] += 1
    for i in reversed(range(count)):
        if readers[i] and not sources[i]:
            lowest = min(layers[reader] for reader in readers[i]) - 1
            if load[lowest] < _MOST_IN_A_LAYER:
                load[layers[i]] -= 1
                load[lowest] += 1
                layers[i] = lowest
    rank = {layer: i for i, layer in enumerate(sorted(set(layers)))}
    return [rank[layer] for layer in layers]


def _slots(
    sizes: Sequence[Point], layers: Sequence[int], arrows: Sequence[tuple[int, int]]
) -> tuple[list[_Slot], list[tuple[int, int]]]:
    """Make the slots, those of boxes first, and the links between slots of adjacent layers."""
    slots = [_Slot(i, layers[i], width, is_lane=False) for i, (width, _) in enumerate(sizes)]
    lanes: dict[tuple[int, int], int] = {}
    links: dict[tuple[int, int], None] = {}  # a set in order
    for source, target in arrows:
        if layers[target] - layers[source] > MOST_LANES + 1:
            continue
        upper = source
        for layer in range(layers[source] + 1, layers[target]):
            if (source, layer) not in lanes:
                lanes[source, layer] = len(slots)
                slots.append(_Slot(source, layer, _LANE, is_lane=True))
            links[upper, lanes[source, layer]] = None
            upper = lanes[source, layer]
        links[upper, target] = None
    return slots, list(links)


def _arrange(
    slots: list[_Slot], rows: list[list[int]], above: list[list[int]], below: list[list[int]]
) -> None:
    """Order the rows and set the centres, sweeping down and up."""
    for row in rows:
        row.sort(key=lambda i: (slots[i].box, i))
        _spread(slots, row, [0.0] * len(row))
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for row in rows if down else reversed(rows):
            wanted = _wanted(slots, row, neighbours)
            if sweep < _SWEEPS:
                order = sorted(range(len(row)), key=wanted.__getitem__)
                row[:] = [row[position] for position in order]
                wanted = [wanted[position] for position in order]
            _spread(slots, row, wanted)
    both = [[*up, *down] for up, down in zip(above, below, strict=True)]
    for row in rows:
        _spread(slots, row, _wanted(slots, row, both))


def _wanted(
    slots: list[_Slot], row: Sequence[int], neighbours: Sequence[Sequence[int]]
) -> list[float]:
    """Find where slots want to be: with those of their kind, so that chains and lanes run straight.

    One without neighbours wants to be with the slot beside it.
    """
    centres_by_position: dict[int, float] = {}
    for position, i in enumerate(row):
        alike = [n for n in neighbours[i] if slots[n].is_lane == slots[i].is_lane]
        centres = [slots[n].centre for n in alike or neighbours[i]]
        if centres:
            centres_by_position[position] = sum(centres) / len(centres)
    if not centres_by_position:
        return [slots[i].centre for i in row]
    linked = list(centres_by_position)

    def nearest(position: int) -> int:
        after = bisect(linked, position)
        return min(linked[max(0, after - 1) : after + 1], key=lambda k: abs(k - position))

    return [centres_by_position[nearest(position)] for position in range(len(row))]


def _spread(slots: list[_Slot], row: Sequence[int], wanted: Iterable[float]) -> None:
    """Set the centres of a row nearest to what is wanted, keeping order and distance."""
    offsets, offset = [], 0.0
    for position, i in enumerate(row):
        if position:
            offset += (slots[row[position - 1]].width + slots[i].width) / 2 + _GAP_X
        offsets.append(offset)
    pools: list[
        tuple[float, float, int]
    ] = []  # weighted sum, weight and count of what moves as one
    for i, want, shift in zip(row, wanted, offsets, strict=True):
        weight = _LANE_WEIGHT if slots[i].is_lane else 1.0
        total, count = weight * (want - shift), 1
        while pools and pools[-1][0] / pools[-1][1] > total / weight:
            before = pools.pop()
            total, weight, count = total + before[0], weight + before[1], count + before[2]
        pools.append((total, weight, count))
    position = 0
    for total, weight, count in pools:
        for _ in range(count):
            slots[row[position]].centre = total / weight + offsets[position]
            position += 1
