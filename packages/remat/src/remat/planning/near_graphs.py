"""Schedules of a graph for one that has nearly the same ops: where the search begins there.

A region whose outputs get fewer gradients, or that was traced anew for other sizes, has some ops
less, or under other names. Ops are matched in order, by what they are; what only the other graph
has is left out, what only this one has runs once, in its place. The simulator is the referee: what
is not legal then is no schedule of this graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from difflib import SequenceMatcher

import numpy as np

from remat_graph import Compute, Graph, InvalidSchedule, Op, Schedule, simulate
from remat_solvers.toolkit import Ints, Wiring, expand, prune, trace

__all__ = ["carried_over"]

_ALIKE = 0.9  # of the ops of either graph, at least, have one of the other


def carried_over(schedules: Iterable[Schedule], other: Graph, graph: Graph) -> list[Schedule]:
    """Give schedules of another graph as those of this one; none if the graphs are not near.

    Recomputations that nothing reads here are left out.
    """
    index = _matched(other, graph)
    if len(index) < _ALIKE * max(len(other.ops), len(graph.ops)):
        return []
    wiring = Wiring.of(graph)
    sequences = (np.array(list(_sequence(each, index, len(graph.ops)))) for each in schedules)
    found = (_legal(wiring, sequence) for sequence in sequences)
    return [schedule for schedule in found if schedule is not None]


def _matched(other: Graph, graph: Graph) -> dict[str, int]:
    """Give the number here of each op there that has one, in the same order."""
    if abs(len(other.ops) - len(graph.ops)) > (1 - _ALIKE) * len(graph.ops):
        return {}
    ops, there = [_kind(op) for op in graph.ops], [_kind(op) for op in other.ops]
    blocks = SequenceMatcher(None, there, ops, autojunk=False).get_matching_blocks()
    return {
        other.ops[block.a + at].name: block.b + at for block in blocks for at in range(block.size)
    }


def _kind(op: Op) -> Hashable:
    """Say what an op is, of which names have a number behind."""
    stem = op.name.rstrip("0123456789").rstrip("_")
    return stem, op.stage, len(op.inputs), len(op.outputs), op.replayable


def _sequence(schedule: Schedule, index: dict[str, int], count: int) -> Iterator[int]:
    """List the ops of a schedule by their numbers here, with those in between that it has not."""
    matched, last = set(index.values()), -1
    for step in schedule:
        op = index.get(step.op) if isinstance(step, Compute) else None
        if op is None:
            continue
        if op > last:
            yield from (new for new in range(last + 1, op) if new not in matched)
            last = op
        yield op
    yield from (new for new in range(last + 1, count) if new not in matched)


def _legal(wiring: Wiring, sequence: Ints) -> Schedule | None:
    """Give the schedule of a sequence; `None` if it is not legal."""
    try:
        simulate(wiring.graph, expand(wiring, sequence))
    except InvalidSchedule:
        return None
    return expand(wiring, prune(wiring, trace(wiring, sequence), 0).sequence)
