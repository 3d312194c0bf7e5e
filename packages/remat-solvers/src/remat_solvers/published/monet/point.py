"""Between points of MONeT's program and sequences of computations.

A *decision* is what a point says: the ops chosen, the runs before each segment, and what is kept.
`settle` reads one off any legal sequence: it may run less than that, and need not fit where the
sequence does, since MONeT's schedules are fewer and its program counts more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Floats, Ints
from remat_solvers.published.monet.columns import Columns
from remat_solvers.published.monet.layout import Layout, Node, Segment

__all__ = ["Decision", "embed", "read_point", "settle"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Ops chosen; `runs[b - 1]` those run again before segment b; `kept[b, v]` what is stored."""

    chosen: frozenset[int]
    runs: tuple[frozenset[int], ...]
    kept: NDArray[np.bool_]

    def sequence(self, layout: Layout) -> Ints:
        """List all computations in order."""
        ops = [op for node in layout.nodes for op in node.first if op in self.chosen]
        pool = layout.pool
        for runs, segment in zip(self.runs, layout.segments, strict=True):
            ops += [op for op in pool if op in runs]
            ops += [op for op in segment.ops if op in self.chosen]
        return np.array(ops, dtype=np.int64)


def read_point(columns: Columns, point: Floats) -> Decision:
    """Read a whole point."""
    full = np.append(point > 0.5, False)
    chosen = columns.fixed | full[columns.choose]
    run = full[columns.run]
    return Decision(
        chosen=frozenset(np.flatnonzero(chosen).tolist()),
        runs=tuple(frozenset(np.flatnonzero(row).tolist()) for row in run[1:]),
        kept=full[columns.kept],
    )


def embed(columns: Columns, decision: Decision, width: int) -> Floats:
    """Write a decision as a point of so many columns; it satisfies the rows if it fits."""
    point = np.zeros(width)
    point[-1] = 1.0
    for op in decision.chosen:
        if columns.choose[op] >= 0:
            point[columns.choose[op]] = 1.0
    for b, runs in enumerate(decision.runs, 1):
        for op in runs:
            point[columns.run[b, op]] = 1.0
    stored = columns.kept >= 0
    point[columns.kept[stored]] = decision.kept[stored]
    for union in columns.unions():
        point[union.column] = max(point[list(union.of)])
    for pairs in columns.overwritings.values():
        for _, over in pairs:
            point[over.column] = min(point[over.run], 1 - max(point[list(over.uses)], default=0.0))
    for column, terms in columns.sums:
        point[column] = max(0.0, sum(entry * point[c] for c, entry in terms))
    return point


def settle(columns: Columns, now: Trace) -> Decision | None:
    """Read a decision off a legal sequence; `None` if something cannot be made where it is due."""
    layout = columns.layout
    first = _first_positions(layout, now)
    chosen = {op for node in layout.nodes if not node.optional for op in _way(node, first, now)}
    chosen |= {op for segment in layout.segments for op in _way(segment, first, now)}
    ends = _end_positions(layout, first, now)
    kept = np.zeros(columns.kept.shape, dtype=np.bool_)
    for b, end in enumerate(ends):
        alive = (now.copy_start <= end) & (now.copy_last > end)
        kept[b, now.copy_value[alive]] = True
    kept &= columns.kept >= 0
    for node in reversed(layout.nodes):
        if node.optional and kept[0, list(node.values)].any():
            chosen.update(node.ops)
        for op in set(node.first) & chosen:
            for v in layout.wiring.inputs[op]:
                kept[0, v] |= layout.alternatives.optional_value[v]
    runs: list[frozenset[int]] = []
    for b, segment in enumerate(layout.segments, 1):
        ran = set(now.sequence[ends[b - 1] + 1 : ends[b] + 1].tolist())
        wanted = {v for op in chosen & set(segment.ops) for v in layout.wiring.inputs[op]}
        wanted |= set(segment.always) | set(np.flatnonzero(kept[b]).tolist())
        reruns = _least_runs(columns, b, kept, wanted, ran)
        if reruns is None:
            return None
        runs.append(reruns)
    return Decision(frozenset(chosen), tuple(runs), kept)


def _least_runs(
    columns: Columns, b: int, kept: NDArray[np.bool_], wanted: set[int], ran: set[int]
) -> frozenset[int] | None:
    """Find what must run again for what is wanted, by ops that did run where there is choice."""
    layout, wiring = columns.layout, columns.layout.wiring
    reruns: set[int] = set()
    for node in reversed(layout.nodes):
        for v in node.values:
            available = any(v in wiring.outputs[op] for op in reruns)
            if v not in wanted or kept[b - 1, v] or available:
                continue
            number = layout.place[v]
            able = [
                op
                for op in layout.producers_of(v)
                if columns.run[b, op] >= 0
                and all(kept[b - 1, w] for w in wiring.inputs[op] if layout.place[w] >= number)
            ]
            if not able:
                return None
            op = min(able, key=lambda op: (op not in ran, wiring.time_list[op]))
            reruns.add(op)
            wanted.update(wiring.inputs[op])
    return frozenset(reruns)


def _first_positions(layout: Layout, now: Trace) -> Ints:
    first = np.full(layout.wiring.value_count, now.steps, dtype=np.int64)
    np.minimum.at(first, now.copy_value, now.copy_start)
    return first


def _way(group: Node | Segment, first: Ints, now: Trace) -> set[int]:
    """Take the ops that first made what a group makes, if these are a way; else its first op."""
    able = set(group.first if isinstance(group, Node) else group.ops)
    if not group.values or len(able) < 2:
        return able
    ops = {int(now.sequence[first[v]]) for v in group.values}
    return ops if ops <= able else {min(able)}


def _end_positions(layout: Layout, first: Ints, now: Trace) -> list[int]:
    """Give the positions at which the forward pass and each segment have first made everything."""
    position = {op: i for i, op in reversed(list(enumerate(now.sequence.tolist())))}
    owed = [node for node in layout.nodes if not node.optional]

    def end(group: Node | Segment) -> int:
        if group.values:
            return int(first[list(group.values)].max())
        return min((position[op] for op in group.ops), default=now.steps)

    ends = [max((end(node) for node in owed), default=-1)]
    for segment in layout.segments:
        ends.append(max(ends[-1], end(segment)))
    return ends
