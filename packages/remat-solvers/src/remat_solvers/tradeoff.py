"""The curve of time against peak, with the curve of what is proved about it.

A few budgets are solved from the largest down, and what is learnt at one is used at the others: a
schedule serves every budget that it fits, and one for a larger budget is where a solver may start;
a bound proved at a budget holds at every smaller one, and so does that nothing fits. Not solved are
a budget at which storing everything fits, one below which nothing is proved to fit, and one where a
known schedule is within 0.1% of a known bound.

Guarantee: every solution passed `remat_graph.simulate` and fits its budget; over growing budgets
neither its time nor the bound grows. Bounds and infeasibility hold for schedules in the order of
the graph, as those of the solver that proved them; a solver that contradicts a schedule in that
order is reported as broken. Complexity: a search for the smallest budget and at most one solve per
budget. Limits: what the last budget leaves of the time is not used; on an executor, budgets that
run at once learn nothing of one another until they end.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import SupportsIndex

from remat_graph import Compute, Graph, Hierarchy, Schedule, Solution, Status, simulate
from remat_solvers.errors import BrokenSolver, InvalidProblem, format_bytes
from remat_solvers.parallel import run_all
from remat_solvers.problem import Limit, Problem, Progress, Report, check_executor, silent
from remat_solvers.registry import find, get_solver
from remat_solvers.smallest import smallest_budget
from remat_solvers.solve import AUTO, search
from remat_solvers.store_all import StoreAll, store_all

__all__ = ["Tradeoff", "TradeoffPoint", "check_arguments", "tradeoff"]

_SMALLEST = "smallest-budget"
_SMALLEST_SECONDS = 5.0
_GAP = 1e-3  # near enough not to be solved
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


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """Points of the curve by growing budget, and its two ends.

    Storing everything takes `store_all_time` and `store_all_peak_bytes`. `smallest_bytes` is the
    least peak of any schedule found; no schedule in the order of the graph goes below
    `least_bytes`.
    """

    points: tuple[TradeoffPoint, ...]
    store_all_peak_bytes: int
    store_all_time: float
    smallest_bytes: int
    least_bytes: int
    solver: str
    seconds: float

    def overhead(self, time: float) -> float:
        """Give the time of a schedule beyond that of storing everything, as a share of it."""
        return time / self.store_all_time - 1 if self.store_all_time else 0.0


def tradeoff(
    graph: Graph,
    *,
    points: int = 8,
    budgets: Sequence[int | float] | None = None,
    solver: str = AUTO,
    hierarchy: Hierarchy | None = None,
    limit_seconds: float | None = None,
    executor: Executor | None = None,
    progress: Report | None = None,
) -> Tradeoff:
    """Find the fastest schedules within several budgets, and what no schedule can beat at each.

    `points` budgets are spread evenly from the smallest for which a schedule is found to the peak
    of storing everything, both included; fewer where they fall together. `budgets` are taken in
    their place: whole numbers are bytes, a float in (0, 1] is a share of that peak.

    The limit is shared: what one budget leaves goes to the others; without one, each takes what the
    solver takes unless told. With `executor`, which the caller owns, as many budgets are solved at
    once as it has workers, where it says how many. `progress` is called with what the solver
    reports (not from an executor) and after each budget.

    Raises:
        InvalidProblem: if there are fewer than 2 points, no budgets, one that is no such number or
            share, a negative limit, the hierarchy is of another graph, or as `Problem` says.
        SolverError: as `solve`; but where nothing fits, or is found, the point has no solution.
    """
    check_arguments(points, budgets, solver, limit_seconds, executor, progress)
    Problem(graph, 1, hierarchy)
    limit = Limit.starting_now(limit_seconds)
    known = _Knowledge(graph)
    wanted = None if budgets is None else _in_bytes(budgets, known.store_all.peak_bytes)
    share = limit.left(math.inf) / ((points if wanted is None else len(wanted)) + 1)
    known.look_for_smallest(min(_SMALLEST_SECONDS, share))
    if wanted is None:
        wanted = _spread(known.smallest_bytes, known.store_all.peak_bytes, points)
    spent = dict.fromkeys(wanted, 0.0)
    report = silent if progress is None else progress
    _Sweep(known, solver, hierarchy, limit, executor, report).run(spent)
    known.check()
    return Tradeoff(
        points=tuple(known.point(budget, spent[budget]) for budget in wanted),
        store_all_peak_bytes=known.store_all.peak_bytes,
        store_all_time=known.store_all.time,
        smallest_bytes=known.smallest_bytes,
        least_bytes=known.least_bytes,
        solver=solver,
        seconds=limit.elapsed,
    )


def check_arguments(
    points: object,
    budgets: object,
    solver: object,
    limit_seconds: float | None,
    executor: object,
    progress: object,
) -> None:
    """Check all of `tradeoff` that can be checked without a graph; `points` if it is of use.

    What each of the budgets says is left to whoever reads them.

    Raises:
        InvalidProblem: as `tradeoff`.
        SolverError: if the solver does not exist or cannot be loaded.
    """
    if budgets is None:
        if isinstance(points, bool) or not isinstance(points, int) or points < 2:
            raise InvalidProblem(f"points={points!r}; it must be a whole number, 2 or more")
    elif isinstance(budgets, str | bytes) or not (isinstance(budgets, Collection) and len(budgets)):
        raise InvalidProblem(
            f"budgets={budgets!r}; give one or more, in a list, such as [0.3, 8 * 2**30]"
        )
    Limit.starting_now(limit_seconds)
    if not isinstance(solver, str):
        raise InvalidProblem(f"solver={solver!r}; give a name, such as 'auto' or 'refine'")
    if executor is not None:
        check_executor(executor)
    if progress is not None and not callable(progress):
        raise InvalidProblem(f"progress={progress!r}; give a function of a Progress, or None")
    if solver != AUTO:
        get_solver(solver)


def _in_bytes(budgets: Sequence[int | float], store_all_bytes: int) -> list[int]:
    """Read budgets: sorted, each once.

    Raises:
        InvalidProblem: if one is neither bytes nor a share.
    """
    return sorted({_size(budget, store_all_bytes) for budget in budgets})


def _size(budget: object, store_all_bytes: int) -> int:
    if isinstance(budget, float) and 0 < budget <= 1:
        return max(1, int(budget * store_all_bytes))
    if isinstance(budget, SupportsIndex) and not isinstance(budget, bool):
        size = operator.index(budget)
        if size > 0:
            return size
    raise InvalidProblem(
        f"budget {budget!r} is neither a whole number of bytes above 0 nor a share of the peak of "
        f"storing everything, a float above 0 and at most 1"
    )


def _spread(smallest_bytes: int, largest_bytes: int, points: int) -> list[int]:
    room = largest_bytes - smallest_bytes
    return sorted({max(1, smallest_bytes + room * i // (points - 1)) for i in range(points)})


class _Knowledge:
    """All schedules found and all that is proved, whatever the budget it was asked at."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.least_bytes = 0
        schedule = store_all(graph)
        self.store_all = _solution(graph, schedule, Status.OPTIMAL, StoreAll.name, 0.0)
        self._found = [self.store_all]
        self._bounds: list[tuple[int, float, str]] = []
        self._least_said_by = _SMALLEST

    @property
    def smallest_bytes(self) -> int:
        """The least peak of any schedule found."""
        return min(found.peak_bytes for found in self._found)

    def look_for_smallest(self, seconds: float) -> None:
        """Ask for a schedule of small peak, and what no peak goes below."""
        started = time.perf_counter()
        smallest = smallest_budget(self.graph, limit_seconds=seconds)
        spent = time.perf_counter() - started
        found = _solution(self.graph, smallest.schedule, Status.FEASIBLE, _SMALLEST, spent)
        self._found.append(found)
        self.least_bytes = smallest.least_bytes

    def learn(self, budget_bytes: int, answer: Solution, solver: str) -> None:
        """Take note of the checked answer of a solver, under the name it was asked by."""
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
        return max(proved, default=self.graph.time)

    def start(self, budget_bytes: int) -> Schedule | None:
        """Return the schedule of the least peak that does not fit: that of the next budget."""
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
            for budget, bound, name in self._bounds:
                if found.peak_bytes <= budget and bound > found.time * (1 + _TOLERANCE):
                    cause = f"it claims the bound {bound} at {budget} bytes, but a schedule {shown}"
                    raise BrokenSolver(name, _origin(name), cause)
            if found.peak_bytes < self.least_bytes:
                name, too_small = self._least_said_by, self.least_bytes - 1
                cause = f"it claims that nothing fits {too_small} bytes, but a schedule {shown}"
                raise BrokenSolver(name, _origin(name), cause)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Solves budgets from the largest down, as many at once as there are workers."""

    known: _Knowledge
    solver: str
    hierarchy: Hierarchy | None
    limit: Limit
    executor: Executor | None
    report: Report

    def run(self, spent: dict[int, float]) -> None:
        """Solve what is open of the budgets, until the limit; the seconds go into `spent`."""
        waiting = sorted(spent, reverse=True)
        count = len(waiting)
        at_once = self._at_once(count)
        while waiting:
            left = self.limit.left(math.inf)
            for budget in tuple(waiting):
                if left <= 0 or not self.known.is_open(budget):
                    waiting.remove(budget)
                    self._say(budget, count - len(waiting), count)
            now, waiting = waiting[:at_once], waiting[at_once:]
            rounds = 1 + math.ceil(len(waiting) / at_once)
            seconds = None if self.limit.seconds is None else left / rounds
            done = count - len(waiting) - len(now)
            for budget, (answer, took) in zip(now, self._solve(now, seconds, count), strict=True):
                done += 1
                spent[budget] = took
                self.known.learn(budget, answer, self.solver)
                self._say(budget, done, count)

    def _at_once(self, count: int) -> int:
        if self.executor is None:
            return 1
        workers = getattr(self.executor, "_max_workers", None)
        return max(1, workers) if isinstance(workers, int) else count

    def _solve(
        self, budgets: list[int], seconds: float | None, count: int
    ) -> list[tuple[Solution, float]]:
        graph, hierarchy = self.known.graph, self.hierarchy
        tasks = [
            (
                f"budget of {budget} bytes",
                (graph, budget, self.solver, hierarchy, seconds, self.known.start(budget)),
            )
            for budget in budgets
        ]
        if self.executor is not None:
            return run_all(self.executor, _solve_budget, tasks)

        def report(progress: Progress) -> None:
            message = f"budget {format_bytes(budgets[0])} of {count}: {progress.message}"
            self.report(dataclasses.replace(progress, message=message))

        return [_solve_budget(*arguments, report) for _, arguments in tasks]

    def _say(self, budget: int, done: int, count: int) -> None:
        point = self.known.point(budget, 0.0)
        found = point.solution
        self.report(
            Progress(
                solver=self.solver,
                round=done,
                incumbent_time=None if found is None else found.time,
                incumbent_peak_bytes=None if found is None else found.peak_bytes,
                lower_bound=point.lower_bound,
                seconds=self.limit.elapsed,
                message=f"{done} of {count}, budget {format_bytes(budget)}: {point.status.value}",
            )
        )


def _solve_budget(
    graph: Graph,
    budget_bytes: int,
    solver: str,
    hierarchy: Hierarchy | None,
    seconds: float | None,
    start: Schedule | None,
    report: Report = silent,
) -> tuple[Solution, float]:
    """Solve one budget; the answer, which may have no schedule, and the seconds it took."""
    problem = Problem(graph, budget_bytes, hierarchy, None, start)
    limit = Limit.starting_now(seconds)
    return search(problem, solver, limit, report), limit.elapsed


def _solution(
    graph: Graph, schedule: Schedule, status: Status, solver: str, seconds: float
) -> Solution:
    timeline = simulate(graph, schedule)
    peak, once = timeline.peak_bytes, graph.time
    return Solution(status, schedule, timeline.time, peak, once, solver, seconds)


def _origin(solver: str) -> str:
    return "remat-solvers" if solver in {AUTO, _SMALLEST} else find(solver).origin


def _in_order(graph: Graph, schedule: Schedule) -> bool:
    """Say whether the first computations of all ops are in the order of the graph."""
    computed = dict.fromkeys(step.op for step in schedule.steps if isinstance(step, Compute))
    return list(computed) == [op.name for op in graph.ops]
