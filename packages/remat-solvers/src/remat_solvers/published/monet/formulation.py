r"""MONeT's integer program, with the implementation of each op among what it chooses.

Columns, with b a segment, i an op of the forward half, p any op, v a value of the forward half
(absent where they can be of no use):

- `choose[p]` (delta of the paper): op p makes its values in the forward pass, or in its segment;
  fixed to 1 where there is no choice;
- `run[b, i]` (r, or delta with k): op i is computed again in segment b;
- `kept[b, v]` (s): value v is stored when the ops of segment b run, and on; `kept[0]` is S^N;
- `there[b, v]`: v is stored, or read by the op that runs: for v that some of them read;
- `over[b, i, v]` (q): op i takes the buffer of v in segment b.

Rows:

- (7) `run[b, i] <= kept[b-1, v] + sum of run[b, producers of v]` for what i reads;
  `kept[b, v] <= kept[b-1, v] + sum of run[b, producers of v]`;
- (8) the sum of `choose[p]` over p that read v and make some w is at most the same right side;
- exactly one implementation is chosen for each value, at most one runs again in a segment;
- C.3: `over` plus any other use of v in the segment is at most 1;
- memory: see `memory`.

Objective (9). Sources: MONeT (Shah et al. 2021), section 4, appendices B and C. Read otherwise than
printed (docs/decisions/0032): (7) and (8) have the stored values one segment late; the products
of C.4 are unions. Size: O(segments x values) columns, and times the ops that are alive at once
entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat_solvers.core.milp import Program
from remat_solvers.core.rows import Rows
from remat_solvers.core.wiring import Floats, Ints
from remat_solvers.published.monet.columns import Columns, Terms
from remat_solvers.published.monet.layout import Layout, Segment
from remat_solvers.published.monet.memory import add_memory, add_row

__all__ = ["TOTAL", "Formulation", "formulate"]

TOTAL = 1000.0  # what all owed ops cost in the program


@dataclass(frozen=True, slots=True, eq=False)
class Formulation:
    """The program at a budget; its value is in thousandths of the time of all owed ops."""

    columns: Columns
    program: Program


def formulate(layout: Layout, budget_bytes: float) -> Formulation:
    """Write the program; the last column, fixed to 1, bears the time of what runs anyway."""
    columns = Columns.of(layout)
    rows = Rows()
    _add_recomputation(rows, columns)
    _add_choice(rows, columns)
    _add_overwriting(rows, columns)
    add_memory(rows, columns, budget_bytes)
    wiring, width = layout.wiring, columns.width + 1
    scale = TOTAL / max(wiring.graph.time, 1e-300)
    cost = np.zeros(width)
    ops = np.flatnonzero(columns.choose >= 0)
    cost[columns.choose[ops]] = wiring.time[ops] * scale
    b, ops = np.nonzero(columns.run >= 0)
    cost[columns.run[b, ops]] = wiring.time[ops] * scale
    cost[-1] = wiring.time[columns.fixed].sum() * scale
    lower, upper = np.zeros(width), np.ones(width)
    lower[-1] = 1
    integral = np.ones(width, dtype=np.bool_)
    for column, _ in columns.sums:
        upper[column], integral[column] = np.inf, False
    program = Program(cost, rows.matrix(width), rows.bounds(), lower, upper, integral)
    return Formulation(columns, program)


def _add_recomputation(rows: Rows, columns: Columns) -> None:
    """Add (7): what is read or kept was kept before, or is made again."""
    layout, run, kept = columns.layout, columns.run, columns.kept
    place = layout.place
    for op in layout.pool:
        own = place[layout.wiring.outputs[op][0]] if layout.wiring.outputs[op] else -1
        for v in layout.wiring.inputs[op]:
            b = np.flatnonzero(run[:, op] >= 0)
            numbers = rows.add(0.0, len(b), (run[b, op], 1.0), (kept[b - 1, v], -1.0))
            for producer in layout.producers_of(v) if place[v] < own else ():
                rows.extend(numbers, run[b, producer], -1.0)
    for v in np.flatnonzero(layout.last_keep > 0).tolist():
        b = np.flatnonzero(kept[:, v] >= 0)[1:]
        numbers = rows.add(0.0, len(b), (kept[b, v], 1.0), (kept[b - 1, v], -1.0))
        producers = layout.producers_of(v)
        for producer in producers:
            rows.extend(numbers, run[b, producer], -1.0)
        if len(producers) > 1:
            b = np.arange(1, layout.last_keep[v] + 1)
            rows.add(1.0, len(b), *((run[b, producer], 1.0) for producer in producers))


def _add_choice(rows: Rows, columns: Columns) -> None:
    """Add (8), and one implementation of each value; what is optional is kept only if made."""
    layout, choose, kept = columns.layout, columns.choose, columns.kept
    wiring = layout.wiring
    for node in layout.nodes:
        chosen = [op for op in node.first if choose[op] >= 0]
        for v in node.values:
            choices = choose[[op for op in chosen if v in wiring.outputs[op]]]
            if node.optional:
                add_row(rows, 0.0, [(int(kept[0, v]), 1.0), *((int(c), -1.0) for c in choices)])
            elif len(chosen) > 1:
                _add_one_of(rows, choices)
        for op in node.first:
            for v in wiring.inputs[op]:
                if layout.alternatives.optional_value[v] and (choose[op] >= 0 or columns.fixed[op]):
                    right = -1.0 if columns.fixed[op] else 0.0
                    add_row(rows, right, [(int(choose[op]), 1.0), (int(kept[0, v]), -1.0)])
    for b, segment in enumerate(layout.segments, 1):
        if len(segment.ops) > 1:
            for w in segment.values:
                _add_one_of(rows, choose[[op for op in segment.ops if w in wiring.outputs[op]]])
        for v in sorted(segment.reads):
            _add_read(rows, columns, b, segment, v)


def _add_read(rows: Rows, columns: Columns, b: int, segment: Segment, v: int) -> None:
    layout, choose = columns.layout, columns.choose
    wiring = layout.wiring
    had: Terms = [(int(columns.kept[b - 1, v]), -1.0)]
    had += [(column, -1.0) for column in columns.again(b, v)]
    if v in segment.always:
        return add_row(rows, -1.0, had)
    readers = [op for op in segment.ops if v in wiring.inputs[op]]
    sets = {tuple(op for op in readers if w in wiring.outputs[op]) for w in segment.values}
    for ops in sorted(sets - {()}):
        chosen: Terms = [(int(choose[op]), 1.0) for op in ops]
        add_row(rows, 0.0, chosen + had)
        add_row(rows, 0.0, [*chosen, (int(columns.there[b, v]), -1.0)])
    stored = int(columns.kept[b, v])
    if stored >= 0:
        add_row(rows, 0.0, [(stored, 1.0), (int(columns.there[b, v]), -1.0)])
    return None


def _add_overwriting(rows: Rows, columns: Columns) -> None:
    for pairs in columns.overwritings.values():
        for _, over in pairs:
            add_row(rows, 0.0, [(over.column, 1.0), (over.run, -1.0)])
            for use in over.uses:
                add_row(rows, 1.0, [(over.column, 1.0), (use, 1.0)])


def _add_one_of(rows: Rows, columns: Ints) -> None:
    ones: Floats = np.ones(len(columns))
    rows.add_sum(1.0, columns, ones)
    rows.add_sum(-1.0, columns, -ones)
