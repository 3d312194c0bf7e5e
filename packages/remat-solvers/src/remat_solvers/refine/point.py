"""Between points of the stage-refined program and sequences of computations.

`read_point` says what a point keeps and does again, from which `construct` makes a sequence;
`embed` writes a sequence as a point. That every sequence in the order of the graph gives a feasible
point, of a cost no greater than its recomputation, is what makes the program a relaxation; the
tests check it. It also warm-starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.trace import Trace, first_runs
from remat_solvers.core.wiring import Floats, Ints, Wiring
from remat_solvers.refine.relaxation import Relaxation
from remat_solvers.refine.splits import Half, embed_split, read_half

__all__ = ["Stagewise", "embed", "opened_at", "read_point"]


@dataclass(frozen=True, slots=True, eq=False)
class Stagewise:
    """A point of the program: the values kept past each checkpoint, the ops redone after it.

    `ways` are the ops that run at the places of groups with a choice, `halves` say for each segment
    what is there where it is cut.
    """

    checkpoints: tuple[int, ...]
    kept: tuple[frozenset[int], ...]
    redo: tuple[frozenset[int], ...]
    ways: frozenset[int] = frozenset()
    halves: tuple[tuple[Half, ...], ...] = ()

    def keeps(self, op: int, value: int) -> bool:
        """Say whether a value made before `op` is kept at the first checkpoint from `op` on."""
        k = bisect_left(self.checkpoints, op)
        return k == len(self.checkpoints) or value in self.kept[k]


def read_point(relaxation: Relaxation, point: Floats) -> Stagewise:
    """Read which values are kept and which ops redone off a point of the program."""
    full = np.append(point, 0.0)
    kept = full[relaxation.kept_column] > 0.5
    kept[: len(relaxation.checkpoints)] &= full[relaxation.dies_column] < 0.5
    redo = full[relaxation.redo_column] > 0.5
    chosen = np.flatnonzero(full[relaxation.way_column] > 0.5)
    stages = range(len(relaxation.checkpoints))
    halves: list[list[Half]] = [[] for _ in stages]
    for split in relaxation.splits:
        half = read_half(split, relaxation.redo_column[split.stage], full)
        if half is not None:
            halves[split.stage].append(half)
    return Stagewise(
        relaxation.checkpoints,
        tuple(frozenset(np.flatnonzero(kept[k]).tolist()) for k in stages),
        tuple(frozenset(np.flatnonzero(redo[k]).tolist()) for k in stages),
        frozenset(chosen.tolist()),
        tuple(map(tuple, halves)),
    )


def embed(wiring: Wiring, relaxation: Relaxation, now: Trace) -> Floats:
    """Write a trace as a point: what is alive at each checkpoint and what is redone in between."""
    point = np.zeros(len(relaxation.program.cost))
    steps = now.steps
    alternatives = Alternatives.of(wiring)
    if alternatives.plain:
        first = first_runs(wiring, now)
    else:
        first = opened_at(alternatives, now)
        columns = relaxation.way_column[_ways(wiring, alternatives, now, relaxation.checkpoints)]
        point[[*columns.tolist(), relaxation.constant_column]] = 1
    stops = (*relaxation.checkpoints, wiring.op_count)
    first_opening = int(first[stops[0]]) if stops[0] < wiring.op_count else steps
    columns = relaxation.early_column[now.sequence[:first_opening]]
    point[columns[columns >= 0]] = 1
    for k, c in enumerate(relaxation.checkpoints):
        since = int(first[c])
        until = int(first[stops[k + 1]]) if stops[k + 1] < wiring.op_count else steps
        alive = now.copy_value[(now.copy_start < since) & (now.copy_last >= since)]
        over = now.copy_value[(now.copy_last == since) & (now.copy_end == since)]
        through = (now.copy_start <= since) & (now.copy_last >= until)
        for table, items in (
            (relaxation.kept_column, alive),
            (relaxation.dies_column, over),
            (relaxation.redo_column, now.sequence[since + 1 : until]),
            (relaxation.held_column, now.copy_value[through]),
        ):
            columns = table[k, items]
            point[columns[columns >= 0]] = 1
        for split in relaxation.splits:
            if split.stage == k:
                embed_split(point, split, now, since, until)
    ever = after = np.zeros(wiring.op_count)
    for k in reversed(range(len(relaxation.checkpoints))):
        redone = _read(point, relaxation.redo_column[k])
        ever, both, after = np.maximum(ever, redone), np.maximum(after, redone), redone
        columns = relaxation.ever_column[k]
        point[columns[columns >= 0]] = ever[columns >= 0]
        columns = relaxation.both_column[k]
        point[columns[columns >= 0]] = both[columns >= 0]
    return point


def opened_at(alternatives: Alternatives, now: Trace) -> Ints:
    """Find for each owed op the position at which its place opens; of others one beyond the end."""
    first: Ints = np.full(len(alternatives.group), now.steps, dtype=np.int64)
    np.minimum.at(first, alternatives.group[now.sequence], np.arange(now.steps))
    return first


def _ways(
    wiring: Wiring, alternatives: Alternatives, now: Trace, checkpoints: Sequence[int]
) -> list[int]:
    """List which ops first make values at the place of their group; at a checkpoint, open it."""
    available: set[int] = set()
    ways: list[int] = []
    for op in now.sequence.tolist():
        new = set(wiring.outputs[op]) - available
        if alternatives.chosen[op] and new:
            opens = available.isdisjoint(wiring.outputs[alternatives.group[op]])
            if opens or alternatives.group[op] not in checkpoints:
                ways.append(op)
        available |= new
    return ways


def _read(point: Floats, columns: Ints) -> Floats:
    return np.append(point, 0.0)[columns]
