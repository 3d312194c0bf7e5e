"""The stage-refined program: Checkmate's stages, but only where memory binds.

Checkpoints are ops c_1 < ... < c_K, and the end of the schedule as the last; segment k runs from
c_k (exclusive) to c_{k+1}. Variables, for values and ops that anything after c_k can still need:
`kept[k, v]`, value v is alive while c_k runs for the first time; `dies[k, v]`, c_k then overwrites
v; `redo[k, i]`, op i is computed again in segment k; `held[k, v]`, value v is alive all through
segment k; `ever` and `both`, see (f) and (g).

Every schedule that computes all ops, first computations in the order of the graph, gives a feasible
point of no greater cost (`embed`), so the optimum is a lower bound on its recomputation:

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

(f) and (g) are the programs of fewer checkpoints, implied by whole points; but without them the
linear relaxation spreads a recomputation thinly over segments. (g) makes linear relaxations
tighter, and integer programs no easier.

What nothing after c_k can need is left out: dropping it costs nothing. An op recomputed twice in a
segment is paid once, and one first computed in the segment may be computed again for nothing: both
only lower the bound. Given whole `kept` and `redo`, the least of the others are whole; all are
declared whole, so that HiGHS takes no column for continuous (see `milp`). Source: Checkmate (Jain
et al. 2020), section 4, equations 1, 2 and 7; (d) and (e) are its memory rows at chosen moments,
(f) is ours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.milp import Program
from remat_solvers.core.rows import Rows
from remat_solvers.core.wiring import Floats, Ints, Wiring

__all__ = ["COST_OF_ONCE", "Relaxation", "Stagewise", "read_point", "relax"]

COST_OF_ONCE = 1000  # what computing everything once would cost in a program
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The program, and which column is which: -1 where there is none.

    `infeasible_at` names an op whose constant needs alone exceed the budget.
    """

    program: Program
    checkpoints: tuple[int, ...]
    kept_column: Ints
    dies_column: Ints
    redo_column: Ints
    held_column: Ints
    ever_column: Ints
    both_column: Ints
    infeasible_at: int | None

    @property
    def columns(self) -> int:
        """Number of variables."""
        return len(self.program.cost)


@dataclass(frozen=True, slots=True, eq=False)
class Stagewise:
    """A point of the program: the values kept past each checkpoint, the ops redone after it."""

    checkpoints: tuple[int, ...]
    kept: tuple[frozenset[int], ...]
    redo: tuple[frozenset[int], ...]

    def keeps(self, op: int, value: int) -> bool:
        """Say whether a value made before `op` is kept at the first checkpoint from `op` on."""
        k = bisect_left(self.checkpoints, op)
        return k == len(self.checkpoints) or value in self.kept[k]


def relax(
    wiring: Wiring,
    budget_bytes: int,
    checkpoints: Sequence[int],
    *,
    running: Sequence[tuple[int, int]] = (),
    reserves: Mapping[int, int] | None = None,
    paired: bool = False,
) -> Relaxation:
    """Write the program for checkpoints (op numbers, ascending).

    `running` asks for row (e) for pairs (checkpoint op that opens the segment, op made again);
    `reserves` lowers the budget at a checkpoint by some bytes, which spoils the bound; `paired`
    adds (g), for a linear relaxation.
    """
    reserves = {} if reserves is None else reserves
    stops = (*checkpoints, wiring.op_count)
    stages = len(checkpoints)
    kept = np.full((stages + 1, wiring.value_count), -1, dtype=np.int64)
    dies = np.full((stages, wiring.value_count), -1, dtype=np.int64)
    redo = np.full((stages, wiring.op_count), -1, dtype=np.int64)
    held = np.full((stages, wiring.value_count), -1, dtype=np.int64)
    ever = np.full((stages, wiring.op_count), -1, dtype=np.int64)
    both = np.full((stages, wiring.op_count), -1, dtype=np.int64)
    opened = {c for c, _ in running}
    width = 0
    for k, c in enumerate(checkpoints):
        useful = _useful(wiring, c)
        values = useful[wiring.producer[useful] < c]
        ops = np.unique(wiring.producer[useful if c in opened else values])
        ops = ops[wiring.replayable[ops]]
        width = _number(kept[k], values, width)
        over = np.array(wiring.overwritten[c], dtype=np.int64)
        over = over[(kept[k, over] >= 0) & wiring.replayable[wiring.producer[over]]]
        width = _number(dies[k], over, width)
        width = _number(redo[k], ops, width)
        if c in opened:
            width = _number(held[k], useful, width)
        if k + 1 < stages:
            width = _number(ever[k], ops[ops < c], width)
        if paired and k + 2 < stages:
            width = _number(both[k], ops[ops < c], width)

    unit = budget_bytes / 1000
    rows = Rows()
    lower = np.zeros(width)
    infeasible_at: int | None = None
    for k, c in enumerate(checkpoints):
        reads = slice(wiring.in_start[c], wiring.in_start[c + 1])
        read = wiring.in_value[reads]
        columns = kept[k, read]
        lower[columns[columns >= 0]] = 1
        ends = read[(columns < 0) & ~wiring.in_overwritten[reads]]
        constant = int(wiring.size[ends].sum()) + wiring.made_list[c] + wiring.workspace_list[c]
        room = budget_bytes - constant - reserves.get(c, 0)
        if constant > budget_bytes:
            infeasible_at = c
        values = np.flatnonzero((kept[k] >= 0) & (wiring.size > 0))
        over = np.flatnonzero(dies[k] >= 0)
        rows.add_sum(
            room / unit + _SLACK,
            np.concatenate([kept[k, values], dies[k, over]]),
            np.concatenate([wiring.size[values], -wiring.size[over]]) / unit,
        )
        _link(wiring, rows, (kept[k], dies[k]), kept[k + 1], redo[k], c, stops[k + 1])
    for k, c in enumerate(checkpoints):
        past = (kept[k], dies[k])
        if k + 1 < stages:
            _unite(rows, ever[k], redo[k], ever[k + 1] if k + 2 < stages else redo[k + 1])
            _link(wiring, rows, past, kept[stages], ever[k], c, wiring.op_count)
        if paired and k + 2 < stages:
            _unite(rows, both[k], redo[k], redo[k + 1])
            _link(wiring, rows, past, kept[k + 2], both[k], c, stops[k + 2])
        if c in opened:
            _hold(wiring, rows, past, kept, redo, held, k, c, stops[k + 1])
    place = {c: k for k, c in enumerate(checkpoints)}
    for c, op in running:
        k = place[c]
        if redo[k, op] >= 0:
            _run_row(wiring, rows, held[k], redo[k], op, budget_bytes)

    cost = np.zeros(width)
    where = redo >= 0
    scale = COST_OF_ONCE / max(float(wiring.time.sum()), 1e-300)
    cost[redo[where]] = np.broadcast_to(wiring.time * scale, redo.shape)[where]
    program = Program(
        cost=cost,
        matrix=rows.matrix(width),
        right=rows.bounds(),
        lower=lower,
        upper=np.ones(width),
        integral=np.ones(width, dtype=np.bool_),
    )
    return Relaxation(
        program, tuple(checkpoints), kept, dies, redo, held, ever, both, infeasible_at
    )


def read_point(relaxation: Relaxation, wiring: Wiring, point: Floats) -> Stagewise:
    """Read which values are kept and which ops redone off a point of the program."""
    full = np.append(point, 0.0)
    kept = full[relaxation.kept_column] > 0.5
    kept[: len(relaxation.checkpoints)] &= full[relaxation.dies_column] < 0.5
    redo = full[relaxation.redo_column] > 0.5
    stages = range(len(relaxation.checkpoints))
    return Stagewise(
        relaxation.checkpoints,
        tuple(frozenset(np.flatnonzero(kept[k]).tolist()) for k in stages),
        tuple(frozenset(np.flatnonzero(redo[k]).tolist()) for k in stages),
    )


def _number(columns: Ints, items: Ints, width: int) -> int:
    columns[items] = np.arange(width, width + len(items))
    return width + len(items)


def _useful(wiring: Wiring, c: int) -> Ints:
    """List the values made up to op `c` that something after it can need, directly or to redo."""
    needed = np.zeros(wiring.value_count, dtype=np.bool_)
    needed[wiring.in_value[wiring.in_start[c + 1] :]] = True
    needed[wiring.results] = True
    made = wiring.out_start[c + 1]
    needed[made:] = False
    for op in range(c, -1, -1):
        outs = slice(wiring.out_start[op], wiring.out_start[op + 1])
        if wiring.replayable_list[op] and needed[outs].any():
            needed[wiring.in_value[wiring.in_start[op] : wiring.in_start[op + 1]]] = True
    return np.flatnonzero(needed)


def _link(
    wiring: Wiring,
    rows: Rows,
    past: tuple[Ints, Ints],
    later: Ints,
    again: Ints,
    c: int,
    stop: int,
) -> None:
    """Add (a), (b) and (c) for the stretch from op `c` (exclusive) to op `stop`.

    `past` is what is kept at `c` and what of it dies there, `later` what is kept at `stop`, `again`
    what is done again in between.
    """
    kept, dies = past
    last = stop == wiring.op_count
    if not last:
        values = np.flatnonzero((later >= 0) & (wiring.producer < c))
        rows.add(
            0.0,
            len(values),
            (later[values], 1.0),
            (kept[values], -1.0),
            (dies[values], 1.0),
            (again[wiring.producer[values]], -1.0),
        )
    until = wiring.in_start[min(stop + 1, wiring.op_count)]
    read = wiring.in_value[wiring.in_start[c + 1] : until]
    if last:
        read = np.concatenate([read, wiring.results])
    read = np.unique(read[wiring.producer[read] < c])
    maker = wiring.producer[read]
    rows.add(-1.0, len(read), (kept[read], -1.0), (dies[read], 1.0), (again[maker], -1.0))
    reader = np.repeat(np.arange(wiring.op_count), np.diff(wiring.in_start))
    edge = (again[reader] >= 0) & (wiring.producer[wiring.in_value] < c)
    reader, value = reader[edge], wiring.in_value[edge]
    rows.add(
        0.0,
        len(reader),
        (again[reader], 1.0),
        (kept[value], -1.0),
        (dies[value], 1.0),
        (again[wiring.producer[value]], -1.0),
    )


def _unite(rows: Rows, either: Ints, one: Ints, other: Ints) -> None:
    """Make `either` the larger of two, and at most their sum."""
    ops = np.flatnonzero(either >= 0)
    rows.add(0.0, len(ops), (either[ops], 1.0), (one[ops], -1.0), (other[ops], -1.0))
    for part in (one, other):
        there = ops[part[ops] >= 0]
        rows.add(0.0, len(there), (part[there], 1.0), (either[there], -1.0))


def _hold(
    wiring: Wiring,
    rows: Rows,
    past: tuple[Ints, Ints],
    kept: Ints,
    redo: Ints,
    held: Ints,
    k: int,
    c: int,
    stop: int,
) -> None:
    """Tie `held[k]` to what is kept past `c` and at `stop`, the ends of segment k."""
    here = np.flatnonzero((held[k] >= 0) & (wiring.producer < c))
    now, dies = past
    rows.add(0.0, len(here), (held[k, here], 1.0), (now[here], -1.0), (dies[here], 1.0))
    if stop == wiring.op_count:
        read = wiring.results
    else:
        read = wiring.in_value[wiring.in_start[stop] : wiring.in_start[stop + 1]]
    surely = read[kept[k + 1, read] < 0]
    maybe = np.flatnonzero(kept[k + 1] >= 0)
    for right, values in ((0.0, maybe), (-1.0, surely)):
        later = values[held[k, values] >= 0]
        rows.add(
            right,
            len(later),
            (kept[k + 1, later], 1.0),
            (held[k, later], -1.0),
            (redo[k, wiring.producer[later]], -1.0),
        )


def _run_row(
    wiring: Wiring, rows: Rows, held: Ints, redo: Ints, op: int, budget_bytes: int
) -> None:
    """Add row (e) for op `op` made again in the segment of `held` and `redo`."""
    read = np.array(
        [v for v in wiring.inputs[op] if v not in wiring.overwritten[op]], dtype=np.int64
    )
    need = int(wiring.size[read].sum()) + wiring.made_list[op] + wiring.workspace_list[op]
    others = (held >= 0) & (wiring.size > 0)
    others[read] = False
    values = np.flatnonzero(others)
    unit = budget_bytes / 1000
    rows.add_sum(
        1000 + _SLACK,
        np.append(held[values], redo[op]),
        np.append(wiring.size[values], need) / unit,
    )
