"""The stage-refined program: Checkmate's stages, but only where memory binds.

Checkpoints are ops c_1 < ... < c_K, and the end of the schedule as the last; segment k runs from
c_k (exclusive) to c_{k+1}. Variables, for values and ops that anything after c_k can still need:
`kept[k, v]`, value v is alive while c_k runs for the first time; `dies[k, v]`, c_k then overwrites
v; `redo[k, i]`, op i is computed again in segment k; `held[k, v]`, value v is alive all through
segment k; `ever` and `both`, see (f) and (g).

Every schedule that computes all ops, first computations in the order of the graph, gives a feasible
point of no greater cost (`point`), so the optimum is a lower bound on its recomputation:

- (a) `kept[k+1, v] <= kept[k, v] + redo[k, op of v]`, unless v is first made in between: what is
  alive later was alive before or was made again. Here, and in (b), (c) and (e), what c_k overwrites
  was not: read `kept - dies` for `kept`.
- (b) `kept[k, v] + redo[k, op of v] >= 1` for what an op first computed in segment k reads.
- (c) `kept[k, v] + redo[k, op of v] >= redo[k, i]` for what a recomputed op i reads.
- (d) the bytes of `kept[k]` less `dies[k]`, of c_k's outputs and of its workspace are within the
  budget.
- (e) for chosen (k, i), where i may be c_k: the bytes of `held[k]` but for i's inputs, and, if
  `redo[k, i]`, those of i's inputs, outputs and workspace, are within the budget; and
  `kept[k+1, v] <= held[k, v] + redo[k, op of v]`. What i can overwrite counts only as held.
- (f) `ever[k, i]`, op i is computed again in segment k or later: the largest of `redo[k..K, i]`, at
  most their sum; and (b) and (c) with `ever[k]` for `redo[k]` and all ops after c_k.
- (g) `both[k, i]`, if asked for: the same for segments k and k+1 alone, with (a) to `kept[k+2]`.

Where values have several implementations (`core.alternatives`), read the sum over those of v for
`redo[k, op of v]`, groups for ops, and for optional values (packed copies) only (a) and (c).
`way[p]` says that op p of a group with a choice runs at its place, `early[p]` that op p, which is
optional, runs before c_1, where (a), (c) and (i) hold with `early` for `redo` and nothing kept:

- (h) the ways of a group make each of its values; at a checkpoint one way opens it, and what that
  one does not make is redone in the segment. Their times count in place of the owed op's.
- (i) `kept[k, v] + redo[k, ops of v] >= way[p]` for what p reads, as (b); at a checkpoint
  `kept[k, v] >= way[p]`, and (d) counts outputs and workspace of the way that opens it.

(f) and (g) are the programs of fewer checkpoints, implied by whole points; but without them the
linear relaxation spreads a recomputation thinly over segments. (g) makes linear relaxations
tighter, and integer programs no easier.

- (j) for chosen (k, i) of segments of recomputation alone: the segment cut in two where i runs
  (`splits`); what runs in both parts is paid twice.

What nothing after c_k can need is left out: dropping it costs nothing. But for (j), an op
recomputed twice in a segment is paid once, and one first computed in the segment may be computed
again for nothing: both only lower the bound. Given whole `kept` and `redo`, the least of the others
but those of (j) are whole; all are declared whole, so that HiGHS takes no column for continuous
(see `milp`). Source: Checkmate (Jain et al. 2020), section 4, equations 1, 2 and 7; (d) and (e) are
its memory rows at chosen time steps, (f) and (j) are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat_solvers.core.alternatives import Alternatives, least_time
from remat_solvers.core.milp import Program
from remat_solvers.core.rows import Numbering, Rows
from remat_solvers.core.wiring import Floats, Ints, Wiring
from remat_solvers.refine import choice_rows
from remat_solvers.refine.choice_rows import Past, Stretch
from remat_solvers.refine.splits import (
    Split,
    add_split,
    cut,
)

__all__ = ["COST_OF_ONCE", "Relaxation", "relax"]

COST_OF_ONCE = 1000  # what computing everything once would cost in a program
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The program, and which column is which: -1 where there is none.

    `constant_column` is 1 in every point, for what is owed beyond the cheapest way of all groups.
    """

    program: Program
    checkpoints: tuple[int, ...]
    kept_column: Ints
    dies_column: Ints
    redo_column: Ints
    held_column: Ints
    ever_column: Ints
    both_column: Ints
    way_column: Ints
    early_column: Ints
    constant_column: int
    splits: tuple[Split, ...]

    @property
    def columns(self) -> int:
        """Number of variables."""
        return len(self.program.cost)


def relax(
    wiring: Wiring,
    budget_bytes: int,
    checkpoints: Sequence[int],
    *,
    running: Sequence[tuple[int, int]] = (),
    splits: Sequence[tuple[int, int]] = (),
    reserves: Mapping[int, int] | None = None,
    paired: bool = False,
    complete: bool = False,
) -> Relaxation:
    """Write the program for checkpoints (op numbers, ascending).

    `running` asks for row (e) for pairs (checkpoint op that opens the segment, op made again), and
    `splits` for (j) for some of these, left out where it cannot be; `reserves` lowers the budget at
    a checkpoint by some bytes, which spoils the bound; `paired` adds (g), for a linear relaxation.
    `complete` asks for (e) for all pairs, and for room for the results at the end, without (f): for
    checkpoints at all ops of an ordinary graph.
    """
    reserves = {} if reserves is None else reserves
    alternatives = Alternatives.of(wiring)
    stops = (*checkpoints, wiring.op_count)
    stages = len(checkpoints)
    kept = np.full((stages + 1, wiring.value_count), -1, dtype=np.int64)
    dies, held = (np.full_like(kept[:-1], -1) for _ in range(2))
    redo, ever, both = (np.full((stages, wiring.op_count), -1, dtype=np.int64) for _ in range(3))
    total = np.full(stages, -1, dtype=np.int64)
    opened = set(checkpoints) if complete else {c for c, _ in running}
    needed_later: list[Ints] = []
    columns = Numbering()
    for k, c in enumerate(checkpoints):
        needed = _needed(wiring, alternatives, c)
        useful = np.flatnonzero(needed & (alternatives.rank <= c))
        needed_later.append(useful)
        values = useful[alternatives.rank[useful] < c]
        ops = choice_rows.redoable(
            wiring, alternatives, c, needed, useful if c in opened else values
        )
        columns.number(kept[k], values)
        over = choice_rows.overwritten(wiring, alternatives, c)
        columns.number(dies[k], over[kept[k, over] >= 0])
        columns.number(redo[k], ops[alternatives.place[ops] < stops[k + 1]])
        if c in opened:
            there = (alternatives.rank[useful] < c) | ~alternatives.optional_value[useful]
            columns.number(held[k], useful[there])
        ops = ops[np.where(alternatives.optional, alternatives.place, alternatives.group)[ops] < c]
        if complete:
            columns.number(total, np.array([k]))
        elif k + 1 < stages:
            columns.number(ever[k], ops)
        if paired and k + 2 < stages:
            columns.number(both[k], ops)
    way = np.full(wiring.op_count, -1, dtype=np.int64)
    columns.number(way, choice_rows.beginning(alternatives, checkpoints))
    early = np.full(wiring.op_count, -1, dtype=np.int64)
    columns.number(early, choice_rows.before(alternatives, stops[0]))
    constant = -1 if alternatives.plain else columns.width
    columns.width += not alternatives.plain
    able = set(running) if alternatives.plain else ()
    chosen = [pair for pair in splits if pair in able]
    cuts = cut(wiring, chosen, checkpoints, redo, needed_later, columns)
    width = columns.width

    unit = budget_bytes / 1000
    rows = Rows()
    lower = np.zeros(width)
    nothing = np.full(wiring.value_count, -1, dtype=np.int64)
    if not alternatives.plain:
        stretch = Stretch(-1, stops[0], alone=True)
        _link(wiring, alternatives, rows, (nothing, nothing), kept[0], early, way, stretch)
    for k, c in enumerate(checkpoints):
        past = (kept[k], dies[k])
        room = budget_bytes - reserves.get(c, 0)
        if alternatives.chosen[c]:
            opening, needs = choice_rows.open_stage(
                wiring, alternatives, rows, way, past, redo[k], c
            )
        else:
            opening = needs = np.zeros(0, dtype=np.int64)
            room -= _fix(wiring, kept[k], lower, c)
        values = np.flatnonzero((kept[k] >= 0) & (wiring.size > 0))
        over = np.flatnonzero(dies[k] >= 0)
        rows.add_sum(
            room / unit + _SLACK,
            np.concatenate([kept[k, values], dies[k, over], opening]),
            np.concatenate([wiring.size[values], -wiring.size[over], needs]) / unit,
        )
        stretch = Stretch(c, stops[k + 1], alone=True)
        _link(wiring, alternatives, rows, past, kept[k + 1], redo[k], way, stretch)
    for k, c in enumerate(checkpoints):
        past = (kept[k], dies[k])
        if k + 1 < stages and not complete:
            _unite(rows, ever[k], redo[k], ever[k + 1] if k + 2 < stages else redo[k + 1])
            stretch = Stretch(c, wiring.op_count)
            _link(wiring, alternatives, rows, past, kept[stages], ever[k], way, stretch)
        if paired and k + 2 < stages:
            _unite(rows, both[k], redo[k], redo[k + 1])
            stretch = Stretch(c, stops[k + 2])
            _link(wiring, alternatives, rows, past, kept[k + 2], both[k], way, stretch)
        if c in opened:
            _hold(wiring, alternatives, rows, past, kept, redo, held, k, c, stops[k + 1])
            choice_rows.hold_opened(wiring, alternatives, rows, way, held[k], c)
        if complete:
            _run_rows(wiring, rows, held[k], redo[k], int(total[k]), unit)
    if complete:
        rows.add(1000 + _SLACK - float(wiring.size[wiring.results].sum()) / unit, 1)
    for split in cuts:
        k, c = split.stage, checkpoints[split.stage]
        past = (kept[k], dies[k])
        add_split(wiring, rows, split, c, past, kept[k + 1], redo[k])
        _run_row(wiring, rows, split.alive, redo[k], split.op, budget_bytes)
    choice_rows.cover(alternatives, rows, way, checkpoints)
    place = {c: k for k, c in enumerate(checkpoints)}
    for c, op in running:
        k = place[c]
        if redo[k, op] >= 0:
            _run_row(wiring, rows, held[k], redo[k], op, budget_bytes)

    cost = np.zeros(width)
    once = float(wiring.time.sum()) if alternatives.plain else least_time(wiring, alternatives)
    scale = COST_OF_ONCE / max(once, 1e-300)
    for again in (*redo, early, *(split.more for split in cuts)):
        ops = np.flatnonzero(again >= 0)
        cost[again[ops]] = wiring.time[ops] * scale
    if not alternatives.plain:
        there = way >= 0
        cost[way[there]] = wiring.time[there] * scale
        cost[constant] = (
            math.fsum(wiring.time[alternatives.owed & ~alternatives.chosen]) * scale - COST_OF_ONCE
        )
        lower[constant] = 1
    upper = np.ones(width)
    upper[total[total >= 0]] = 1000 + _SLACK
    program = Program(
        cost=cost,
        matrix=rows.matrix(width),
        right=rows.bounds(),
        lower=lower,
        upper=upper,
        integral=upper == 1,
    )
    return Relaxation(
        program, tuple(checkpoints), kept, dies, redo, held, ever, both, way, early,
        constant, tuple(cuts),
    )  # fmt: skip


def _fix(wiring: Wiring, kept: Ints, lower: Floats, c: int) -> int:
    """Keep what op `c` reads; return the bytes of what else is there while it runs."""
    reads = slice(wiring.in_start[c], wiring.in_start[c + 1])
    read = wiring.in_value[reads]
    columns = kept[read]
    lower[columns[columns >= 0]] = 1
    ends = read[(columns < 0) & ~wiring.in_overwritten[reads]]
    return int(wiring.size[ends].sum()) + wiring.output_bytes[c] + wiring.workspace_list[c]


def _needed(wiring: Wiring, alternatives: Alternatives, c: int) -> NDArray[np.bool_]:
    """Say which values made up to op `c` something after it can need, directly or to redo."""
    if not alternatives.plain:
        return choice_rows.needed(wiring, alternatives, c)
    needed = np.zeros(wiring.value_count, dtype=np.bool_)
    needed[wiring.in_value[wiring.in_start[c + 1] :]] = True
    needed[wiring.results] = True
    until = wiring.out_start[c + 1]
    needed[until:] = False
    for op in range(c, -1, -1):
        outs = slice(wiring.out_start[op], wiring.out_start[op + 1])
        if wiring.replayable_list[op] and needed[outs].any():
            needed[wiring.in_value[wiring.in_start[op] : wiring.in_start[op + 1]]] = True
    return needed


def _link(
    wiring: Wiring,
    alternatives: Alternatives,
    rows: Rows,
    past: Past,
    later: Ints,
    again: Ints,
    way: Ints,
    stretch: Stretch,
) -> None:
    """Add (a), (b) and (c) for a stretch from op `since` (exclusive) to op `until`.

    `past` is what is kept at `since` and what of it dies there, `later` what is kept at `until`,
    `again` what is done again in between.
    """
    kept, dies = past
    last = stretch.until == wiring.op_count
    due = choice_rows.due(alternatives, stretch)

    def add(right: float, values: Ints, *terms: tuple[Ints, float]) -> None:
        """Add rows in which each value is there or made again, beside other terms."""
        producer = wiring.producer[values]
        had = ((kept[values], -1.0), (dies[values], 1.0), (again[producer], -1.0))
        choice_rows.add_alternatives(
            alternatives, rows, rows.add(right, len(values), *terms, *had), values, again
        )

    if not last:
        values = np.flatnonzero((later >= 0) & due)
        add(0.0, values, (later[values], 1.0))
    read = choice_rows.surely_read(wiring, alternatives, stretch)
    if last:
        read = np.concatenate([read, wiring.results])
    add(-1.0, np.unique(read[wiring.producer[read] < stretch.since]))
    runs = again if alternatives.plain else choice_rows.runs(alternatives, again, way, stretch)
    edge = (runs[wiring.in_op] >= 0) & due[wiring.in_value]
    add(0.0, wiring.in_value[edge], (runs[wiring.in_op[edge]], 1.0))


def _unite(rows: Rows, either: Ints, one: Ints, other: Ints) -> None:
    """Make `either` the larger of two, and at most their sum."""
    ops = np.flatnonzero(either >= 0)
    rows.add(0.0, len(ops), (either[ops], 1.0), (one[ops], -1.0), (other[ops], -1.0))
    for part in (one, other):
        there = ops[part[ops] >= 0]
        rows.add(0.0, len(there), (part[there], 1.0), (either[there], -1.0))


def _hold(
    wiring: Wiring,
    alternatives: Alternatives,
    rows: Rows,
    past: Past,
    kept: Ints,
    redo: Ints,
    held: Ints,
    k: int,
    c: int,
    stop: int,
) -> None:
    """Tie `held[k]` to what is kept past `c` and at `stop`, the ends of segment k."""
    here = np.flatnonzero((held[k] >= 0) & (alternatives.rank < c))
    now, dies = past
    rows.add(0.0, len(here), (held[k, here], 1.0), (now[here], -1.0), (dies[here], 1.0))
    if stop == wiring.op_count:
        read = wiring.results
    elif alternatives.chosen[stop]:
        read = wiring.results[:0]
    else:
        read = wiring.in_value[wiring.in_start[stop] : wiring.in_start[stop + 1]]
    surely = read[kept[k + 1, read] < 0]
    maybe = np.flatnonzero(kept[k + 1] >= 0)
    for right, values in ((0.0, maybe), (-1.0, surely)):
        later = values[held[k, values] >= 0]
        numbers = rows.add(
            right,
            len(later),
            (kept[k + 1, later], 1.0),
            (held[k, later], -1.0),
            (redo[k, wiring.producer[later]], -1.0),
        )
        choice_rows.add_alternatives(alternatives, rows, numbers, later, redo[k])


def _run_row(
    wiring: Wiring, rows: Rows, held: Ints, redo: Ints, op: int, budget_bytes: int
) -> None:
    """Add row (e), or the bytes of (j), for op `op` made again beside what is held."""
    read = np.array(
        [v for v in wiring.inputs[op] if v not in wiring.overwritten[op]], dtype=np.int64
    )
    need = int(wiring.size[read].sum()) + wiring.output_bytes[op] + wiring.workspace_list[op]
    others = (held >= 0) & (wiring.size > 0)
    others[read] = False
    values = np.flatnonzero(others)
    unit = budget_bytes / 1000
    rows.add_sum(
        1000 + _SLACK,
        np.append(held[values], redo[op]),
        np.append(wiring.size[values], need) / unit,
    )


def _run_rows(wiring: Wiring, rows: Rows, held: Ints, redo: Ints, total: int, unit: float) -> None:
    """Add row (e) for all that is made again in a segment; column `total` is the bytes held."""
    size = wiring.size / unit
    values, ops = np.flatnonzero(held >= 0), np.flatnonzero(redo >= 0)
    rows.add_sum(0.0, np.append(held[values], total), np.append(size[values], -1.0))
    stays = ~wiring.in_overwritten
    reader = np.repeat(np.arange(wiring.op_count), np.diff(wiring.in_start))[stays]
    read = wiring.in_value[stays]
    need: Floats = (np.array(wiring.output_bytes) + np.array(wiring.workspace_list)) / unit
    np.add.at(need, reader, size[read])
    row = np.full(wiring.op_count, -1, dtype=np.int64)
    row[ops] = rows.add(
        1000 + _SLACK, len(ops), (np.full(len(ops), total), 1.0), (redo[ops], need[ops])
    )
    edge = row[reader] >= 0
    rows.extend(row[reader[edge]], held[read[edge]], -size[read[edge]])
