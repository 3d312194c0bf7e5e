"""Where memory may bind, as refinements of the program that would see it.

Where a schedule is over budget (`refinements`): a first computation becomes a checkpoint; a
recomputation asks for the checkpoints on both sides and, once the one before it is there, for its
running-memory row. Worst first, at least one stretch of first computations apart. Where a schedule
that fits is fullest (`fullest`). And, whatever the schedule, where an op leaves little room for
anything else while it runs (`tightest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat_solvers.bounds.least import while_running
from remat_solvers.core.trace import Trace, first_runs, trace
from remat_solvers.core.wiring import Wiring

__all__ = ["Refinement", "fullest", "refinements", "tightest"]

_MOVES = 3
_FULL = 0.9  # of the budget
_MOST_FULL = 6
_STRETCHES = 20  # that the ops are divided into; one tight op at most in each
_OVER = 1.1  # times the budget
_CLASSES = 100  # of room, equally wide, up to the budget


@dataclass(frozen=True, slots=True)
class Refinement:
    """Checkpoints to add (op numbers), and running rows (op that opens the segment, op redone)."""

    checkpoints: frozenset[int]
    running: frozenset[tuple[int, int]]

    def __or__(self, other: Refinement) -> Refinement:
        return Refinement(self.checkpoints | other.checkpoints, self.running | other.running)

    def __ge__(self, other: Refinement) -> bool:
        return self.checkpoints >= other.checkpoints and self.running >= other.running

    def next_two(self, seen: Sequence[Refinement]) -> list[Refinement]:
        """Add the two worst of what is over budget, if anything is."""
        more = self
        for other in seen[:2]:
            more |= other
        return [more] if seen else []

    def moves(self, seen: Sequence[Refinement], near: int) -> list[Refinement]:
        """List what to try next, given what is over budget, worst first.

        By two at once, then by one: in place of the checkpoints at most `near` ops from the new
        ones, then beside them.
        """
        wanted = [seen[0] | seen[1]] if len(seen) > 1 else []
        found: list[Refinement] = []
        for other in (*wanted, *seen[:_MOVES]):
            far = frozenset(
                c for c in self.checkpoints if all(abs(c - d) > near for d in other.checkpoints)
            )
            kept = Refinement(far, frozenset(row for row in self.running if row[0] in far))
            found += [kept | other, self | other]
        return [move for move in dict.fromkeys(found) if not self >= move]


def tightest(wiring: Wiring, budget_bytes: int) -> list[int]:
    """List ops that leave little room while they run, least room first, apart from one another.

    Only where storing everything is well over budget. Among ops that leave about the same room,
    those come first beside which most would be stored.
    """
    need = while_running(wiring)
    during = trace(wiring, np.arange(wiring.op_count)).during
    beside = (during - need) / np.maximum(budget_bytes - need, 1)
    apart = max(1, wiring.op_count // _STRETCHES)
    free = during > _OVER * budget_bytes
    found: list[int] = []
    for op in np.lexsort((-beside, -(need // max(1, budget_bytes // _CLASSES)))).tolist():
        if free[op]:
            found.append(op)
            free[max(0, op - apart) : op + apart + 1] = False
    return found


def fullest(wiring: Wiring, now: Trace, budget_bytes: int) -> Refinement:
    """Choose checkpoints where a schedule that fits is fullest, apart from one another."""
    during = now.during[first_runs(wiring, now)]
    apart = 2 * max(1, wiring.op_count // 50)
    found: set[int] = set()
    while len(found) < _MOST_FULL and during.max(initial=0) >= _FULL * budget_bytes:
        op = int(during.argmax())
        found.add(op)
        during[max(0, op - apart) : op + apart + 1] = 0
    return Refinement(frozenset(found), frozenset())


def refinements(
    wiring: Wiring, now: Trace, budget_bytes: int, present: Refinement, most: int
) -> list[Refinement]:
    """List up to `most` refinements not yet present, for the moments most over budget."""
    first = first_runs(wiring, now)
    over = now.during - budget_bytes
    found: list[Refinement] = []
    near = max(1, wiring.op_count // 50)
    while len(found) < most and over.max(initial=0) > 0:
        worst = int(over.argmax())
        op = int(now.sequence[worst])
        after = int(np.searchsorted(first, worst))
        if int(first[op]) == worst:
            wanted = Refinement(frozenset({op}), frozenset())
        else:
            around = {c for c in (after - 1, after) if 0 <= c < wiring.op_count}
            rows = {(after - 1, op)} if after - 1 in present.checkpoints else set()
            wanted = Refinement(frozenset(around), frozenset(rows))
        if not present >= wanted:
            found.append(wanted)
            since = int(first[max(0, after - near)])
            until = int(first[min(wiring.op_count - 1, after + near)])
            over[since : until + 1] = 0
        over[worst] = 0
    return found
