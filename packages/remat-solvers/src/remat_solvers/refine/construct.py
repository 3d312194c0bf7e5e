"""From a point of the stage-refined program to a sequence of computations, just in time.

In each segment a value that is neither kept nor made there is computed again right before the first
op that reads it; what the next checkpoint keeps and nothing in the segment read, right before that
checkpoint. Groups with a choice run in the ways of the point; what is made again, by what the point
redoes, if that reads nothing that is gone for good. `wiring.expand` frees right after the last use.
Linear in the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from remat_graph import simulate
from remat_solvers.core.alternatives import Alternatives, keeps_order
from remat_solvers.core.dead_runs import without_dead_runs
from remat_solvers.core.wiring import Ints, Wiring, expand
from remat_solvers.refine.point import Stagewise
from remat_solvers.refine.splits import Half

__all__ = ["construct"]


def construct(wiring: Wiring, stagewise: Stagewise) -> Ints | None:
    """Order the computations; every value read is there, whatever the point says.

    With alternatives: `None` where its ways lead to a dead end, or make no schedule in the order
    of the graph: those of a linear relaxation may, and the program does not know of `order_after`.

    Raises:
        InvalidSchedule: if what comes of it is not legal, which is a defect here.
    """
    alternatives = Alternatives.of(wiring)
    if not alternatives.plain:
        ordered = _InWays(wiring, alternatives, stagewise).run()
        if ordered is None:
            return None
        simulate(wiring.graph, expand(wiring, ordered))
        return ordered if keeps_order(wiring, ordered) else None
    stops = (*stagewise.checkpoints, wiring.op_count)
    sequence = list(range(stops[0] + 1 if stagewise.checkpoints else wiring.op_count))
    for k, c in enumerate(stagewise.checkpoints):
        there = np.zeros(wiring.value_count, dtype=np.bool_)
        there[sorted(stagewise.kept[k])] = True
        there[wiring.out_start[c] : wiring.out_start[c + 1]] = True
        there[wiring.producer > c] = True
        fixed = ~wiring.replayable[wiring.producer]
        there[fixed] = True
        available: list[bool] = there.tolist()
        for half in stagewise.halves[k] if stagewise.halves else ():
            _run_half(wiring, half, available, sequence)
            stays = fixed | (wiring.producer > c)
            stays[[*half.alive, *wiring.outputs[half.op]]] = True
            available = (np.array(available) & stays).tolist()
        stop = stops[k + 1]
        for op in range(c + 1, min(stop, wiring.op_count - 1) + 1):
            if op == stop:
                for v in sorted(stagewise.kept[k + 1]):
                    _bring(wiring, v, available, sequence)
            for v in wiring.inputs[op]:
                _bring(wiring, v, available, sequence)
            sequence.append(op)
        if stop == wiring.op_count:
            for v in wiring.results.tolist():
                _bring(wiring, v, available, sequence)
    return np.array(sequence, dtype=np.int64)


def _run_half(wiring: Wiring, half: Half, available: list[bool], sequence: list[int]) -> None:
    """Run an op again where a segment is cut, beside what is there then."""
    for v in (*sorted(half.alive), *wiring.inputs[half.op]):
        _bring(wiring, v, available, sequence)
    if not all(available[v] for v in wiring.outputs[half.op]):
        sequence.append(half.op)
        for v in wiring.outputs[half.op]:
            available[v] = True


def _bring(wiring: Wiring, value: int, available: list[bool], sequence: list[int]) -> None:
    """Compute a value again, after what it needs in turn, unless it is there."""
    if available[value]:
        return
    pending = [wiring.producer_list[value]]
    while pending:
        op = pending[-1]
        missing = [v for v in wiring.inputs[op] if not available[v]]
        if missing:
            pending.append(wiring.producer_list[missing[0]])
            continue
        pending.pop()
        if not all(available[v] for v in wiring.outputs[op]):
            sequence.append(op)
            for v in wiring.outputs[op]:
                available[v] = True


class _DeadEnd(Exception):
    """Something is needed that nothing may make now, or any more."""


class _InWays:
    """The same for a graph with alternatives; `available` are the values that are there."""

    def __init__(self, wiring: Wiring, alternatives: Alternatives, stagewise: Stagewise) -> None:
        self._wiring, self._alternatives, self._stagewise = wiring, alternatives, stagewise
        self._sequence: list[int] = []
        self._available = [False] * wiring.value_count
        self._past_values = [False] * wiring.value_count
        self._ran = [False] * wiring.op_count
        self._redo: frozenset[int] = frozenset()
        self._more: dict[int, list[int]] = {}
        for v, op in zip(
            alternatives.more_value.tolist(), alternatives.more_op.tolist(), strict=True
        ):
            self._more.setdefault(v, []).append(op)

    def run(self) -> Ints | None:
        """Go through the groups in order; `None` if the ways of the point lead to a dead end."""
        try:
            self._run_all()
        except _DeadEnd:
            return None
        return without_dead_runs(self._wiring, np.array(self._sequence, dtype=np.int64))

    def _run_all(self) -> None:
        wiring, point = self._wiring, self._stagewise
        place = {c: k for k, c in enumerate(point.checkpoints)}
        for c in np.flatnonzero(self._alternatives.owed).tolist():
            k = place.get(c)
            if k is not None:
                self._bring_all(sorted(point.kept[k]))
            members = self._alternatives.members(c).tolist()
            ways = [p for p in members if p in point.ways and self._may_run(p)]
            if not self._alternatives.chosen[c] or not any(
                self._alternatives.opens[p] for p in ways
            ):
                ways = [c]
            opening = next(p for p in ways if self._alternatives.opens[p])
            self._compute(opening)
            if k is not None:
                self._forget(k, wiring.outputs[opening])
            for p in ways:
                if self._may_run(p) and not all(self._available[v] for v in wiring.outputs[p]):
                    self._compute(p)
            for v in wiring.outputs[c]:
                if not self._available[v]:
                    self._bring_all([v])
        self._bring_all(wiring.results.tolist())

    def _forget(self, k: int, outputs: tuple[int, ...]) -> None:
        """Drop after a checkpoint all but what is kept, was just made, or cannot be made again."""
        fixed = ~self._wiring.replayable[self._wiring.producer]
        kept = self._stagewise.kept[k]
        self._redo = self._stagewise.redo[k]
        self._available = [
            there and (v in kept or v in outputs or bool(fixed[v]))
            for v, there in enumerate(self._available)
        ]

    def _compute(self, op: int) -> None:
        self._bring_all(self._wiring.inputs[op])
        self._run(op)

    def _run(self, op: int) -> None:
        if not self._may_run(op):
            raise _DeadEnd
        self._sequence.append(op)
        self._ran[op] = True
        for v in self._wiring.outputs[op]:
            self._available[v] = self._past_values[v] = True

    def _may_run(self, op: int) -> bool:
        """Ask whether an op may run now, as `simulate` does."""
        wiring, graph = self._wiring, self._wiring.graph
        if any(self._past_values[v] for v in wiring.outputs[op]) and not wiring.replayable_list[op]:
            return False
        return self._ran[op] or all(
            self._is_done(graph.op_index[name]) for name in graph.ops[op].order_after
        )

    def _is_done(self, op: int) -> bool:
        outputs = self._wiring.outputs[op]
        return self._ran[op] or (bool(outputs) and all(self._past_values[v] for v in outputs))

    def _bring_all(self, values: Iterable[int]) -> None:
        """Make values, after what they need in turn, unless they are there."""
        wiring, available = self._wiring, self._available
        for value in values:
            pending = [] if available[value] else [self._producer_of(value)]
            while pending:
                missing = [v for v in wiring.inputs[pending[-1]] if not available[v]]
                if missing:
                    pending.append(self._producer_of(missing[0]))
                else:
                    self._run(pending.pop())

    def _producer_of(self, value: int) -> int:
        """Choose what makes a value: what the point redoes, if that can be, or its producer.

        An alternative that depends on what its own group makes only where that is there. Where the
        producer may not run, what does.
        """
        wiring, alternatives = self._wiring, self._alternatives
        producer = wiring.producer_list[value]
        if producer in self._redo and self._may_run(producer):
            return producer
        more = self._more.get(value, [])
        for op in more:
            there = all(self._available[v] for v in wiring.inputs[op])
            if op in self._redo and (there or alternatives.opens[op]) and self._may_run(op):
                return op
        for op in [producer, *more]:
            if self._may_run(op):
                return op
        raise _DeadEnd
