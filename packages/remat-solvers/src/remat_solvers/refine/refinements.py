"""Where memory may bind, as refinements of the program that would see it.

Where a schedule is over budget (`refinements`): a first computation becomes a checkpoint; a
recomputation asks for the checkpoints on both sides, once the one before it is there for its
running-memory row, and then to cut the segment there. Worst first, at least one stretch of first
computations apart. Where a schedule that fits is fullest (`fullest`), or nearly so (`nearly_full`).
And, whatever the schedule, where an op leaves little room for anything else while it runs
(`tightest`). Where values have several implementations, read groups for ops, and the opening of a
group's place for a first computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat_solvers.bounds.common_core import at_places
from remat_solvers.bounds.peak import while_running
from remat_solvers.core.alternatives import Alternatives, store_all_sequence
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.refine.point import opened_at

__all__ = ["Refinement", "fullest", "nearly_full", "places", "refinements", "tightest"]

_MOVES = 3
_FULL = 0.9  # of the budget
_MOST_FULL, _APART = 6, (2, 1, 3)  # fiftieths of the ops
_MOST_NEARLY_FULL = 60  # ops
_STRETCHES = 20  # that the ops are divided into; one tight op at most in each
_OVER = 1.1  # times the budget
_CLASSES = 100  # of room, equally wide, up to the budget


@dataclass(frozen=True, slots=True)
class Refinement:
    """Checkpoints to add (op numbers), and running rows (op that opens the segment, op redone).

    `splits` are those of the running rows where the segment is cut in two.
    """

    checkpoints: frozenset[int]
    running: frozenset[tuple[int, int]]
    splits: frozenset[tuple[int, int]] = frozenset()

    def __or__(self, other: Refinement) -> Refinement:
        return Refinement(
            self.checkpoints | other.checkpoints,
            self.running | other.running,
            self.splits | other.splits,
        )

    def __ge__(self, other: Refinement) -> bool:
        return (
            self.checkpoints >= other.checkpoints
            and self.running >= other.running
            and self.splits >= other.splits
        )

    def next_two(self, over_budget: Sequence[Refinement]) -> list[Refinement]:
        """Add the two worst of what is over budget, if anything is."""
        more = self
        for other in over_budget[:2]:
            more |= other
        return [more] if over_budget else []

    def moves(self, over_budget: Sequence[Refinement], near: int) -> list[Refinement]:
        """List what to try next, given what is over budget, worst first.

        By two at once, then by one: in place of the checkpoints at most `near` ops from the new
        ones, then beside them.
        """
        wanted = [over_budget[0] | over_budget[1]] if len(over_budget) > 1 else []
        moves: list[Refinement] = []
        for other in (*wanted, *over_budget[:_MOVES]):
            far = frozenset(
                c for c in self.checkpoints if all(abs(c - d) > near for d in other.checkpoints)
            )
            running, splits = (
                frozenset(row for row in rows if row[0] in far)
                for rows in (self.running, self.splits)
            )
            kept = Refinement(far, running, splits)
            moves += [kept | other, self | other]
        return [move for move in dict.fromkeys(moves) if not self >= move]


def tightest(wiring: Wiring, budget_bytes: int) -> list[int]:
    """List ops that leave little room while they run, least room first, apart from one another.

    Only where storing everything is well over budget. Among ops that leave about the same room,
    those come first beside which most would be stored.
    """
    everything = trace(wiring, store_all_sequence(wiring))
    owed, first = places(wiring, everything)
    need = at_places(wiring, while_running(wiring))[owed]
    during = everything.during[first]
    beside = (during - need) / np.maximum(budget_bytes - need, 1)
    apart = max(1, len(owed) // _STRETCHES)
    free = during > _OVER * budget_bytes
    tight: list[int] = []
    for at in np.lexsort((-beside, -(need // max(1, budget_bytes // _CLASSES)))).tolist():
        if free[at]:
            tight.append(int(owed[at]))
            free[max(0, at - apart) : at + apart + 1] = False
    return tight


def fullest(wiring: Wiring, now: Trace, budget_bytes: int) -> list[Refinement]:
    """Choose checkpoints where a schedule that fits is fullest, apart from one another.

    In some ways that differ in how far apart; only its program shows which proves most.
    """
    owed, first = places(wiring, now)
    choices: list[Refinement] = []
    for apart in _APART:
        during = now.during[first]
        chosen: set[int] = set()
        while len(chosen) < _MOST_FULL and during.max(initial=0) >= _FULL * budget_bytes:
            at = int(during.argmax())
            chosen.add(int(owed[at]))
            around = apart * max(1, len(owed) // 50)
            during[max(0, at - around) : at + around + 1] = 0
        choices.append(Refinement(frozenset(chosen), frozenset()))
    return list(dict.fromkeys(choices))


def nearly_full(wiring: Wiring, now: Trace, budget_bytes: int) -> list[int]:
    """List ops at whose places a schedule that fits is nearly full, some dozens at most."""
    owed, first = places(wiring, now)
    full = owed[now.during[first] >= _FULL * budget_bytes]
    every = max(1, -(-len(full) // _MOST_NEARLY_FULL))
    return [int(op) for op in full[::every]]


def refinements(
    wiring: Wiring, now: Trace, budget_bytes: int, present: Refinement, most: int
) -> list[Refinement]:
    """List up to `most` refinements not yet present, for the time steps most over budget."""
    owed, first = places(wiring, now)
    over = now.during - budget_bytes
    refined: list[Refinement] = []
    near = max(1, len(owed) // 50)
    while len(refined) < most and over.max(initial=0) > 0:
        worst = int(over.argmax())
        after = int(np.searchsorted(first, worst))
        if after < len(first) and int(first[after]) == worst:
            refinement = Refinement(frozenset({int(owed[after])}), frozenset())
        else:
            around = frozenset(owed[max(0, after - 1) : after + 1].tolist())
            opens = int(owed[max(0, after - 1)])
            is_present = after > 0 and opens in present.checkpoints
            rows = {(opens, int(now.sequence[worst]))} if is_present else set()
            refinement = Refinement(around, frozenset(rows))
            if is_present and present >= refinement and not wiring.graph.has_alternatives:
                refinement |= Refinement(frozenset(), frozenset(), frozenset(rows))
        if not present >= refinement:
            refined.append(refinement)
            since = int(first[max(0, after - near)])
            until = int(first[min(len(owed) - 1, after + near)])
            over[since : until + 1] = 0
        over[worst] = 0
    return refined


def places(wiring: Wiring, now: Trace) -> tuple[Ints, Ints]:
    """List the owed ops, and the positions at which the places of their groups open."""
    alternatives = Alternatives.of(wiring)
    owed = np.flatnonzero(alternatives.owed)
    return owed, opened_at(alternatives, now)[owed]
