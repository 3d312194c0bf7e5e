"""What is known along a curve of time against peak: schedules, bounds, and what does not fit.

What is learnt at one budget is known at others: a schedule serves every budget that it fits, and
one for a larger budget is where a solver may start; a bound proved at a budget holds at every
smaller one, and so does that nothing fits. It is the memory of `tradeoff`.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from remat_graph import Graph, Schedule, Solution, Status, simulate
from remat_solvers.core.alternatives import least_time
from remat_solvers.core.incumbent import TOLERANCE
from remat_solvers.core.problem import Solver
from remat_solvers.core.store_all import StoreAll, store_all
from remat_solvers.core.wiring import Wiring
from remat_solvers.errors import BrokenSolver, SolverError
from remat_solvers.minimal_peak.budget import smallest_budget
from remat_solvers.registry import Chosen, resolve_solver
from remat_solvers.solve import AUTO
from remat_solvers.verdicts import Verdicts, claim_of, doubt_or_raise, minimal_peak_claim

__all__ = ["Knowledge", "TradeoffPoint"]

_SMALLEST = "smallest-budget"
_GAP = 1e-3  # near enough not to be solved
_NEAR = 1.05  # times the peak of the best that fits: less would be hard to find


@dataclass(frozen=True, slots=True)
class TradeoffPoint:
    """What is known at one budget.

    `solution` is the fastest schedule found that fits, for this budget or a smaller one, `None` if
    there is none; its `lower_bound` is that of the point, its `solve_seconds` those of the budget
    it was found for. No schedule in the order of the graph takes less than `lower_bound`; with
    `proved_infeasible` there is none at all. `seconds` went into this budget. `error` is what the
    solver failed with here, or what it claimed here and is not so; the rest is known from others.
    """

    budget_bytes: int
    solution: Solution | None
    lower_bound: float | None
    proved_infeasible: bool
    seconds: float
    error: SolverError | None = None

    @property
    def status(self) -> Status:
        """The status of the solution; without one, whether it is proved that there is none."""
        if self.solution is not None:
            return self.solution.status
        return Status.INFEASIBLE if self.proved_infeasible else Status.LIMIT


class Knowledge:
    """All schedules found and all that is proved, whatever the budget it was asked at."""

    def __init__(self, graph: Graph) -> None:
        wiring = Wiring.of(graph)
        self.graph = graph
        self.doubt: str | None = None
        self.errors: dict[int, SolverError] = {}  # by budget
        self._least_time = least_time(wiring)
        self._verdicts = Verdicts(wiring)
        self._solutions: list[Solution] = []
        self.store_all = self._keep(store_all(graph), StoreAll.name, 0.0)

    @property
    def smallest_bytes(self) -> int:
        """The minimal peak of any schedule found."""
        return min(solution.peak_bytes for solution in self._solutions)

    def look_for_smallest(self, seconds: float) -> None:
        """Ask for a schedule of small peak, and what no peak goes below."""
        started = time.perf_counter()
        smallest = smallest_budget(self.graph, limit_seconds=seconds)
        spent = time.perf_counter() - started
        self._keep(smallest.schedule, _SMALLEST, spent)
        self._verdicts.claim(minimal_peak_claim(smallest.least_bytes))
        self._settle()

    def learn(self, budget_bytes: int, answer: Solution, solver: str | Solver) -> None:
        """Take note of the checked answer of a solver, which was asked like this.

        What it claims is held against all that was found, and what it found against all claims.
        """
        self.doubt = answer.doubt or self.doubt
        self._verdicts.claim(claim_of(_chosen(solver), budget_bytes, answer))
        if answer.schedule is not None:
            self._solutions.append(answer)
            peak = answer.peak_bytes
            self._verdicts.show(answer.solver, answer.schedule, answer.time, peak)
        self._settle()

    def fail(self, budget_bytes: int, error: SolverError) -> None:
        """Take note that a solver failed at a budget."""
        self.errors[budget_bytes] = error

    def best(self, budget_bytes: int) -> Solution | None:
        """Return the fastest schedule that fits; of equal ones the first found."""
        fitting = (solution for solution in self._solutions if solution.peak_bytes <= budget_bytes)
        return min(fitting, key=lambda solution: solution.time, default=None)

    def bound(self, budget_bytes: int) -> float:
        """Return the most that is proved at this budget or a larger one; infinity: nothing fits."""
        return self._verdicts.bound(budget_bytes)

    @property
    def least_bytes(self) -> int:
        """No schedule in the order of the graph goes below."""
        return self._verdicts.least_bytes

    def start(self, budget_bytes: int) -> Schedule | None:
        """Return the schedule of the minimal peak that does not fit: that of the next budget.

        Where little less fits than the fastest that does, that one.
        """
        best = self.best(budget_bytes)
        if best is not None and budget_bytes <= _NEAR * best.peak_bytes:
            return best.schedule
        above = (solution for solution in self._solutions if solution.peak_bytes > budget_bytes)
        nearest = min(above, key=lambda solution: solution.peak_bytes, default=None)
        return None if nearest is None else nearest.schedule

    def is_open(self, budget_bytes: int) -> bool:
        """Say whether a solve could show more than is known."""
        if budget_bytes < self.least_bytes:
            return False
        best = self.best(budget_bytes)
        return best is None or best.time > self.bound(budget_bytes) * (1 + _GAP)

    def point(self, budget_bytes: int, seconds: float) -> TradeoffPoint:
        """Say what is known at a budget."""
        best, error = self.best(budget_bytes), self.errors.get(budget_bytes)
        if best is None:
            refused = budget_bytes < self.least_bytes
            bound = None if refused else self.bound(budget_bytes)
            return TradeoffPoint(budget_bytes, None, bound, refused, seconds, error)
        # Of an order of its own, a schedule may be faster than any in that of the graph.
        bound = min(self.bound(budget_bytes), best.time)
        closed = best.time <= bound * (1 + TOLERANCE)
        status = Status.OPTIMAL if closed else Status.FEASIBLE
        best = dataclasses.replace(best, status=status, lower_bound=bound)
        return TradeoffPoint(budget_bytes, best, bound, False, seconds, error)

    def _keep(self, schedule: Schedule, by: str, seconds: float) -> Solution:
        """Take a schedule of our own in hand."""
        timeline = simulate(self.graph, schedule)
        time, peak = timeline.time, timeline.peak_bytes
        bound = min(self._least_time, time)
        closed = time <= bound * (1 + TOLERANCE)
        status = Status.OPTIMAL if closed else Status.FEASIBLE
        self._solutions.append(Solution(status, schedule, time, peak, bound, by, seconds))
        self._verdicts.show(by, schedule, time, peak)
        return self._solutions[-1]

    def _settle(self) -> None:
        """Drop the claims that a schedule refutes, and name who made them."""
        for claim, cause in self._verdicts.refuted():
            try:
                self.doubt = doubt_or_raise(claim, cause)
            except BrokenSolver as error:
                self.errors[claim.budget_bytes] = error


def _chosen(solver: str | Solver) -> Chosen | None:
    return None if solver == AUTO else resolve_solver(solver)
