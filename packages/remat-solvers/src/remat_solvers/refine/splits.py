"""Segments of recomputation alone, cut in two where one op runs in them (`relaxation`, row j).

A segment between neighbouring checkpoints has no first computation in it. Where op i is computed
again there, for (k, i) it is cut at the first of these runs: `before[j]` and `after[j]` say that op
j runs in the part before, or from there on (i among them), and `alive[v]` that value v is there
while i runs, and is not what i overwrites. What runs in both parts is paid twice (`more[k, j]`):
that is what a checkpoint does for first computations, and Checkmate's stages for all. If i does not
run, the cut is at the beginning of the segment. For graphs whose values have one implementation
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.rows import Numbering, Rows
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Floats, Ints, Wiring

__all__ = ["Half", "Split", "add_split", "cut", "embed_split", "read_half"]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The cut of segment `stage` where `op` runs, and which column is which: -1 if none.

    Cuts of one segment share the columns `more`.
    """

    stage: int
    op: int
    before: Ints
    after: Ints
    alive: Ints
    more: Ints


@dataclass(frozen=True, slots=True)
class Half:
    """What a point keeps while `op` is computed again in a segment."""

    op: int
    alive: frozenset[int]


def cut(
    wiring: Wiring,
    chosen: Sequence[tuple[int, int]],
    checkpoints: Sequence[int],
    redo: Ints,
    useful: Sequence[Ints],
    columns: Numbering,
) -> list[Split]:
    """Assign columns to pairs (checkpoint that opens a segment, op run again in it).

    `useful` are, for each segment, the values made up to its checkpoint that something later can
    need. Left out are segments with first computations, and ops that cannot run again there.
    """
    more: dict[int, Ints] = {}
    splits = []
    stage = {c: k for k, c in enumerate(checkpoints)}
    stops = (*checkpoints, wiring.op_count)
    for c, op in chosen:
        k = stage[c]
        if stops[k + 1] != c + 1 or redo[k, op] < 0:
            continue
        ops = np.flatnonzero(redo[k] >= 0)
        if k not in more:
            more[k] = np.full_like(redo[k], -1)
            columns.number(more[k], ops)
        before, after, alive = (np.full(n, -1, dtype=np.int64) for n in
                                (wiring.op_count, wiring.op_count, wiring.value_count))  # fmt: skip
        columns.number(before, ops[ops != op])
        columns.number(after, ops)
        columns.number(alive, useful[k])
        splits.append(Split(k, op, before, after, alive, more[k]))
    return splits


def add_split(
    wiring: Wiring,
    rows: Rows,
    split: Split,
    checkpoint: int,
    past: tuple[Ints, Ints],
    later: Ints,
    redo: Ints,
) -> None:
    """Add (j) but for its bytes: `past` and `later` are kept at both ends, `redo` done between."""
    before, after, alive = split.before, split.after, split.alive
    kept, dies = past
    op, there = split.op, alive >= 0
    ops = np.flatnonzero(after >= 0)
    for part in (before, after):
        some = ops[part[ops] >= 0]
        rows.add(0.0, len(some), (part[some], 1.0), (redo[some], -1.0))
    rows.add(0.0, len(ops), (redo[ops], 1.0), (before[ops], -1.0), (after[ops], -1.0))
    rows.add(0.0, len(ops), (before[ops], 1.0), (after[ops], 1.0), (redo[ops], -1.0),
             (split.more[ops], -1.0))  # fmt: skip

    old = wiring.producer < checkpoint
    producer = wiring.producer

    def present(values: Ints) -> tuple[tuple[Ints, float], ...]:
        """Give the terms of what is there past the checkpoint, or was made before the cut."""
        return (kept[values], -1.0), (dies[values], 1.0), (before[producer[values]], -1.0)

    values = np.flatnonzero(there & old)
    rows.add(0.0, len(values), (alive[values], 1.0), *present(values))
    reader = wiring.in_op
    edge = (before[reader] >= 0) & old[wiring.in_value]
    read = wiring.in_value[edge]
    rows.add(0.0, len(read), (before[reader[edge]], 1.0), *present(read))
    edge = (after[reader] >= 0) & (reader != op) & there[wiring.in_value]
    read = wiring.in_value[edge]
    rows.add(0.0, len(read), (after[reader[edge]], 1.0), (alive[read], -1.0),
             (after[producer[read]], -1.0))  # fmt: skip

    inputs = np.array(wiring.inputs[op], dtype=np.int64)
    over = np.isin(inputs, np.array(sorted(wiring.overwritten[op]), dtype=np.int64))
    ends = inputs[over & old[inputs]]
    rows.add(0.0, len(ends), (np.full(len(ends), redo[op]), 1.0), *present(ends))
    stay = inputs[~over]
    held = stay[there[stay]]
    rows.add(0.0, len(held), (np.full(len(held), redo[op]), 1.0), (alive[held], -1.0))

    ending = checkpoint + 1 == wiring.op_count
    wanted = wiring.results if ending else np.array(wiring.inputs[checkpoint + 1], dtype=np.int64)
    surely = wanted[(later[wanted] < 0) & there[wanted]]
    maybe = np.flatnonzero((later >= 0) & there)
    rows.add(-1.0, len(surely), (alive[surely], -1.0), (after[producer[surely]], -1.0))
    rows.add(0.0, len(maybe), (later[maybe], 1.0), (alive[maybe], -1.0),
             (after[producer[maybe]], -1.0))  # fmt: skip


def embed_split(point: Floats, split: Split, now: Trace, since: int, until: int) -> None:
    """Write the segment between two positions of a trace as one that is cut."""
    runs = now.sequence[since + 1 : until]
    at = np.flatnonzero(runs == split.op)
    if len(at):
        where = since + 1 + int(at[0])
        over = (now.copy_last == where) & (now.copy_end == where)
        alive = (now.copy_start < where) & (now.copy_last >= where) & ~over
    else:
        alive = (now.copy_start <= since) & (now.copy_last > since)
    first = int(at[0]) if len(at) else 0
    before, after = runs[:first], runs[first:]
    for columns, items in (
        (split.before, before),
        (split.after, after),
        (split.more, np.intersect1d(before, after)),
        (split.alive, now.copy_value[alive]),
    ):
        chosen = columns[items]
        point[chosen[chosen >= 0]] = 1


def read_half(split: Split, redo: Ints, full: Floats) -> Half | None:
    """Read off a point, with a zero behind it, what is alive where the op runs, if it does."""
    if full[redo[split.op]] < 0.5:
        return None
    return Half(split.op, frozenset(np.flatnonzero(full[split.alive] > 0.5).tolist()))
