"""The fastest schedule of a solve, what is proved of all, and the reports of both.

A schedule faster than the bound refutes it, and one that fits that nothing does, whichever comes
last. The back end that said so is believed no more (`trust`), and what else it proved is given up.
"""

from __future__ import annotations

import logging
import math
from functools import partial

from remat_graph import Solution, Status, simulate
from remat_solvers.core.alternatives import least_time
from remat_solvers.core.problem import Limit, Progress, Report
from remat_solvers.core.trace import Trace, sequence_time
from remat_solvers.core.trust import distrust, doubt_of
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.errors import BrokenSolver

__all__ = ["TOLERANCE", "Incumbent"]

TOLERANCE = 1e-6  # of a time, within which two are the same

_log = logging.getLogger(__name__)


class Incumbent:
    """What a solve has found and proved.

    `once` is the time of computing everything once, where there is a choice in the cheapest way.
    A solver that proves nothing but that no schedule is faster than `once` is not `bounded`: it
    tells of no bound, and answers with one only where that is reached.
    """

    def __init__(
        self,
        solver: str,
        wiring: Wiring,
        budget_bytes: int,
        limit: Limit,
        report: Report,
        *,
        bounded: bool = True,
    ) -> None:
        self.wiring = wiring
        self.budget_bytes = budget_bytes
        self.best: Trace | None = None
        self.best_time = math.inf
        self.minimal_peak_bytes: float = math.inf  # of all that was offered
        self.once = least_time(wiring)
        self.bound = self.once
        self.infeasible = False
        self.round = 0
        self._searched = 0.0  # a bound without a back end
        self._back_end: str | None = None  # that proved the bound, or that nothing fits
        self._doubt: str | None = None
        self._solver = solver
        self._limit = limit
        self._report = report
        self._bounded = bounded

    def offer(self, candidate: Trace) -> bool:
        """Keep a schedule if it fits and is faster; say whether it fits."""
        self.minimal_peak_bytes = min(self.minimal_peak_bytes, candidate.peak_bytes)
        if candidate.peak_bytes > self.budget_bytes:
            return False
        candidate_time = sequence_time(self.wiring, candidate.sequence)
        if candidate_time < self.best_time:
            self.best, self.best_time = candidate, candidate_time
            self._confront()
        return True

    def raise_bound(self, time: float, back_end: str) -> None:
        """Raise the bound to a time that a back end proved.

        Slightly less counts, as it proves what is beyond `once` within its tolerances.
        """
        proved = time - 1e-7 * (time - self.once) - 1e-8 * self.once
        if self._believes(back_end) and math.isfinite(proved) and proved > self.bound:
            self.bound, self._back_end = proved, back_end
            self._confront()

    def prove(self, time: float) -> None:
        """Raise the bound to a time that is proved without a back end."""
        self._searched = max(self._searched, time)
        if time > self.bound:
            self.bound, self._back_end = time, None
            self._confront()

    def refuse(self, back_end: str | None = None) -> None:
        """Record that nothing fits, which is proved here or by a back end."""
        if back_end is None or self._believes(back_end):
            self.infeasible, self._back_end = True, back_end
            self._confront()

    def closed(self, gap: float = 0.0) -> bool:
        """Say whether the fastest schedule is proved to be within a share `gap` of the bound."""
        return self.best is not None and self.best_time <= self.bound * (1 + TOLERANCE + gap)

    def say(self, message: str) -> None:
        """Report and log how things stand, as a round of its own."""
        self.round += 1
        self._tell(message)

    def solution(self) -> Solution:
        """Give the answer, with the simulator's figures; without a schedule the lowest peak met."""
        self._believes(self._back_end)
        if self.best is None:
            least = self.minimal_peak_bytes
            return Solution(
                status=Status.INFEASIBLE if self.infeasible else Status.LIMIT,
                schedule=None,
                time=math.inf,
                peak_bytes=0 if math.isinf(least) else int(least),
                lower_bound=None if self.infeasible or not self._bounded else self.bound,
                solver=self._solver,
                solve_seconds=self._limit.elapsed,
                doubt=None if self.infeasible else self._doubt,
            )
        schedule = expand(self.wiring, self.best.sequence)
        timeline = simulate(self.wiring.graph, schedule)
        closed = self.closed()
        return Solution(
            status=Status.OPTIMAL if closed else Status.FEASIBLE,
            schedule=schedule,
            time=timeline.time,
            peak_bytes=timeline.peak_bytes,
            lower_bound=min(self.bound, timeline.time) if closed or self._bounded else None,
            solver=self._solver,
            solve_seconds=self._limit.elapsed,
            doubt=None if closed else self._doubt,
        )

    def _tell(self, message: str) -> None:
        best = self.best
        progress = Progress(
            solver=self._solver,
            round=self.round,
            incumbent_time=None if best is None else self.best_time,
            incumbent_peak_bytes=None if best is None else best.peak_bytes,
            lower_bound=self.bound if self._bounded else None,
            seconds=self._limit.elapsed,
            message=message,
            incumbent=None if best is None else partial(expand, self.wiring, best.sequence),
        )
        _log.info("%s", progress)
        self._report(progress)

    def _confront(self) -> None:
        """Give up what a schedule refutes, and believe who said it no more.

        Raises:
            BrokenSolver: if it was proved without a back end.
        """
        if self.infeasible and self.best is not None:
            claim = (
                f"that nothing fits {self.budget_bytes} bytes, but a schedule takes "
                f"{self.best.peak_bytes}"
            )
        elif self.bound > self.best_time * (1 + TOLERANCE):
            claim = (
                f"that no schedule within {self.budget_bytes} bytes takes less than "
                f"{self.bound:g}, but one takes {self.best_time:g}"
            )
        else:
            return
        if self._back_end is None:
            raise BrokenSolver(self._solver, "remat-solvers", f"it claims {claim}")
        distrust(self._back_end, f"it said {claim}")
        self._believes(self._back_end)

    def _believes(self, back_end: str | None) -> bool:
        """Say whether a back end is believed; if it is not, give up all that it proved here."""
        doubt = None if back_end is None else doubt_of(back_end)
        if doubt is None:
            return True
        self._doubt = doubt
        if back_end == self._back_end:
            self.bound, self.infeasible = max(self.once, self._searched), False
            self._back_end = None
        return False
