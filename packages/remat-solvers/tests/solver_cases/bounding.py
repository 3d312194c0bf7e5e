"""The bounding program of Checkmate written by itself: what that by `refine` is held against.

Between the first runs of ops t-1 and t, Checkmate computes each op at most once and in the order of
the graph; other schedules may need less memory there, so neither the bound nor the infeasibility of
its program holds for them. This program asks only for what every schedule satisfies:

- `there[t, v]`, value v is alive while op t runs for the first time: 1 for what op t reads;
- `run[t, k]`, op k is computed again after the first run of op t-1 and before that of op t;
- `there[t, v] <= there[t-1, v] + run[t, op of v]`, unless op t-1 makes v;
- `run[t, k] <= there[t-1, v] + run[t, op of v]` for what k reads, unless op t-1 makes v;
- the bytes that are there, what op t makes and its workspace are within the budget; of what op t
  can overwrite, those of `through[t+1]`;
- `through[t, v] >= there[t, v] - run[t, op of v]`, v is alive all the time between the two runs;
  for each k the bytes of `through[t]` but for what k reads, and, if k is run, of what k reads and
  makes and of its workspace, are within the budget. What k can overwrite counts only as `through`.

An op computed twice in between is paid once. Guarantee: the optimum is at most the recomputation of
any schedule in the order of the graph; if there is no point, there is no schedule.
Size: O(ops x edges).
"""

from __future__ import annotations

import numpy as np

from remat_solvers.core.milp import Program
from remat_solvers.core.rows import Numbering, Rows
from remat_solvers.published.checkmate.stages import Bits, Stages

COST_OF_ONCE = 1000  # what computing everything once costs in the program
_SLACK = 1e-9


def direct_program(stages: Stages, budget_bytes: int) -> Program:
    """Write the program; its value is in thousandths of the time of computing every op once."""
    wiring = stages.wiring
    stage = np.arange(stages.count)[:, None]
    may_run: Bits = stages.may_run()[:, : wiring.op_count] & (stage > np.arange(wiring.op_count))
    opens: Bits = np.any(may_run, axis=1)
    columns = Numbering()
    run, there = columns.table(may_run), columns.table(stages.may_keep())
    through, total = columns.table(stages.may_keep() & opens[:, None]), columns.table(opens)
    width, opened = columns.width, np.flatnonzero(opens)

    unit = budget_bytes / 1000
    size, maker = wiring.size / unit, wiring.producer
    rows = Rows()
    before = np.vstack([np.full((1, there.shape[1]), -1), there[:-1]])
    t, v = np.nonzero((there >= 0) & (stage - 1 > maker))
    rows.add(0.0, len(t), (there[t, v], 1.0), (before[t, v], -1.0), (run[t, maker[v]], -1.0))

    inner = stages.read_op < wiring.op_count
    value, reader = stages.read_value[inner], stages.read_op[inner]
    t, e = np.nonzero((run[:, reader] >= 0) & (stage - 1 > maker[value]))
    rows.add(
        0.0,
        len(t),
        (run[t, reader[e]], 1.0),
        (before[t, value[e]], -1.0),
        (run[t, maker[value[e]]], -1.0),
    )

    made = np.append(wiring.output_bytes, 0.0) / unit
    work = np.append(wiring.workspace_list, 0.0) / unit
    over = np.array([v in wiring.overwritten[k] for v, k in zip(value, reader, strict=True)], bool)
    spared = np.zeros(stages.count)
    np.add.at(spared, reader[over], size[value[over]])
    first = rows.add(1000 + _SLACK - made - work + spared, stages.count)
    t, v = np.nonzero(there >= 0)
    rows.extend(first[t], there[t, v], size[v])
    rows.extend(first[reader[over]], through[reader[over] + 1, value[over]], size[value[over]])

    t, v = np.nonzero(through >= 0)
    rows.add(0.0, len(t), (there[t, v], 1.0), (through[t, v], -1.0), (run[t, maker[v]], -1.0))
    sums = np.full(stages.count, -1, dtype=np.int64)
    sums[opened] = rows.add(0.0, len(opened), (total[opened], -1.0))
    rows.extend(sums[t], through[t, v], size[v])
    t, k = np.nonzero(run >= 0)
    need = made[:-1] + work[:-1]
    np.add.at(need, reader[~over], size[value[~over]])
    again = np.full(run.shape, -1, dtype=np.int64)
    again[t, k] = rows.add(1000 + _SLACK, len(t), (total[t], 1.0), (run[t, k], need[k]))
    t, e = np.nonzero((run[:, reader] >= 0) & ~over)
    rows.extend(again[t, reader[e]], through[t, value[e]], -size[value[e]])

    scale = COST_OF_ONCE / max(float(wiring.time.sum()), 1e-300)
    cost = np.zeros(width)
    cost[run[may_run]] = np.broadcast_to(wiring.time * scale, run.shape)[may_run]
    lower, upper = np.zeros(width), np.ones(width)
    read = there[stages.read_op, stages.read_value]
    lower[read[read >= 0]] = 1
    upper[total[opened]] = 1000 + _SLACK
    integral = np.ones(width, dtype=np.bool_)
    integral[total[opened]] = False
    return Program(cost, rows.matrix(width), rows.bounds(), lower, upper, integral)
