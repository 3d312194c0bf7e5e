"""Improve a schedule by integer programs over stretches of its ops: large-neighbourhood search.

A step writes the program of `relaxation` with many checkpoints: most where earlier steps went over
budget, the others where the schedule is nearly full; some segments are cut where ops run again.
Near the schedule that is almost exact, and it is far too large to be solved; so only the columns of
some random stretches of ops are free, and all others stay as the schedule has them (`embed`). What
comes out is built, repaired, pruned, and improved for a while by local search.
Guarantee: the result fits and is never slower; nothing is proved. Complexity: per step a program of
about a thousand columns. Source: Shaw 1998, "Using constraint
programming and local search methods to solve vehicle routing problems".
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from remat_solvers.core.milp import HIGHS, Outcome, restricted, solve_program
from remat_solvers.core.trace import Trace, sequence_time, trace
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.refine.construct import construct
from remat_solvers.refine.point import embed, read_point
from remat_solvers.refine.refinements import Refinement, places, refinements
from remat_solvers.refine.relaxation import Relaxation, relax
from remat_solvers.search.local_search import local_search
from remat_solvers.search.repair import repaired

__all__ = ["Neighbourhood"]

_CHECKPOINTS = 12
_OVER_SHARE = 0.75  # of them, where earlier steps went over budget
_AGAIN = 4  # segments, in which they did
_FULL = 0.85
_MOST_COLUMNS = 100_000
_FREE_COLUMNS = 1_000
_STRETCHES = 60  # that the ops are divided into
_SECONDS = 2.0
_REPAIR_SECONDS = 1.0
_PATIENCE = 40  # steps of local search
_GAP = 1e-3
_LARGER, _SMALLER = 1.25, 0.7


class Neighbourhood:
    """What is free in a step: how many columns, and between which checkpoints."""

    def __init__(
        self, wiring: Wiring, budget_bytes: int, seed: int = 0, *, back_end: str = HIGHS
    ) -> None:
        self._wiring = wiring
        self._budget_bytes = budget_bytes
        self._back_end = back_end
        self._rng = np.random.default_rng(seed)
        self._over: Counter[int] = Counter()
        self._over_again: Counter[tuple[int, int]] = Counter()  # segments, and ops run in them
        self._free_columns = float(_FREE_COLUMNS)
        each = wiring.value_count + 2 * wiring.op_count
        self._count = min(_CHECKPOINTS, _MOST_COLUMNS // max(each, 1))

    @property
    def is_of_use(self) -> bool:
        """Say whether the graph is small enough for as many checkpoints as make it worth while."""
        return self._count >= _CHECKPOINTS // 4

    def step(self, now: Trace, deadline: float) -> Trace:
        """Look for a faster schedule around one that fits; the same if there is none.

        `deadline` is a time of `time.perf_counter`.
        """
        wiring, budget = self._wiring, self._budget_bytes
        again = self._again()
        checkpoints = self._checkpoints(now, again)
        relaxation = relax(wiring, budget, checkpoints, running=again, splits=again)
        point = embed(wiring, relaxation, now)
        free = self._free(relaxation)
        started = time.perf_counter()
        seconds = min(_SECONDS, deadline - started)
        answer = solve_program(
            restricted(relaxation.program, point, free),
            seconds=seconds,
            gap=_GAP,
            start=point[free],
            back_end=self._back_end,
        )
        if answer.outcome is not Outcome.SOLVED:
            self._free_columns *= _SMALLER if seconds > _SECONDS / 2 else 1.0
        elif time.perf_counter() - started < seconds / 2:
            self._free_columns *= _LARGER
        if answer.point is None:
            return now
        point[free] = answer.point
        sequence = construct(wiring, read_point(relaxation, point))
        if sequence is None:
            return now
        built = trace(wiring, sequence)
        rows = frozenset(again)
        present = Refinement(frozenset(checkpoints), rows, rows)
        for over in refinements(wiring, built, budget, present, _CHECKPOINTS // 2):
            self._over.update(over.checkpoints - present.checkpoints)
            self._over_again.update(over.running - rows)
        until = min(deadline, time.perf_counter() + _REPAIR_SECONDS)
        candidate = repaired(wiring, built, budget, soon=until, deadline=deadline)
        if candidate.peak_bytes <= budget:
            seed = int(self._rng.integers(1 << 30))
            candidate = local_search(
                wiring, candidate, budget, seed=seed, deadline=until, patience=_PATIENCE
            )
        faster = sequence_time(wiring, candidate.sequence) < sequence_time(wiring, now.sequence)
        return candidate if candidate.peak_bytes <= budget and faster else now

    def _again(self) -> list[tuple[int, int]]:
        """Choose segments in which an op run again went over budget."""
        if self._wiring.graph.has_alternatives or self._count < _CHECKPOINTS:
            return []
        rows = [row for row, _ in self._over_again.most_common(2 * _AGAIN)]
        self._rng.shuffle(rows)
        return sorted(rows[:_AGAIN])

    def _checkpoints(self, now: Trace, again: Sequence[tuple[int, int]]) -> list[int]:
        ops = [op for op, _ in self._over.most_common(2 * self._count)]
        self._rng.shuffle(ops)
        chosen = ops[: int(_OVER_SHARE * self._count)]
        owed, first = places(self._wiring, now)
        during = now.during[first]
        full = owed[during >= min(_FULL * self._budget_bytes, during.max(initial=0))]
        self._rng.shuffle(full)
        around = (op for c, _ in again for op in (c, c + 1) if op < self._wiring.op_count)
        return sorted({*chosen, *full[: self._count - len(chosen)].tolist(), *around})

    def _free(self, relaxation: Relaxation) -> NDArray[np.bool_]:
        """Choose columns: of all that belongs to the ops of random stretches."""
        wiring = self._wiring
        owner = np.zeros(len(relaxation.program.cost), dtype=np.int64)
        ops: Ints = np.arange(wiring.op_count)
        tables = [
            table
            for split in relaxation.splits
            for table in (
                (split.before, ops),
                (split.after, ops),
                (split.more, ops),
                (split.alive, wiring.producer),
            )
        ]
        for table, owners in (
            *tables,
            (relaxation.kept_column, wiring.producer),
            (relaxation.dies_column, wiring.producer),
            (relaxation.redo_column, ops),
            (relaxation.held_column, wiring.producer),
            (relaxation.ever_column, ops),
            (relaxation.way_column, ops),
            (relaxation.early_column, ops),
        ):
            there = table >= 0
            owner[table[there]] = np.broadcast_to(owners, table.shape)[there]
        columns = np.bincount(owner, minlength=wiring.op_count)
        length = -(-wiring.op_count // _STRETCHES)
        chosen = np.zeros(wiring.op_count, dtype=np.bool_)
        for since in self._rng.permutation(wiring.op_count).tolist():
            if columns[chosen].sum() >= self._free_columns:
                break
            chosen[since : since + length] = True
        free: NDArray[np.bool_] = chosen[owner]
        return free
