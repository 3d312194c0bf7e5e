r"""Checkmate's integer program over the stages of a graph, in sparse blocks.

Columns, with t a stage, i and k ops, v a value (absent where nothing later can need them):
`run[t, i]` (R of the paper, fixed to 1 at t = i), `kept[t, v]` (S), `free[t, v, k]` (FREE), v is
freed in stage t right after op k, and `used[t, k]` (U), the bytes held while k runs in stage t,
without its workspace. Rows:

- (1b) `run[t, k] <= run[t, op of v] + kept[t, v]` for what k reads;
- (1c) `kept[t+1, v] <= run[t, op of v] + kept[t, v]`;
- (2, 3) `used` of the first op of a stage is what is kept plus what it makes, of the next one what
  the former used, less what was freed after it, plus what it makes;
- `used[t, k] + workspace[k] run[t, k] <= budget`, with less on the left for what k can overwrite:
  its size times `free[t, v, k]`, or, for the op of the stage itself, `1 - kept[t+1, v]`;
- (7b, 7c) with hazards(t, v, k) = (1 - run[t, k]) + kept[t+1, v] + sum over later readers j of v of
  run[t, j], kappa of them: `1 - free <= hazards <= kappa (1 - free)`;
- (8a to 8c) by the choice of columns. FREE_{t,k,k} is 0, but for ops of several outputs, one of
  which may be wanted without the others.

`Form.PAPER` writes (1c), (7b) and (7c) as printed. `Form.TIGHT`, the default, has the same whole
points but a tighter linear relaxation; `free` is whole where `run` and `kept` are, and declared so
all the same (see `milp`):

- `free[t, v, k] <= run[t, k]`;
- the sum of `free[t, v, k]` over readers k before j, plus `run[t, j]`, is at most 1;
- the sum of `free[t, v, k]` over k, plus `kept[t+1, v]`, is at most `run[t, op of v] + kept[t, v]`,
  which contains (1c).

Generalised: `kept` and `free` are per value, `run` per op; workspace; results are read by the
virtual op of the last stage; resident values weigh nothing; an op that is not replayable has only
its first run. Values of size 0 have no `free`. The order of first computations implies
`order_after`.
Size: O(ops x edges) columns and rows. Source: Jain et al. 2020, section 4.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.milp import Program
from remat_solvers.core.rows import Numbering, Rows
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Floats, Ints, Wiring
from remat_solvers.published.checkmate.stages import Bits, Stages

__all__ = ["Form", "Formulation", "count_columns", "formulate"]


class Form(enum.StrEnum):
    """How (1c), (7b) and (7c) are written; the whole points are the same."""

    TIGHT = "tight"
    PAPER = "paper"


@dataclass(frozen=True, slots=True, eq=False)
class Formulation:
    """The program, with right side `program.right + budget_bytes * per_byte`.

    `run_column[t, i]` and `kept_column[t, v]` are -1 where there is none; `used` has one column per
    `run`, from `used_start` in the same order; column `free_start + f` is FREE of stage
    `free_stage[f]`, value `free_value[f]` and op `free_op[f]`.
    """

    stages: Stages
    program: Program
    per_byte: Floats
    unit_bytes: float
    run_column: Ints
    kept_column: Ints
    used_start: int
    free_start: int
    free_stage: Ints
    free_value: Ints
    free_op: Ints

    def read(self, point: Floats) -> tuple[Floats, Floats]:
        """Read R and S off a point, whole or not."""
        full = np.append(point, 0.0)
        return full[self.run_column], full[self.kept_column]

    def embed(self, run: Bits, kept: Bits) -> Floats:
        """Write R and S that satisfy (1b) and (1c) as a point, with the FREE and U they imply."""
        stages, wiring = self.stages, self.stages.wiring
        kept = kept & (self.kept_column >= 0)
        point = np.zeros(len(self.program.cost))
        point[self.run_column[self.run_column >= 0]] = run[self.run_column >= 0]
        point[self.kept_column[self.kept_column >= 0]] = kept[self.kept_column >= 0]
        later = np.vstack([kept[1:], np.zeros((1, wiring.value_count), np.bool_)])
        t, v, k = self.free_stage, self.free_value, self.free_op
        last_use = np.full((stages.count, wiring.value_count), -1)
        for value, op in zip(stages.read_value, stages.read_op, strict=True):
            last_use[:, value] = np.where(run[:, op], op, last_use[:, value])
        freed = run[t, k] & ~later[t, v] & (last_use[t, v] <= k)
        point[self.free_start : self.free_start + len(t)] = freed
        stage, op = np.nonzero(self.run_column >= 0)
        delta = run[stage, op] * np.append(wiring.output_bytes, 0.0)[op]
        begins = np.flatnonzero(np.diff(stage, prepend=-1))
        delta[begins] += kept @ wiring.size
        gone = np.zeros(run.shape)
        np.add.at(gone, (t[freed], k[freed]), wiring.size[v[freed]])
        running = np.cumsum(delta) - np.cumsum(gone[stage, op]) + gone[stage, op]
        # What each stage starts from is not what the one before ended with.
        carried = np.append(0.0, np.cumsum(delta - gone[stage, op])[begins[1:] - 1])
        running -= np.repeat(carried, np.diff(np.append(begins, len(stage))))
        point[self.used_start : self.used_start + len(stage)] = running / self.unit_bytes
        return point


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Pairs (value, op after which it may be freed), sorted by value, then op."""

    value: Ints
    op: Ints

    @classmethod
    def of(cls, stages: Stages) -> _Pairs:
        wiring = stages.wiring
        several = np.diff(wiring.out_start)[wiring.producer] > 1
        own = np.flatnonzero(several & (wiring.size > 0))
        weighs = wiring.size[stages.read_value] > 0
        value = np.concatenate([stages.read_value[weighs], own])
        op = np.concatenate([stages.read_op[weighs], wiring.producer[own]])
        order = np.lexsort((op, value))
        return cls(value[order], op[order])


def count_columns(stages: Stages) -> int:
    """Count the columns of the program without writing it."""
    wiring = stages.wiring
    spare = np.append(stages.last_run - np.arange(wiring.op_count), 0)
    kept = int((stages.last_keep - wiring.producer).sum())
    return 2 * (int(spare.sum()) + stages.count) + kept + int(spare[_Pairs.of(stages).op].sum())


def formulate(stages: Stages, form: Form = Form.TIGHT) -> Formulation:
    """Write the program; the budget comes in when it is solved."""
    wiring = stages.wiring
    may_run, may_keep = stages.may_run(), stages.may_keep()
    columns = Numbering()
    run, kept = columns.table(may_run), columns.table(may_keep)
    used_start = columns.width
    used = columns.table(may_run)
    pairs = _Pairs.of(stages)
    stage = np.arange(stages.count)[:, None]
    # What the stage's own op reads is held to its end, and what is freed after that op is not kept.
    can_free = may_run[:, pairs.op] & (pairs.op < stage) & ~_reads_at(stages)[:, pairs.value]
    free_start = columns.width
    free = columns.table(can_free)
    width = columns.width

    unit = max(trace(wiring, np.arange(wiring.op_count)).peak_bytes / 1000, 1e-3)
    rows = Rows()
    _add_dependencies(rows, stages, run, kept)
    if form is Form.TIGHT:
        _add_tight(rows, stages, pairs, run, kept, free)
    else:
        _add_printed(rows, stages, pairs, run, kept, free)
    per_byte = _add_memory(rows, stages, pairs, unit, run, kept, used, free)

    times = np.append(wiring.time, 0.0) * (1000 / max(float(wiring.time.sum()), 1e-300))
    cost = np.zeros(width)
    again = (run >= 0) & ~np.eye(stages.count, dtype=np.bool_)
    cost[run[again]] = np.broadcast_to(times, run.shape)[again]
    lower, upper = np.zeros(width), np.ones(width)
    lower[np.diagonal(run)] = 1
    upper[used_start:free_start] = np.inf
    integral = np.ones(width, dtype=np.bool_)
    integral[used_start:free_start] = False
    free_stage, free_pair = np.nonzero(free >= 0)
    return Formulation(
        stages=stages,
        program=Program(cost, rows.matrix(width), rows.bounds(), lower, upper, integral),
        per_byte=per_byte,
        unit_bytes=unit,
        run_column=run,
        kept_column=kept,
        used_start=used_start,
        free_start=free_start,
        free_stage=free_stage,
        free_value=pairs.value[free_pair],
        free_op=pairs.op[free_pair],
    )


def _reads_at(stages: Stages) -> Bits:
    """Say for each stage and value whether the stage's own op reads it."""
    reads = np.zeros((stages.count, stages.wiring.value_count), dtype=np.bool_)
    reads[stages.read_op, stages.read_value] = True
    return reads


def _add_dependencies(rows: Rows, stages: Stages, run: Ints, kept: Ints) -> None:
    t, e = np.nonzero(run[:, stages.read_op] >= 0)
    v, k = stages.read_value[e], stages.read_op[e]
    producer = stages.wiring.producer[v]
    rows.add(0.0, len(t), (run[t, k], 1.0), (run[t, producer], -1.0), (kept[t, v], -1.0))


def _add_tight(
    rows: Rows, stages: Stages, pairs: _Pairs, run: Ints, kept: Ints, free: Ints
) -> None:
    t, p = np.nonzero(free >= 0)
    rows.add(0.0, len(t), (free[t, p], 1.0), (run[t, pairs.op[p]], -1.0))

    producer = stages.wiring.producer
    later = np.vstack([kept[1:], np.full((1, kept.shape[1]), -1)])
    t_kept, v_kept = np.nonzero((later >= 0) & (np.arange(stages.count)[:, None] > producer))
    where = np.full(kept.shape, -1, dtype=np.int64)
    where[t_kept, v_kept] = 0
    where[t, pairs.value[p]] = 0
    s, v = np.nonzero(where == 0)
    where[s, v] = rows.add(
        0.0, len(s), (later[s, v], 1.0), (run[s, producer[v]], -1.0), (kept[s, v], -1.0)
    )
    rows.extend(where[t, pairs.value[p]], free[t, p], 1.0)

    before, reader = _later_readers(stages, pairs)
    t, q = np.nonzero((free[:, before] >= 0) & (run[:, reader] >= 0))
    value = pairs.value[before[q]]
    key = (t * stages.count + reader[q]) * kept.shape[1] + value
    unique, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    numbers = rows.add(1.0, len(unique), (run[t[first], reader[q[first]]], 1.0))
    rows.extend(numbers[inverse], free[t, before[q]], 1.0)


def _add_printed(
    rows: Rows, stages: Stages, pairs: _Pairs, run: Ints, kept: Ints, free: Ints
) -> None:
    producer = stages.wiring.producer
    t, v = np.nonzero((kept[1:] >= 0) & (np.arange(1, stages.count)[:, None] > producer + 1))
    rows.add(0.0, len(t), (kept[t + 1, v], 1.0), (run[t, producer[v]], -1.0), (kept[t, v], -1.0))

    later = np.vstack([kept[1:], np.full((1, kept.shape[1]), -1)])
    t, p = np.nonzero(free >= 0)
    column, op, value = free[t, p], pairs.op[p], pairs.value[p]
    before, reader = _later_readers(stages, pairs)
    at, q = np.nonzero((free[:, before] >= 0) & (run[:, reader] >= 0))
    place = np.full(free.shape, -1, dtype=np.int64)
    place[t, p] = np.arange(len(t))
    kappa: Floats = np.where(later[t, value] >= 0, 2.0, 1.0)
    np.add.at(kappa, place[at, before[q]], 1.0)
    lower = rows.add(0.0, len(t), (column, -1.0), (run[t, op], 1.0), (later[t, value], -1.0))  # 7b
    upper = rows.add(
        kappa - 1, len(t), (column, kappa), (run[t, op], -1.0), (later[t, value], 1.0)
    )  # 7c
    rows.extend(lower[place[at, before[q]]], run[at, reader[q]], -1.0)
    rows.extend(upper[place[at, before[q]]], run[at, reader[q]], 1.0)


def _later_readers(stages: Stages, pairs: _Pairs) -> tuple[Ints, Ints]:
    """List (free pair, reader) for all readers of its value after its op."""
    start = np.searchsorted(stages.read_value, pairs.value, side="left")
    stop = np.searchsorted(stages.read_value, pairs.value, side="right")
    counts = stop - start
    before = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    reader = stages.read_op[np.repeat(start, counts) + offset]
    after = reader > pairs.op[before]
    return before[after], reader[after]


def _overwritten(wiring: Wiring) -> tuple[Ints, Ints]:
    """List (op, value that it can overwrite)."""
    pairs = [(op, v) for op, values in enumerate(wiring.overwritten) for v in values]
    ops, values = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return ops, values


def _add_memory(
    rows: Rows,
    stages: Stages,
    pairs: _Pairs,
    unit: float,
    run: Ints,
    kept: Ints,
    used: Ints,
    free: Ints,
) -> Floats:
    """Add (2), (3) and the budget; returns what a byte of budget adds to each right side."""
    wiring = stages.wiring
    size = wiring.size / unit
    outputs = np.append(wiring.output_bytes, 0.0) / unit
    work = np.append(wiring.workspace_list, 0.0) / unit
    t, k = np.nonzero(used >= 0)
    opens = np.diff(t, prepend=-1) != 0
    former = np.where(opens, -1, np.roll(used[t, k], 1))
    numbers = rows.add(0.0, len(t), (used[t, k], -1.0), (former, 1.0), (run[t, k], outputs[k]))
    s, v = np.nonzero((kept >= 0) & (wiring.size > 0))
    rows.extend(numbers[np.flatnonzero(opens)[s]], kept[s, v], size[v])
    after = np.full(used.shape, -1, dtype=np.int64)
    after[t, k] = numbers + 1
    s, p = np.nonzero(free >= 0)
    rows.extend(after[s, pairs.op[p]], free[s, p], -size[pairs.value[p]])
    op, value = _overwritten(wiring)
    overwritten = np.zeros(used.shape)
    np.add.at(overwritten, (op, op), size[value])
    within = rows.add(overwritten[t, k], len(t), (used[t, k], 1.0), (run[t, k], work[k]))
    row = np.full(used.shape, -1, dtype=np.int64)
    row[t, k] = within
    rows.extend(row[op, op], kept[op + 1, value], size[value])
    there = np.isin(pairs.op * len(size) + pairs.value, op * len(size) + value)
    s, p = np.nonzero((free >= 0) & there)
    rows.extend(row[s, pairs.op[p]], free[s, p], -size[pairs.value[p]])
    per_byte = np.zeros(rows.count)
    per_byte[within] = 1 / unit
    return per_byte
