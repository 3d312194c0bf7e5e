"""The search for the fastest schedule of the chains of a graph, over chains and numbers of slots.

Rounding costs up to a slot per stored input or record, so 4 and 16 times as many slots are tried
too, where the tables stay small. What the programme recomputes in vain is left out afterwards;
every schedule is simulated, and only one within the budget counts.
"""

from __future__ import annotations

import math
import time
from functools import partial
from operator import itemgetter

import numpy as np

from remat_graph import Schedule, Solution, Status, Timeline, simulate
from remat_solvers.core.problem import Limit, Problem, Progress, Report
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.rotor.costs import StageCosts
from remat_solvers.rotor.program import fastest, least_bytes
from remat_solvers.search.prune import drop_unused

__all__ = ["DEFAULT_SECONDS", "Search"]

DEFAULT_SECONDS = 30.0
_FINER = 4
_ROUNDS = 3
# Entries of a table of 16 bytes and more; the larger where nothing was found before.
_MOST_ENTRIES, _MOST_ENTRIES_AT_NEED = 6_000_000, 20_000_000


class Search:
    """The best schedule of `wiring` so far; `solver` is the name under which it is reported."""

    def __init__(
        self, solver: str, wiring: Wiring, problem: Problem, limit: Limit, report: Report
    ) -> None:
        self._solver = solver
        self._best: tuple[Schedule, Timeline] | None = None
        self.wiring = wiring
        self._problem = problem
        self._limit = limit
        self._report = report
        self._round = 0
        self._least: list[int] = []
        self._deadline = time.perf_counter() + limit.left(DEFAULT_SECONDS)

    @property
    def done(self) -> bool:
        """Say whether nothing can be faster."""
        return self._best is not None and self._best[1].time <= self._problem.graph.time

    def run(self, costs: tuple[StageCosts, ...], slots: int) -> None:
        """Fill a table for a chain, and finer ones while they stay small."""
        if self.done:
            return
        budget = self._problem.budget_bytes
        self._least.append(least_bytes(costs))
        if self._least[-1] > budget:
            return
        for _ in range(_ROUNDS):
            sequence = fastest(costs, budget, slots, self._deadline)
            if sequence is not None:
                self._offer(sequence)
            self.tell(f"{len(costs)} stages, {min(slots, budget)} slots")
            entries = len(costs) ** 2 // 2 * slots * _FINER
            if (
                self.done
                or slots >= budget
                or time.perf_counter() > self._deadline
                or entries > (_MOST_ENTRIES_AT_NEED if sequence is None else _MOST_ENTRIES)
            ):
                return
            slots *= _FINER

    def tell(self, message: str) -> None:
        """Report how far it is."""
        self._round += 1
        best = self._best
        self._report(
            Progress(
                solver=self._solver,
                round=self._round,
                incumbent_time=best[1].time if best else None,
                incumbent_peak_bytes=best[1].peak_bytes if best else None,
                lower_bound=None,
                seconds=self._limit.elapsed,
                message=message,
                incumbent=None if best is None else partial(itemgetter(0), best),
            )
        )

    def solution(self) -> Solution:
        """Give the best; without one, `LIMIT` and the least budget that any of the chains takes."""
        elapsed = self._limit.elapsed
        if self._best is None:
            least = min(self._least)
            return Solution(Status.LIMIT, None, math.inf, least, None, self._solver, elapsed)
        schedule, timeline = self._best
        once = self.done
        return Solution(
            status=Status.OPTIMAL if once else Status.FEASIBLE,
            schedule=schedule,
            time=timeline.time,
            peak_bytes=timeline.peak_bytes,
            lower_bound=self._problem.graph.time if once else None,
            solver=self._solver,
            solve_seconds=elapsed,
        )

    def _offer(self, sequence: list[int]) -> None:
        now = trace(self.wiring, np.array(sequence, dtype=np.int64))
        schedule = expand(self.wiring, drop_unused(self.wiring, now).sequence)
        timeline = simulate(self._problem.graph, schedule)
        if timeline.peak_bytes > self._problem.budget_bytes:
            return
        if self._best is None or timeline.time < self._best[1].time:
            self._best = schedule, timeline
