"""What alternatives add to the stage-refined program (`relaxation`, rows h and i).

Everything here is empty for a graph without alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.rows import Rows
from remat_solvers.core.wiring import Ints, Wiring

__all__ = [
    "Past",
    "Stretch",
    "add_alternatives",
    "before",
    "beginning",
    "cover",
    "due",
    "hold_opened",
    "needed",
    "open_stage",
    "overwritten",
    "redoable",
    "runs",
    "surely_read",
]

Past = tuple[Ints, Ints]  # columns of what is kept at a checkpoint, and of what of it dies there


class Stretch(NamedTuple):
    """What follows the place of op `since` up to that of op `until`; `alone`: one segment."""

    since: int
    until: int
    alone: bool = False


def beginning(alternatives: Alternatives, checkpoints: Sequence[int]) -> Ints:
    """List the ops that can run at the place of a group with a choice; at a checkpoint, open it."""
    ops = {
        op
        for begins in alternatives.beginners.values()
        for op in begins
        if alternatives.opens[op] or alternatives.group[op] not in checkpoints
    }
    return np.array(sorted(ops), dtype=np.int64)


def before(alternatives: Alternatives, c: int) -> Ints:
    """List the optional ops that can run before the place of group `c`."""
    ops: Ints = np.flatnonzero(alternatives.optional & (alternatives.place < c))
    return ops


def needed(wiring: Wiring, alternatives: Alternatives, c: int) -> NDArray[np.bool_]:
    """Say what something after op `c` can need; of what is optional, also what is made later."""
    there = np.zeros(wiring.value_count, dtype=np.bool_)
    there[wiring.results] = True
    reader = wiring.in_op
    group = alternatives.group[reader]
    later = (group > c) | ((group == c) & alternatives.chosen[c])
    there[wiring.in_value[later & ~alternatives.optional[reader]]] = True
    again = (wiring.replayable & (alternatives.group <= c)) | alternatives.optional
    out_op = wiring.out_op
    while True:
        wanted = np.zeros(wiring.op_count, dtype=np.bool_)
        wanted[out_op[there[wiring.out_value]]] = True
        more = wiring.in_value[(wanted & again)[reader]]
        if there[more].all():
            break
        there[more] = True
    return there


def redoable(
    wiring: Wiring, alternatives: Alternatives, c: int, wanted: NDArray[np.bool_], values: Ints
) -> Ints:
    """List the ops that make values anew after op `c`, and optional ones of what is wanted.

    Those of a group with a choice that opens at `c` may come a first time.
    """
    ops = np.unique(wiring.producer[values])
    ops = ops[wiring.replayable[ops]]
    if alternatives.plain:
        return ops
    here = np.zeros(wiring.op_count, dtype=np.bool_)
    here[ops] = True
    more = alternatives.more_op[np.isin(alternatives.more_value, values)]
    here[more[wiring.replayable[more]]] = True
    packing = wiring.producer[wanted & alternatives.optional_value]
    here[packing] = True
    if alternatives.chosen[c]:
        here[alternatives.members(c)] = True
    return np.flatnonzero(here)


def overwritten(wiring: Wiring, alternatives: Alternatives, c: int) -> Ints:
    """List what the op that opens the place of group `c` can overwrite."""
    members = alternatives.members(c).tolist() if alternatives.chosen[c] else [c]
    values = dict.fromkeys(
        v for p in members if alternatives.opens[p] for v in wiring.overwritten[p]
    )
    return np.array(list(values), dtype=np.int64)


def open_stage(
    wiring: Wiring,
    alternatives: Alternatives,
    rows: Rows,
    way: Ints,
    past: Past,
    redo: Ints,
    c: int,
) -> tuple[Ints, Ints]:
    """Let one op open the place of group `c`; return columns, and what each needs besides `kept`.

    The rest of what the group makes is redone in the segment.
    """
    kept, dies = past
    members = [p for p in alternatives.members(c).tolist() if way[p] >= 0]
    opening = way[members]
    rows.add_sum(1.0, opening, np.ones(len(opening)))
    rows.add_sum(-1.0, opening, -np.ones(len(opening)))
    needs = []
    for p in members:
        read = np.array(wiring.inputs[p], dtype=np.int64)
        inside = read[kept[read] >= 0]
        rows.add(0.0, len(inside), (np.full(len(inside), way[p]), 1.0), (kept[inside], -1.0))
        ends = [v for v in read[kept[read] < 0].tolist() if v not in wiring.overwritten[p]]
        bytes_there = sum(int(wiring.size[v]) for v in ends)
        needs.append(bytes_there + wiring.output_bytes[p] + wiring.workspace_list[p])
    for v in np.flatnonzero(dies >= 0).tolist():
        over = way[[p for p in members if v in wiring.overwritten[p]]]
        entries = np.append(1.0, -np.ones(len(over)))
        rows.add_sum(0.0, np.append(dies[v], over), entries)
    for v in wiring.outputs[c]:
        makes = [p for p in alternatives.members(c).tolist() if v in wiring.outputs[p]]
        columns = np.concatenate([way[makes], redo[makes]])
        rows.add_sum(-1.0, columns, -np.ones(len(columns)))
    return opening, np.array(needs, dtype=np.int64)


def hold_opened(
    wiring: Wiring, alternatives: Alternatives, rows: Rows, way: Ints, held: Ints, c: int
) -> None:
    """Tie `held` of what group `c` makes to the way that opens its place."""
    for v in wiring.outputs[c] if alternatives.chosen[c] else ():
        if held[v] >= 0:
            makes = [p for p in alternatives.members(c).tolist() if v in wiring.outputs[p]]
            entries = np.append(1.0, -np.ones(len(makes)))
            rows.add_sum(0.0, np.append(held[v], way[makes]), entries)


def cover(alternatives: Alternatives, rows: Rows, way: Ints, checkpoints: Sequence[int]) -> None:
    """Add (h) where no checkpoint is: the ways of a group make each of its values."""
    for begins in alternatives.beginners.values():
        if alternatives.group[begins[0]] not in checkpoints:
            columns = way[list(begins)]
            rows.add_sum(-1.0, columns, -np.ones(len(columns)))


def due(alternatives: Alternatives, stretch: Stretch) -> NDArray[np.bool_]:
    """Say of which values rows (a) and (c) are written for a stretch.

    Those that can exist before it; in one segment, what is optional and can exist in it, too.
    """
    there: NDArray[np.bool_] = alternatives.rank < stretch.since
    if stretch.alone:
        there = there | (alternatives.optional_value & (alternatives.rank < stretch.until))
    return there


def surely_read(wiring: Wiring, alternatives: Alternatives, stretch: Stretch) -> Ints:
    """List what ops that have no alternative read first in a stretch."""
    since = wiring.in_start[stretch.since + 1]
    until = wiring.in_start[min(stretch.until + 1, wiring.op_count)]
    read = wiring.in_value[since:until]
    if alternatives.plain:
        return read
    reader = wiring.in_op[since:until]
    surely: Ints = read[alternatives.owed[reader] & ~alternatives.chosen[reader]]
    return surely


def runs(alternatives: Alternatives, again: Ints, way: Ints, stretch: Stretch) -> Ints:
    """List the columns of all that runs in a stretch by choice: again, or at its place."""
    here = (alternatives.group > stretch.since) & (alternatives.group <= stretch.until)
    return np.where(here & ~alternatives.optional, way, again)


def add_alternatives(
    alternatives: Alternatives, rows: Rows, numbers: Ints, values: Ints, again: Ints
) -> None:
    """Add to rows, one for each value, the ops that make it besides its producer."""
    which, ops = alternatives.further(values)
    if len(which):
        rows.extend(numbers[which], again[ops], -1.0)
