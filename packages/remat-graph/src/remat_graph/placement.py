"""With which forward op each backward op sits, so that a block of forward ops has a backward half.

A backward op sits with its twin. One without a twin, such as the sum of two gradients, sits with
the contributor whose block runs last in the backward pass, where the sum can be made as soon as it
has all its terms (HiRemate, B.1.2, lets contributors add into one slot; here a sum is an op). In
general an op sits at the earliest, in the order of the hierarchy, of its twin and of the places of
the backward ops that it depends on. One that depends on nothing placed (a constant) sits with the
first of its readers to run. A first backward op without a twin stands for the loss and sits
nowhere, and so does what has no other op to sit with.

Guarantee: no backward op depends on one that sits earlier in the order of the hierarchy. So in the
reverse of that order the backward halves of the members of every block are in execution order, and
their quotient is acyclic, as that of the forward halves is. Time: linear, times the alternations of
sources and readers by which the last op is placed, which are two in training graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remat_graph.graph import Graph

__all__ = ["backward_placement"]


def backward_placement(graph: Graph, order: Iterable[str]) -> dict[str, str]:
    """Find the forward op with which each backward op sits; one that sits nowhere is left out.

    `order` has every forward op once, in the order of the hierarchy.
    """
    forward = list(order)
    position = {name: i for i, name in enumerate(forward)}
    first = graph.boundary_index
    sources = _backward_sources(graph)
    place: list[int | None] = [
        None if op.twin is None else position[op.twin] for op in graph.ops[first:]
    ]
    loss_first = bool(place) and place[0] is None
    _place_by_sources(place, sources)
    while _place_by_readers(place, sources, loss_first):  # which may place readers of others
        _place_by_sources(place, sources)
    return {
        op.name: forward[at]
        for op, at in zip(graph.ops[first:], place, strict=True)
        if at is not None
    }


def _backward_sources(graph: Graph) -> list[list[int]]:
    """List, for each backward op, the backward ops before it on which it depends."""
    first = graph.boundary_index
    sources = []
    for op in graph.ops[first:]:
        made_by = (graph.producer.get(v, -1) for v in op.inputs)
        indices = (*made_by, *(graph.op_index[earlier] for earlier in op.order_after))
        sources.append([i - first for i in indices if i >= first])
    return sources


def _place_by_sources(place: list[int | None], sources: Sequence[Sequence[int]]) -> None:
    """Move each op to the earliest of where it is and where its sources are."""
    for i, own in enumerate(place):
        places = [at for at in (own, *(place[source] for source in sources[i])) if at is not None]
        place[i] = min(places, default=None)


def _place_by_readers(
    place: list[int | None], sources: Sequence[Sequence[int]], loss_first: bool
) -> bool:
    """Place each op that is nowhere yet with the first of its readers to run, if one is placed.

    Says whether there was any.
    """
    before = place.count(None)
    nowhere = [at is None for at in place]
    if loss_first:
        nowhere[0] = False
    for i in reversed(range(len(place))):
        reader = place[i]
        if reader is None:
            continue
        for source in sources[i]:
            if nowhere[source]:
                earlier = place[source]
                place[source] = reader if earlier is None else max(earlier, reader)
    return place.count(None) < before
