"""One level of a hierarchy: the ops of a block and its smaller blocks as nodes in a fixed order.

A node is an op, or one half of a smaller block. Halves come with choices: the forward half may be
run with any option, and then it leaves what the backward half needs to be run with the same one
(the *phantom* of HiRemate, B.1.1); or it may *forget*, and leave its outputs alone. A choice says
what its first run and what later runs do: a later one runs what leads to values that can be made
again. Only values that one node makes and another one reads are seen here, and results.

The order is that of the forward members, then that of the backward ops as far as the blocks allow;
a level without smaller blocks keeps the order of its graph.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from remat_solvers.core.wiring import Wiring
from remat_solvers.published.hierarchical.blocks.runs import Run, again, measure_run, saved_between

__all__ = ["Choice", "Layer", "Level", "Node"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A smaller block: its forward and backward ops in order, and options as pairs of runs of ops.

    Op numbers are those of the level's graph.
    """

    name: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    options: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A way of running a node: the first time, and later (`None` where it cannot be run again).

    `option` counts those of the layer; `None` for a plain op and for a forward half that forgets.
    `saved` is what the option keeps between the halves.
    """

    option: int | None
    first: Run
    later: Run | None
    saved: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a level; `layer` counts the smaller blocks, `None` for a plain op."""

    name: str
    layer: int | None
    backward: bool
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes in the order of their first runs; values and ops are numbered as in `wiring`."""

    wiring: Wiring
    layers: tuple[Layer, ...]
    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, wiring: Wiring, layers: Iterable[Layer] = (), order: Sequence[int] = ()) -> Level:
        """Make the nodes; `order` ranks forward ops where it is not that of the graph."""
        layers = tuple(layers)
        rank = list(range(wiring.op_count))
        for place, op in enumerate(order):
            rank[op] = place
        halves = [half for layer in layers for half in (layer.forward, layer.backward) if half]
        grouped = {op for half in halves for op in half}
        groups = [*halves, *((op,) for op in range(wiring.op_count) if op not in grouped)]
        leaving = _leaving(wiring, layers)
        leaving_of = [
            (tuple(v for op in group for v in wiring.outputs[op] if v in leaving))
            for group in groups
        ]
        nodes: list[Node] = []
        at = 0
        for number, layer in enumerate(layers):
            forward = leaving_of[at]
            at += 1
            backward: Collection[int] = ()
            if layer.backward:
                backward = leaving_of[at]
                at += 1
            nodes += _halves(wiring, number, layer, forward, backward)
        nodes += [
            _plain(wiring, group[0], outputs)
            for group, outputs in zip(groups[at:], leaving_of[at:], strict=True)
        ]
        placed = _ordered(wiring, groups, rank)
        return cls(wiring, layers, tuple(nodes[i] for i in placed))


def _leaving(wiring: Wiring, layers: Sequence[Layer]) -> frozenset[int]:
    """Find the values that leave the op or the layer that makes them, and the results."""
    home = list(range(wiring.op_count))
    for layer in layers:
        for op in (*layer.forward, *layer.backward):
            home[op] = layer.forward[0]
    leaving = set(wiring.results.tolist())
    for op, row in enumerate(wiring.inputs):
        leaving.update(v for v in row if home[wiring.producer_list[v]] != home[op])
    return frozenset(leaving)


def _plain(wiring: Wiring, op: int, outputs: tuple[int, ...]) -> Node:
    run = measure_run(wiring, (op,), outputs)
    later = run if wiring.replayable_list[op] else None
    return Node(
        wiring.graph.ops[op].name, None, backward=False, choices=(Choice(None, run, later),)
    )


def _halves(
    wiring: Wiring, number: int, layer: Layer, outputs: Collection[int], gradients: Collection[int]
) -> list[Node]:
    forward: list[Choice] = []
    backward: list[Choice] = []
    for option, (ahead, back) in enumerate(layer.options):
        saved = saved_between(wiring, ahead, back, outputs)
        repeated = again(wiring, ahead, outputs, saved)
        later = None if repeated is None else measure_run(wiring, repeated, outputs, saved)
        first = measure_run(wiring, ahead, outputs, saved)
        forward.append(Choice(option, first, later, saved))
        run = measure_run(wiring, back, gradients, consumed=saved)
        replayable = all(wiring.replayable_list[op] for op in back)
        backward.append(Choice(option, run, run if replayable else None, saved))
    repeated = again(wiring, layer.forward, outputs)
    later = None if repeated is None else measure_run(wiring, repeated, outputs)
    forward.append(Choice(None, measure_run(wiring, layer.forward, outputs), later))
    nodes = [Node(layer.name, number, backward=False, choices=tuple(forward))]
    if layer.backward:
        nodes.append(Node(layer.name, number, backward=True, choices=tuple(backward)))
    return nodes


def _ordered(wiring: Wiring, groups: Sequence[Sequence[int]], rank: Sequence[int]) -> list[int]:
    """Order the groups by their first op as far as what they depend on allows, forward first."""
    graph, boundary = wiring.graph, wiring.graph.boundary_index
    home = {op: i for i, group in enumerate(groups) for op in group}
    followers: list[set[int]] = [set() for _ in groups]
    for op, row in enumerate(wiring.inputs):
        sources = [wiring.producer_list[v] for v in row]
        sources += [graph.op_index[name] for name in graph.ops[op].order_after]
        for source in sources:
            if home[source] != home[op]:
                followers[home[source]].add(home[op])
    waiting = [0] * len(groups)
    for targets in followers:
        for target in targets:
            waiting[target] += 1

    def key(i: int) -> tuple[bool, int, int]:
        first = min(rank[op] for op in groups[i])
        return groups[i][0] >= boundary, first, i

    ready = [key(i) for i, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)[2]
        order.append(i)
        for target in followers[i]:
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, key(target))
    if len(order) < len(groups):
        raise ValueError("the blocks depend on one another in a circle")
    return order
