r"""The bytes of MONeT's program, at every op of the forward pass, of a recomputation, and backward.

In the forward pass (1), with L_p what op p or a later one reads of the nodes before:

    stored before p + what p makes and its workspace + size of all of L_p that is not stored

In segment b, `passed[b, n]` is what is held between the runs of nodes n and n + 1 (13): of nodes up
to n what is `there`, of later ones what was kept before. While op i of the next node runs (12), the
values of L_i count whether or not their later reader does run (appendix B, the tighter of its two
bounds: readers that can be of use in b):

    passed[b, n] + run[b, i] (what i makes, its workspace, and the size of all of L_i)
        - size · there[b, v] over v in L_i - size · kept[b-1, v] over v that i makes
        - size · over[b, i, v]

And while an op of the segment itself runs (10), what is there, what the backward half holds, what
it makes and its workspace; not what it overwrites, nor what only ops before it read.
What is `passed`, or stored up to a node, is a column, so that rows have few entries.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from remat_solvers.core.rows import Rows
from remat_solvers.published.monet.columns import Columns, Terms
from remat_solvers.published.monet.layout import Layout, Segment

__all__ = ["add_memory", "add_row"]

BUDGET = 1000.0  # what the budget is in the program


def add_row(rows: Rows, right: float, terms: Terms) -> None:
    """Add one row; columns of -1 are left out."""
    rows.add_sum(right, np.array([c for c, _ in terms], np.int64), np.array([e for _, e in terms]))


def add_memory(rows: Rows, columns: Columns, budget_bytes: float) -> None:
    """Add the rows that keep all time steps within the budget."""
    _Memory(rows, columns, budget_bytes / BUDGET).add()


class _Memory:
    """Sizes in the unit of the program, and the rows that are being added."""

    def __init__(self, rows: Rows, columns: Columns, unit: float) -> None:
        wiring = columns.layout.wiring
        self._rows = rows
        self._columns = columns
        self._size: list[float] = (wiring.size / unit).tolist()
        self._outputs = [outputs / unit for outputs in wiring.output_bytes]
        self._work = [work / unit for work in wiring.workspace_list]
        self._unit = unit

    def add(self) -> None:
        self._add_forward_pass()
        for b, segment in enumerate(self._columns.layout.segments, 1):
            room = BUDGET - segment.held_bytes / self._unit
            passed, fixed = self._add_recomputation(b, room)
            for op in segment.ops:
                self._add_backward(b, segment, op, (passed, room - fixed))

    def _sum(self, terms: Terms) -> int:
        """Add a column that is at least a sum of others."""
        column = self._columns.new([(c, e) for c, e in terms if c >= 0])
        add_row(self._rows, 0.0, [*terms, (column, -1.0)])
        return column

    def _add_forward_pass(self) -> None:
        columns, layout, size = self._columns, self._columns.layout, self._size
        kept = columns.kept[0]
        able = [op for node in layout.nodes for op in node.first if _may_choose(columns, op)]
        last = _last_readers(layout, able)
        stored = -1
        waiting: set[int] = set()
        for node in layout.nodes:
            for op in filter(able.__contains__, node.first):
                waiting = {v for v in waiting if last[v] >= layout.order[op]}
                held = waiting - _overwritten(layout, op, able)
                own, right = self._outputs[op] + self._work[op], BUDGET
                terms: Terms = [(stored, 1.0)]
                for v in sorted(held):
                    right -= size[v]
                    terms.append((int(kept[v]), -size[v]))
                for other in _before(layout, op, node.first):
                    terms.append((int(columns.choose[other]), self._outputs[other]))
                right -= own if columns.fixed[op] else 0.0
                add_row(self._rows, right, [*terms, (int(columns.choose[op]), own)])
            weighs = [(int(kept[v]), size[v]) for v in node.values if kept[v] >= 0 and size[v]]
            if weighs:
                stored = self._sum([(stored, 1.0), *weighs])
            if not node.optional:
                waiting.update(v for v in node.values if v in last)

    def _add_recomputation(self, b: int, room: float) -> tuple[int, float]:
        """Add the rows of one segment up to its ops; what is there then: a column, a constant."""
        columns, layout, size = self._columns, self._columns.layout, self._size
        run, before = columns.run[b], columns.kept[b - 1]
        able = [op for op in layout.pool if run[op] >= 0]
        last = _last_readers(layout, able)
        stored = np.flatnonzero(before >= 0).tolist()
        passed, fixed = self._sum([(int(before[v]), size[v]) for v in stored]), 0.0
        add_row(self._rows, room, [(passed, 1.0)])
        waiting: set[int] = set()
        for node in layout.nodes:
            for op in node.ops:
                if run[op] < 0:
                    continue
                waiting = {v for v in waiting if last[v] >= layout.order[op]}
                own, right = self._outputs[op] + self._work[op], room - fixed
                terms: Terms = [(passed, 1.0)]
                for v in sorted(waiting):
                    always, there = columns.there_at(b, v)
                    own += size[v]
                    right += always * size[v]
                    terms.append((there, -size[v]))
                terms += [(int(before[v]), -size[v]) for v in layout.wiring.outputs[op]]
                terms += [
                    (over.column, -size[v]) for v, over in columns.overwritings.get((b, op), ())
                ]
                terms += [
                    (int(run[other]), self._outputs[other])
                    for other in _before(layout, op, node.ops)
                ]
                add_row(self._rows, right, [*terms, (int(run[op]), own)])
            changes: Terms = []
            for v in node.values:
                always, there = columns.there_at(b, v)
                fixed += always * size[v]
                changes += [(there, size[v]), (int(before[v]), -size[v])]
            if any(column >= 0 and entry for column, entry in changes):
                passed = self._sum([(passed, 1.0), *changes])
            add_row(self._rows, room - fixed, [(passed, 1.0)])
            waiting.update(v for v in node.values if v in last)
        return passed, fixed

    def _add_backward(self, b: int, segment: Segment, op: int, end: tuple[int, float]) -> None:
        columns, layout, size = self._columns, self._columns.layout, self._size
        wiring = layout.wiring
        passed, right = end
        later = segment.ops[segment.ops.index(op) + 1 :]
        beside = _disjoint(layout, op, later)
        needed = {v for other in beside for v in wiring.inputs[other]}
        gone = set(wiring.overwritten[op]) - needed
        own = self._outputs[op] + self._work[op] - sum(size[v] for v in gone & segment.dying)
        terms: Terms = [(passed, 1.0)]
        for v in sorted(segment.reads - (needed | set(wiring.inputs[op]) - gone)):
            always, there = columns.there_at(b, v)
            right += always * size[v]
            terms += [(there, -size[v]), (int(columns.kept[b, v]), size[v])]
        for other in _before(layout, op, segment.ops):
            stays = sum(size[v] for v in wiring.outputs[other] if v in segment.stays)
            terms.append((int(columns.choose[other]), stays))
        right -= own if columns.fixed[op] else 0.0
        add_row(self._rows, right, [*terms, (int(columns.choose[op]), own)])


def _may_choose(columns: Columns, op: int) -> bool:
    return bool(columns.fixed[op] or columns.choose[op] >= 0)


def _last_readers(layout: Layout, ops: list[int]) -> dict[int, int]:
    """Give for each value the order of the last of some ops that reads it."""
    return {v: int(layout.order[op]) for op in ops for v in layout.wiring.inputs[op]}


def _overwritten(layout: Layout, op: int, able: list[int]) -> set[int]:
    """Find what an op overwrites in the forward pass, if that is not stored."""
    gone = set(layout.wiring.overwritten[op])
    if gone:
        later = [t for t in able if layout.order[t] > layout.order[op]]
        same = set(layout.nodes[layout.place[layout.wiring.outputs[op][0]]].ops)
        beside = set(_disjoint(layout, op, same))
        gone -= {v for t in later if t not in same or t in beside for v in layout.wiring.inputs[t]}
    return gone


def _before(layout: Layout, op: int, ops: tuple[int, ...]) -> list[int]:
    """List the ops that may have run right before one of the same group: those before it in it."""
    return _disjoint(layout, op, ops[: ops.index(op)])


def _disjoint(layout: Layout, op: int, ops: Iterable[int]) -> list[int]:
    """Leave out ops that make some of the same, and so do not run beside this one."""
    outputs = set(layout.wiring.outputs[op])
    return [other for other in ops if outputs.isdisjoint(layout.wiring.outputs[other])]
