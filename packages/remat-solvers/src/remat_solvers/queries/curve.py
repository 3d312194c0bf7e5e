"""What is known along a curve of time against peak: schedules, bounds, and what does not fit.

What is learnt at one budget is known at others: a schedule serves every budget that it fits, and
one for a larger budget is where a solver may start; a bound proved at a budget holds at every
smaller one, and so does that nothing fits. It is the memory of `tradeoff`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass

from remat_graph import Compute, Graph, Schedule, Solution, Status, simulate
from remat_solvers.baselines.store_all import StoreAll, store_all
from remat_solvers.core.makers import least_time
from remat_solvers.core.problem import Solver
from remat_solvers.core.wiring import Wiring
from remat_solvers.errors import BrokenSolver
from remat_solvers.registry import choose
from remat_solvers.smallest import smallest_budget
from remat_solvers.solve import AUTO

__all__ = ["Knowledge", "TradeoffPoint"]

_SMALLEST = "smallest-budget"
_GAP = 1e-3  # near enough not to be solved
_NEAR = 1.05  # times the peak of the best that fits: less would be hard to find
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class TradeoffPoint:
    """What is known at one budget.

    `solution` is the fastest schedule found that fits, for this budget or a smaller one, `None` if
    there is none; its `lower_bound` is that of the point, its `solve_seconds` those of the budget
    it was found for. No schedule in the order of the graph takes less than `lower_bound`; with
    `proved_infeasible` there is none at all. `seconds` went into this budget.
    """

    budget_bytes: int
    solution: Solution | None
    lower_bound: float | None
    proved_infeasible: bool
    seconds: float

    @property
    def status(self) -> Status:
        """The status of the solution; without one, whether it is proved that there is none."""
        if self.solution is not None:
            return self.solution.status
        return Status.INFEASIBLE if self.proved_infeasible else Status.LIMIT


class Knowledge:
    """All schedules found and all that is proved, whatever the budget it was asked at."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.least_bytes = 0
        schedule = store_all(graph)
        self.least_time = least_time(Wiring.of(graph))
        self.store_all = _solution(graph, schedule, StoreAll.name, 0.0, self.least_time)
        self._found = [self.store_all]
        self._bounds: list[tuple[int, float, str | Solver]] = []
        self._least_said_by: str | Solver = _SMALLEST

    @property
    def smallest_bytes(self) -> int:
        """The least peak of any schedule found."""
        return min(found.peak_bytes for found in self._found)

    def look_for_smallest(self, seconds: float) -> None:
        """Ask for a schedule of small peak, and what no peak goes below."""
        started = time.perf_counter()
        smallest = smallest_budget(self.graph, limit_seconds=seconds)
        spent = time.perf_counter() - started
        found = _solution(self.graph, smallest.schedule, _SMALLEST, spent, self.least_time)
        self._found.append(found)
        self.least_bytes = smallest.least_bytes

    def learn(self, budget_bytes: int, answer: Solution, solver: str | Solver) -> None:
        """Take note of the checked answer of a solver, which was asked like this."""
        if answer.schedule is not None:
            self._found.append(answer)
        bound = answer.lower_bound
        if bound is None and answer.status is Status.OPTIMAL:
            bound = answer.time * (1 - _TOLERANCE)
        if answer.status is Status.INFEASIBLE:
            if budget_bytes >= self.least_bytes:
                self.least_bytes, self._least_said_by = budget_bytes + 1, solver
        elif bound is not None and math.isfinite(bound):
            self._bounds.append((budget_bytes, bound, solver))

    def best(self, budget_bytes: int) -> Solution | None:
        """Return the fastest schedule that fits; of equal ones the first found."""
        fitting = (found for found in self._found if found.peak_bytes <= budget_bytes)
        return min(fitting, key=lambda found: found.time, default=None)

    def bound(self, budget_bytes: int) -> float:
        """Return the most that is proved at this budget or a larger one."""
        proved = (bound for budget, bound, _ in self._bounds if budget >= budget_bytes)
        return max(proved, default=self.least_time)

    def start(self, budget_bytes: int) -> Schedule | None:
        """Return the schedule of the least peak that does not fit: that of the next budget.

        Where little less fits than the fastest that does, that one.
        """
        best = self.best(budget_bytes)
        if best is not None and budget_bytes <= _NEAR * best.peak_bytes:
            return best.schedule
        above = (found for found in self._found if found.peak_bytes > budget_bytes)
        nearest = min(above, key=lambda found: found.peak_bytes, default=None)
        return None if nearest is None else nearest.schedule

    def is_open(self, budget_bytes: int) -> bool:
        """Say whether a solve could tell more than is known."""
        if budget_bytes < self.least_bytes:
            return False
        best = self.best(budget_bytes)
        return best is None or best.time > self.bound(budget_bytes) * (1 + _GAP)

    def point(self, budget_bytes: int, seconds: float) -> TradeoffPoint:
        """Say what is known at a budget."""
        best = self.best(budget_bytes)
        if best is None:
            refused = budget_bytes < self.least_bytes
            bound = None if refused else self.bound(budget_bytes)
            return TradeoffPoint(budget_bytes, None, bound, refused, seconds)
        # Of an order of its own, a schedule may be faster than any in that of the graph.
        bound = min(self.bound(budget_bytes), best.time)
        closed = best.time <= bound * (1 + _TOLERANCE)
        status = Status.OPTIMAL if closed else Status.FEASIBLE
        best = dataclasses.replace(best, status=status, lower_bound=bound)
        return TradeoffPoint(budget_bytes, best, bound, False, seconds)

    def check(self) -> None:
        """Hold what is proved against every schedule in the order of the graph.

        Raises:
            BrokenSolver: if a schedule does what a solver proved to be impossible.
        """
        for found in self._found:
            if found.schedule is None or not _in_order(self.graph, found.schedule):
                continue
            shown = f"of {found.solver!r} takes {found.time} within {found.peak_bytes} bytes"
            for budget, bound, solver in self._bounds:
                if found.peak_bytes <= budget and bound > found.time * (1 + _TOLERANCE):
                    cause = f"it claims the bound {bound} at {budget} bytes, but a schedule {shown}"
                    raise BrokenSolver(*_told(solver), cause)
            if found.peak_bytes < self.least_bytes:
                solver, too_small = self._least_said_by, self.least_bytes - 1
                cause = f"it claims that nothing fits {too_small} bytes, but a schedule {shown}"
                raise BrokenSolver(*_told(solver), cause)


def _solution(
    graph: Graph, schedule: Schedule, solver: str, seconds: float, bound: float
) -> Solution:
    timeline = simulate(graph, schedule)
    peak, time = timeline.peak_bytes, timeline.time
    status = Status.OPTIMAL if time <= bound * (1 + _TOLERANCE) else Status.FEASIBLE
    return Solution(status, schedule, time, peak, min(bound, time), solver, seconds)


def _told(solver: str | Solver) -> tuple[str, str]:
    """Give the name of a solver, and where it comes from."""
    if isinstance(solver, str) and solver in {AUTO, _SMALLEST}:
        return solver, "remat-solvers"
    chosen = choose(solver)
    return chosen.name, chosen.origin


def _in_order(graph: Graph, schedule: Schedule) -> bool:
    """Say whether the first computations of all ops are in the order of the graph."""
    computed = dict.fromkeys(step.op for step in schedule.steps if isinstance(step, Compute))
    return list(computed) == [op.name for op in graph.ops]
