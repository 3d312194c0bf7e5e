"""The curve of time against peak, with the curve of what is proved about it.

A few budgets are solved from the largest down, and what is learnt at one is used at the others
(`curve`). Not solved are a budget at which storing everything fits, one below which nothing is
proved to fit, and one where a known schedule is within 0.1% of a known bound. As no budget but the
first is solved from nothing, each gets less time than it would alone.

Guarantee: every solution passed `remat_graph.simulate` and fits its budget; over growing budgets
neither its time nor the bound grows. Bounds and infeasibility hold for schedules in the order of
the graph, as those of the solver that proved them; what a schedule in that order contradicts is
dropped, and the point where it was claimed says so, as does one where the solver failed.
Complexity: a search for the smallest budget and at most one solve per budget. Limits: what the last
budget leaves of the time is not used; on an executor, budgets that run at once learn nothing of one
another until they end.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import SupportsIndex

from remat_graph import Graph, Hierarchy, Schedule, Solution
from remat_solvers.core.parallel import run_all
from remat_solvers.core.problem import (
    Limit,
    Problem,
    Progress,
    Report,
    Solver,
    check_executor,
    check_progress,
    silent,
)
from remat_solvers.errors import InvalidProblem, SolverError, WorkerDied, format_bytes
from remat_solvers.queries.curve import Knowledge, TradeoffPoint
from remat_solvers.registry import resolve_solver
from remat_solvers.solve import AUTO, search

__all__ = ["Tradeoff", "TradeoffPoint", "check_tradeoff", "tradeoff"]

_SMALLEST_SECONDS, _SMALLEST_SECONDS_ASIDE = 5.0, 2.0  # the second: where no budget hangs on it
_SECONDS = 15.0  # for one budget at most; alone, `auto` takes up to twice as long


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """Points of the curve by growing budget, and its two ends.

    Storing everything takes `store_all_time` and `store_all_peak_bytes`. `smallest_bytes` is the
    minimal peak of any schedule found; no schedule in the order of the graph goes below
    `least_bytes`. `doubt` is as that of a `Solution`.
    """

    points: tuple[TradeoffPoint, ...]
    store_all_peak_bytes: int
    store_all_time: float
    smallest_bytes: int
    least_bytes: int
    solver: str
    seconds: float
    doubt: str | None = None

    def overhead(self, time: float) -> float:
        """Give the time of a schedule beyond that of storing everything, as a share of it."""
        return time / self.store_all_time - 1 if self.store_all_time else 0.0


def tradeoff(
    graph: Graph,
    *,
    points: int = 8,
    budgets: Sequence[int | float] | None = None,
    solver: str | Solver = AUTO,
    hierarchy: Hierarchy | None = None,
    limit_seconds: float | None = None,
    executor: Executor | None = None,
    progress: Report | None = None,
    keep_best: bool = False,
) -> Tradeoff:
    """Find the fastest schedules within several budgets, and a lower bound at each.

    `points` budgets are spread evenly from the smallest for which a schedule is found to the peak
    of storing everything, both included; fewer where they fall together. `budgets` are taken in
    their place: whole numbers are bytes, a float in (0, 1] is a share of that peak.

    The limit is shared: what one budget leaves goes to the others; without one, each gets 15 s.
    With `executor`, which the caller owns, as many budgets are solved at once as it has workers,
    where it says how many. `progress` is called with what the solver reports (not from an executor)
    and after each budget. With `keep_best`, Ctrl-C ends the search, and the curve is what is known
    from the budgets that were done; else, and before any is looked at, `KeyboardInterrupt` is
    raised.

    Raises:
        InvalidProblem: if there are fewer than 2 points, no budgets, one that is no such number or
            share, a negative limit, the hierarchy is of another graph, or as `Problem` says.
        SolverError: as `solve`, if all budgets that were asked failed; of one that did beside
            others the point has the `error`. Where nothing fits, or is found, it has no solution.
    """
    solver_name = check_tradeoff(points, budgets, solver, limit_seconds, executor, progress)
    Problem(graph, 1, hierarchy)
    limit = Limit.starting_now(limit_seconds)
    knowledge = Knowledge(graph)
    wanted = None if budgets is None else _in_bytes(budgets, knowledge.store_all.peak_bytes)
    share = limit.left(math.inf) / ((points if wanted is None else len(wanted)) + 1)
    seconds = _SMALLEST_SECONDS if wanted is None else _SMALLEST_SECONDS_ASIDE
    knowledge.look_for_smallest(min(seconds, share))
    if wanted is None:
        wanted = _spread(knowledge.smallest_bytes, knowledge.store_all.peak_bytes, points)
    spent = dict.fromkeys(wanted, 0.0)
    report = silent if progress is None else progress
    try:
        _Sweep(knowledge, solver, solver_name, hierarchy, limit, executor, report).run(spent)
    except KeyboardInterrupt:
        if not keep_best:
            raise
    return Tradeoff(
        points=tuple(knowledge.point(budget, spent[budget]) for budget in wanted),
        store_all_peak_bytes=knowledge.store_all.peak_bytes,
        store_all_time=knowledge.store_all.time,
        smallest_bytes=knowledge.smallest_bytes,
        least_bytes=knowledge.least_bytes,
        solver=solver_name,
        seconds=limit.elapsed,
        doubt=knowledge.doubt,
    )


def check_tradeoff(
    points: object,
    budgets: object,
    solver: str | Solver,
    limit_seconds: float | None,
    executor: object,
    progress: object,
) -> str:
    """Check all of `tradeoff` that can be checked without a graph; `points` if it is of use.

    What each of the budgets says is left to whoever reads them. Returns what the solver is called.

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
    if executor is not None:
        check_executor(executor)
    check_progress(progress)
    return AUTO if solver == AUTO else resolve_solver(solver).name


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


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Solves budgets from the largest down, as many at once as there are workers."""

    knowledge: Knowledge
    solver: str | Solver
    solver_name: str
    hierarchy: Hierarchy | None
    limit: Limit
    executor: Executor | None
    report: Report

    def run(self, spent: dict[int, float]) -> None:
        """Solve what is open of the budgets, until the limit; the seconds go into `spent`.

        Raises:
            SolverError: that of the first budget, if none that was asked has an answer.
        """
        waiting, attempts = sorted(spent, reverse=True), 0
        count = len(waiting)
        at_once = self._at_once(count)
        while waiting:
            left = self.limit.left(math.inf)
            for budget in tuple(waiting):
                if left <= 0 or not self.knowledge.is_open(budget):
                    waiting.remove(budget)
                    self._say(budget, count - len(waiting), count)
            now, waiting = waiting[:at_once], waiting[at_once:]
            rounds = 1 + math.ceil(len(waiting) / at_once)
            seconds = _SECONDS if self.limit.seconds is None else left / rounds
            done = count - len(waiting) - len(now)
            for budget, (answer, took) in zip(now, self._solve(now, seconds, count), strict=True):
                done, attempts = done + 1, attempts + 1
                spent[budget] = took
                if isinstance(answer, SolverError):
                    self.knowledge.fail(budget, answer)
                else:
                    self.knowledge.learn(budget, answer, self.solver)
                self._say(budget, done, count)
        errors = [*self.knowledge.errors.values()]
        if errors and len(errors) == attempts:
            raise errors[0]

    def _at_once(self, count: int) -> int:
        if self.executor is None:
            return 1
        workers = getattr(self.executor, "_max_workers", None)
        return max(1, workers) if isinstance(workers, int) else count

    def _solve(
        self, budgets: list[int], seconds: float, count: int
    ) -> list[tuple[Solution | SolverError, float]]:
        graph, hierarchy = self.knowledge.graph, self.hierarchy
        loose = self.limit.seconds is None
        tasks = [
            (
                f"budget of {budget} bytes",
                (
                    graph,
                    budget,
                    self.solver,
                    hierarchy,
                    seconds,
                    loose,
                    self.knowledge.start(budget),
                ),
            )
            for budget in budgets
        ]
        if self.executor is not None:
            try:
                return run_all(self.executor, _solve_budget, tasks)
            except WorkerDied as error:
                return [(error, 0.0) for _ in tasks]

        def report(progress: Progress) -> None:
            message = f"budget {format_bytes(budgets[0])} of {count}: {progress.message}"
            self.report(dataclasses.replace(progress, message=message))

        return [_solve_budget(*arguments, report) for _, arguments in tasks]

    def _say(self, budget: int, done: int, count: int) -> None:
        point = self.knowledge.point(budget, 0.0)
        solution = point.solution
        state = point.status.value if point.error is None else str(point.error)
        self.report(
            Progress(
                solver=self.solver_name,
                round=done,
                incumbent_time=None if solution is None else solution.time,
                incumbent_peak_bytes=None if solution is None else solution.peak_bytes,
                lower_bound=point.lower_bound,
                seconds=self.limit.elapsed,
                message=f"{done} of {count}, budget {format_bytes(budget)}: {state}",
            )
        )


def _solve_budget(
    graph: Graph,
    budget_bytes: int,
    solver: str | Solver,
    hierarchy: Hierarchy | None,
    seconds: float,
    loose: bool,
    start: Schedule | None,
    report: Report = silent,
) -> tuple[Solution | SolverError, float]:
    """Solve one budget; the answer, which may have no schedule, and the seconds it took.

    What the solver fails with is handed back: other budgets need not suffer.
    """
    problem = Problem(graph, budget_bytes, hierarchy, None, start)
    limit = Limit.starting_now(seconds, loose=loose)
    try:
        return search(problem, solver, limit, report), limit.elapsed
    except SolverError as error:
        return error, limit.elapsed
