"""One solve with an integer program: the steps that solvers of this kind have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from remat_solvers.core.alternatives import store_all_sequence
from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.milp import Answer, Outcome
from remat_solvers.core.problem import Limit, Problem, Report
from remat_solvers.core.trace import Trace, sequence_time, trace
from remat_solvers.core.wiring import Floats, Ints

__all__ = ["Attempt", "solve_below"]

_BUDGET_SHARES = (1.0, 1 - 1e-6, 1 - 1e-4)


class Attempt(Incumbent):
    """What a solve has found and proved, and until when; `seconds` where no limit is set."""

    def __init__(
        self,
        solver: str,
        problem: Problem,
        limit: Limit,
        report: Report,
        *,
        seconds: float = 60.0,
        bounded: bool = True,
    ) -> None:
        super().__init__(
            solver, problem.wiring, problem.budget_bytes, limit, report, bounded=bounded
        )
        self.deadline = time.perf_counter() + limit.left(seconds)

    def left(self) -> float:
        """Return the seconds until the deadline; never below 0."""
        return max(0.0, self.deadline - time.perf_counter())

    def take(self, sequence: Ints) -> bool:
        """Offer a sequence, and report it if it is the fastest; say whether it fits."""
        before = self.best_time
        fits = self.offer(trace(self.wiring, sequence))
        if self.best_time < before:
            self.say("a schedule was found")
        return fits

    def settled_at_once(self, least_bytes: int) -> bool:
        """Store everything if that fits; prove that nothing does if an op needs too much.

        `least_bytes` is what ops need one by one (`peak_bound`).
        """
        self.offer(trace(self.wiring, store_all_sequence(self.wiring)))
        if self.best is not None:
            self.say("storing everything fits")
        elif least_bytes > self.budget_bytes:
            self.refuse()
            self.say("one op alone needs more than the budget")
        return self.infeasible or self.closed()

    def begin(self, schedules: Iterable[Trace]) -> list[Trace]:
        """Take schedules as they are found; return those that fit, fastest first."""
        fitting = [start for start in schedules if self.take(start.sequence)]
        return sorted(fitting, key=lambda start: sequence_time(self.wiring, start.sequence))


def solve_below(
    solve: Callable[[float, float], Answer], take: Callable[[Floats], bool], deadline: float
) -> tuple[Answer | None, str]:
    """Solve a program at its budget, then slightly below it, while points break the budget.

    They may, by the tolerances of the back end. `solve` is given a share of the budget and seconds;
    `take` a point, and says whether its schedule fits. Returns the last answer, `None` where there
    was no time for one, and how it ended, in words.
    """
    answer = None
    for share in _BUDGET_SHARES:
        seconds = deadline - time.perf_counter()
        if seconds <= 0:
            break
        answer = solve(share, seconds)
        if answer.point is None:
            return answer, "is infeasible" if answer.outcome is Outcome.INFEASIBLE else "stopped"
        if take(answer.point):
            return answer, "solved" if answer.outcome is Outcome.SOLVED else "stopped"
    return answer, "is out of time" if answer is None else "has only points within its tolerances"
