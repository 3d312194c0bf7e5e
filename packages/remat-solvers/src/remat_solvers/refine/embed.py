"""Where a sequence of computations lies in the stage-refined program.

That every sequence in the order of the graph gives a feasible point, of a cost no greater than its
recomputation, is what makes the program a relaxation; the tests check it. It also warm-starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat_solvers.core.makers import Makers
from remat_solvers.core.trace import Trace, first_runs
from remat_solvers.core.wiring import Floats, Ints, Wiring
from remat_solvers.refine.relaxation import Relaxation
from remat_solvers.refine.splits import embed_split

__all__ = ["embed", "opened_at"]


def embed(wiring: Wiring, relaxation: Relaxation, now: Trace) -> Floats:
    """Write a trace as a point: what is alive at each checkpoint and what is redone in between."""
    point = np.zeros(len(relaxation.program.cost))
    steps = now.steps
    makers = Makers.of(wiring)
    if makers.plain:
        first = first_runs(wiring, now)
    else:
        first = opened_at(makers, now)
        columns = relaxation.way_column[_ways(wiring, makers, now, relaxation.checkpoints)]
        point[[*columns.tolist(), relaxation.constant_column]] = 1
    stops = (*relaxation.checkpoints, wiring.op_count)
    begun = int(first[stops[0]]) if stops[0] < wiring.op_count else steps
    columns = relaxation.early_column[now.sequence[:begun]]
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


def opened_at(makers: Makers, now: Trace) -> Ints:
    """Find for each owed op the position at which its place opens; of others one beyond the end."""
    first: Ints = np.full(len(makers.group), now.steps, dtype=np.int64)
    np.minimum.at(first, makers.group[now.sequence], np.arange(now.steps))
    return first


def _ways(wiring: Wiring, makers: Makers, now: Trace, checkpoints: Sequence[int]) -> list[int]:
    """List which ops first make values at the place of their group; at a checkpoint, open it."""
    made: set[int] = set()
    found: list[int] = []
    for op in now.sequence.tolist():
        new = set(wiring.outputs[op]) - made
        if makers.chosen[op] and new:
            opens = made.isdisjoint(wiring.outputs[makers.group[op]])
            if opens or makers.group[op] not in checkpoints:
                found.append(op)
        made |= new
    return found


def _read(point: Floats, columns: Ints) -> Floats:
    return np.append(point, 0.0)[columns]
