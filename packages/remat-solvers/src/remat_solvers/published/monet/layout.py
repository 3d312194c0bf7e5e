"""A graph as MONeT sees it: a forward pass, then backward ops, each after a run of forward ops.

A *node* is an owed op of the forward half with its alternatives, or an optional op, which comes
right behind what it reads. A *segment* is an owed op of the backward half with its alternatives:
before it, nodes are computed again, at most once each and in order. One more segment, at the end,
has no op and reads the results of the forward half. What the backward half makes is made once and
held until the last segment in which anything may read it.

Left out, so that a program over this is one over fewer schedules: alternatives of a forward op that
read gradients, and optional ops that do. Source: MONeT (Shah et al. 2021), section 3, algorithms 1
and 2; a node may make several values, each of which is kept or not by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["Layout", "Node", "Segment"]

Row = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """Ops that make some of the same values; `first` are those that can run in the forward pass.

    If it is `optional`, its one op need not run there; otherwise each of `values` is made by one.
    """

    ops: Row
    first: Row
    values: Row
    optional: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops of which each of `values` is made by one, in the order in which they run.

    `reads` are the values of the forward half that some of them read, `always` those that are read
    whichever run. `held_bytes` is what the backward half made before and still needs, these ops
    included; of it, `dying` is not needed after them. `stays` are those of `values` that are.
    """

    ops: Row
    values: Row
    reads: frozenset[int]
    always: frozenset[int]
    held_bytes: int
    stays: frozenset[int]
    dying: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Nodes, segments, and where they matter.

    `place[v]` is the node that makes value `v`, -1 for what the backward half makes. `order[i]` is
    the position of op `i` among the ops of all nodes, -1 for others. Value `v` can be of use up to
    segment `last_keep[v]`, running op `i` again up to `last_run[i]`; segments count from 1.
    """

    wiring: Wiring
    alternatives: Alternatives
    nodes: tuple[Node, ...]
    segments: tuple[Segment, ...]
    place: Ints
    order: Ints
    last_keep: Ints
    last_run: Ints

    @classmethod
    def of(cls, wiring: Wiring) -> Layout:
        """Lay out a graph."""
        alternatives = Alternatives.of(wiring)
        nodes = _nodes(wiring, alternatives)
        place = np.full(wiring.value_count, -1, dtype=np.int64)
        order = np.full(wiring.op_count, -1, dtype=np.int64)
        at = 0
        for number, node in enumerate(nodes):
            place[list(node.values)] = number
            order[list(node.ops)] = np.arange(at, at + len(node.ops))
            at += len(node.ops)
        segments = tuple(_segments(wiring, alternatives, place))
        last_keep, last_run = _last_uses(wiring, nodes, segments)
        return cls(wiring, alternatives, nodes, segments, place, order, last_keep, last_run)

    @property
    def pool(self) -> list[int]:
        """The ops of all nodes in order."""
        return [op for node in self.nodes for op in node.ops]

    def producers_of(self, value: int) -> Row:
        """List the ops that can make a value of the forward half."""
        return tuple(
            op for op in self.nodes[self.place[value]].ops if value in self.wiring.outputs[op]
        )


def _nodes(wiring: Wiring, alternatives: Alternatives) -> tuple[Node, ...]:
    """Collect owed groups in order, each optional op behind the last node that it reads."""
    owed = [
        op for op in np.flatnonzero(alternatives.owed).tolist() if op < wiring.graph.boundary_index
    ]
    nodes: list[Node] = []
    available = {v for op in owed for v in wiring.outputs[op]}
    free: list[int] = []
    for op in np.flatnonzero(alternatives.optional).tolist():
        if available.issuperset(wiring.inputs[op]):
            free.append(op)
            available.update(wiring.outputs[op])
    ready: set[int] = set()

    def add_free() -> None:
        for op in list(free):
            if ready.issuperset(wiring.inputs[op]):
                free.remove(op)
                ready.update(wiring.outputs[op])
                nodes.append(Node((op,), (op,), wiring.outputs[op], optional=True))

    add_free()
    for group in owed:
        members = [
            op
            for op in alternatives.members(group).tolist()
            if available.issuperset(wiring.inputs[op])
        ]
        first = tuple(op for op in members if alternatives.opens[op])
        nodes.append(Node(tuple(members), first, wiring.outputs[group], optional=False))
        ready.update(wiring.outputs[group])
        add_free()
    return tuple(nodes)


def _segments(wiring: Wiring, alternatives: Alternatives, place: Ints) -> Iterator[Segment]:
    groups = [
        op for op in np.flatnonzero(alternatives.owed).tolist() if op >= wiring.graph.boundary_index
    ]
    segment_of = {v: number for number, group in enumerate(groups) for v in wiring.outputs[group]}
    ways = [_ways(wiring, alternatives, group, place) for group in groups]
    last = dict(segment_of)
    for number, ops in enumerate(ways):
        for op in ops:
            last.update({v: max(number, last[v]) for v in wiring.inputs[op] if v in last})
    last.update({v: len(groups) for v in wiring.results.tolist() if v in last})
    for number, (group, ops) in enumerate(zip(groups, ways, strict=True)):
        values = wiring.outputs[group]
        held = {v for v, by in segment_of.items() if by < number <= last[v]}
        reads = {op: {v for v in wiring.inputs[op] if place[v] >= 0} for op in ops}
        every = set().union(*reads.values())
        yield Segment(
            ops=ops,
            values=values,
            reads=frozenset(every),
            always=frozenset(v for v in every if _is_always_read(wiring, values, reads, v)),
            held_bytes=int(wiring.size[list(held)].sum()),
            stays=frozenset(v for v in values if last[v] > number),
            dying=frozenset(v for v in held if last[v] == number),
        )
    results = frozenset(v for v in wiring.results.tolist() if place[v] >= 0)
    at_end = [v for v in segment_of if last[v] == len(groups)]
    size = int(wiring.size[at_end].sum())
    yield Segment((), (), results, results, size, frozenset(), frozenset())


def _is_always_read(wiring: Wiring, values: Row, reads: dict[int, set[int]], v: int) -> bool:
    """Say whether all that can make some value of a segment read `v`."""
    if len(reads) == 1:
        return True
    return any(all(v in reads[op] for op in reads if w in wiring.outputs[op]) for w in values)


def _ways(wiring: Wiring, alternatives: Alternatives, group: int, place: Ints) -> Row:
    """List the ops of a backward group, those first that read most of the forward half."""
    forward_values = {v for v in range(wiring.value_count) if place[v] >= 0}
    owed = ~alternatives.optional_value
    able = [
        op
        for op in alternatives.members(group).tolist()
        if alternatives.opens[op] and all(v in forward_values or owed[v] for v in wiring.inputs[op])
    ]
    read = {
        op: sum(int(wiring.size[v]) for v in wiring.inputs[op] if v in forward_values)
        for op in able
    }
    return tuple(sorted(able, key=lambda op: (-read[op], op)))


def _last_uses(
    wiring: Wiring, nodes: tuple[Node, ...], segments: tuple[Segment, ...]
) -> tuple[Ints, Ints]:
    """Find up to which segment values and runs matter, by following reads until nothing changes."""
    keep = np.zeros(wiring.value_count, dtype=np.int64)
    run = np.zeros(wiring.op_count, dtype=np.int64)
    for number, segment in enumerate(segments, 1):
        keep[list(segment.reads)] = number
    changed = True
    while changed:
        changed = False
        for node in reversed(nodes):
            for op in node.ops:
                if not wiring.replayable_list[op]:
                    continue
                until = max((int(keep[v]) for v in wiring.outputs[op]), default=0)
                if until > run[op]:
                    run[op] = until
                    changed = True
                for v in wiring.inputs[op]:
                    if keep[v] < until:
                        keep[v] = until
                        changed = True
    return keep, run
