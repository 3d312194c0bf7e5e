"""The search for the fastest schedule of the chains of a graph, over chains and numbers of slots.

Rounding costs up to a slot per stored input or record, so 4 and 16 times as many slots are tried
too, where the tables stay small. What the programme recomputes in vain is left out afterwards;
every schedule is simulated, and only one within the budget counts.
"""

from __future__ import annotations

import numpy as np

from remat_solvers.chains.costs import StageCosts
from remat_solvers.chains.program import fastest, least_bytes
from remat_solvers.core.attempt import Attempt
from remat_solvers.core.dead_runs import drop_dead_runs
from remat_solvers.core.problem import Limit, Problem, Report
from remat_solvers.core.trace import trace

__all__ = ["DEFAULT_SECONDS", "MOST_STAGES", "SLOTS", "ChainSearch"]

DEFAULT_SECONDS = 30.0
SLOTS, MOST_STAGES = 500, 200
_FINER = 4
_ROUNDS = 3
# Entries of a table of 16 bytes and more; the larger where nothing was found before.
_MOST_ENTRIES, _MOST_ENTRIES_AT_NEED = 6_000_000, 20_000_000


class ChainSearch(Attempt):
    """The best schedule of the chains of a graph so far; says what all chains need at least."""

    def __init__(self, solver: str, problem: Problem, limit: Limit, report: Report) -> None:
        super().__init__(solver, problem, limit, report, seconds=DEFAULT_SECONDS, bounded=False)

    def fill(self, costs: tuple[StageCosts, ...], slots: int) -> None:
        """Fill a table for a chain, and finer ones while they stay small."""
        if self.closed():
            return
        budget, least = self.budget_bytes, least_bytes(costs)
        self.minimal_peak_bytes = min(self.minimal_peak_bytes, least)
        if least > budget:
            return
        for _ in range(_ROUNDS):
            sequence = fastest(costs, budget, slots, self.deadline)
            if sequence is not None:
                self._offer_used(sequence)
            self.say(f"{len(costs)} stages, {min(slots, budget)} slots")
            entries = len(costs) ** 2 // 2 * slots * _FINER
            if (
                self.closed()
                or slots >= budget
                or self.left() == 0
                or entries > (_MOST_ENTRIES_AT_NEED if sequence is None else _MOST_ENTRIES)
            ):
                return
            slots *= _FINER

    def _offer_used(self, sequence: list[int]) -> None:
        """Offer a schedule without what it recomputes in vain."""
        now = trace(self.wiring, np.array(sequence, dtype=np.int64))
        self.offer(drop_dead_runs(self.wiring, now))
