"""From a graph and a byte budget to a checked schedule, by any installed solver.

`auto` stores everything if that fits, refines otherwise, and at last takes the schedule of least
peak that can be found; why no other solver has a part in it: docs/decisions/0015. Whatever a solver
returns passes `remat_graph.simulate` before anyone sees it, and carries the simulator's figures;
what it claims of all schedules is held against those in hand (`verdicts`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from concurrent.futures import Executor

from remat_graph import (
    Graph,
    Hierarchy,
    InvalidSchedule,
    Schedule,
    Solution,
    Status,
    Timeline,
    Trial,
    simulate,
)
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.incumbent import TOLERANCE
from remat_solvers.core.problem import (
    Limit,
    Problem,
    Progress,
    Report,
    Solver,
    check_progress,
    silent,
)
from remat_solvers.errors import (
    BackEndFailed,
    BrokenSolver,
    BudgetTooSmall,
    SolverError,
    UnsuitableSolver,
)
from remat_solvers.minimal_peak.budget import SmallestBudget, smallest_budget
from remat_solvers.registry import Chosen, resolve_solver
from remat_solvers.verdicts import (
    Verdicts,
    claim_of,
    doubt_about,
    doubt_or_raise,
    minimal_peak_claim,
    uncertified,
)

__all__ = ["AUTO", "search", "solve"]

AUTO = "auto"
_PORTFOLIO = ("store-all", "refine")
_MINIMAL_PEAK = "minimal-peak"
_PROBE_SECONDS = 3.0

_log = logging.getLogger(__name__)


class _Relay:
    """Passes progress on, and remembers what the receiver raised, so that no solver is blamed.

    Remembers the last progress that came with a schedule, too.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self.raised: Exception | None = None
        self.last: Progress | None = None
        self.running: Chosen | None = None

    def __call__(self, progress: Progress, /) -> None:
        if progress.incumbent is not None:
            self.last = progress
        try:
            self._report(progress)
        except Exception as error:
            self.raised = error
            raise


def solve(
    graph: Graph,
    budget_bytes: int,
    *,
    solver: str | Solver = AUTO,
    hierarchy: Hierarchy | None = None,
    limit_seconds: float | None = None,
    executor: Executor | None = None,
    progress: Report | None = None,
    keep_best: bool = False,
    start: Schedule | None = None,
) -> Solution:
    """Schedule a graph within a budget; the answer has a schedule that fits, checked.

    What an op needs by itself is asked first: with less, `auto` looks for the minimal peak alone.
    With `keep_best`, Ctrl-C ends the search and returns the best schedule so far, if there is one;
    else, and without it, `KeyboardInterrupt` is raised. A MILP back end at work is left to itself
    until its limit; the process exits only then. `start` is a schedule to begin with, such as that
    for another budget: it need not fit, but it must be legal. `refine` and the solvers by integer
    programs begin there; where it fits, it is the answer if the solver has none that is as fast.
    The answer of `auto` says in its `trials` what was run to its end and what each gave; a MILP
    back end that fails ends that solver alone. `solver` is `"auto"`, a name from `list_solvers()`
    or an object with its settings: `Checkmate(gap=0.01)`.

    What a solver claims of all schedules is held against storing everything, `start`, and what
    others found. Where a back end was wrong, the answer has a `doubt` and no bound.

    Solvers that have independent sub-problems run them on `executor`, with the same answer as
    without where no time limit cuts them short; the caller owns it.

    Raises:
        InvalidProblem: if the budget or the limit is no positive number, the hierarchy is of
            another graph, an argument is not what it should be, or sizes add up to 2^62 bytes.
        BudgetTooSmall: if nothing fits, or nothing was found within the limit.
        UnknownSolver, DuplicateSolver, BrokenSolver: if there is no such solver, or two, or it does
            not load, fails, or gives an answer that does not hold or claims what is not so.
        BackEndFailed: if the MILP back end of a solver that is named gives no answer.
        UnsuitableSolver: if the solver says that it cannot take the problem.
        WorkerDied: if the executor lost a sub-problem.
        InvalidSchedule: if `start` is not legal for the graph.
    """
    problem = Problem(graph, budget_bytes, hierarchy, executor, start)
    check_progress(progress)
    verdicts, timeline = _in_hand(problem)
    limit = Limit.starting_now(limit_seconds)
    if solver == AUTO and timeline is None and peak_bound(problem.wiring).peak_bytes > budget_bytes:
        seconds = min(_PROBE_SECONDS, limit.left(math.inf))
        raise _too_small(problem, _smallest(problem, seconds, verdicts), Status.INFEASIBLE)
    relay = _Relay(silent if progress is None else progress)
    try:
        answer = _search(problem, solver, limit, relay, verdicts)
    except KeyboardInterrupt:
        best = _best_so_far(problem, limit, relay, verdicts) if keep_best else None
        if best is None:
            raise
        return _or_start(best, problem, timeline)
    answer = _or_start(answer, problem, timeline)
    if answer.schedule is not None:
        return answer
    began = limit.elapsed
    seconds = min(_PROBE_SECONDS, max(0.5, limit.left(_PROBE_SECONDS)))
    smallest = _smallest(problem, seconds, verdicts)
    answer = _settled(answer, verdicts)
    lowest = _fitting(problem, limit, _MINIMAL_PEAK, smallest.schedule) if solver == AUTO else None
    if lowest is not None:
        trials = (*answer.trials, _trial(lowest, limit.elapsed - began))
        return dataclasses.replace(lowest, trials=trials, doubt=answer.doubt)
    raise _too_small(problem, smallest, answer.status)


def search(
    problem: Problem, solver: str | Solver, limit: Limit, report: Report = silent
) -> Solution:
    """Ask as `solve` does, but hand back an answer that has no schedule: nothing else is probed.

    Raises:
        SolverError: as `solve`, but for `BudgetTooSmall`.
    """
    return _search(problem, solver, limit, _Relay(report), _in_hand(problem)[0])


def _in_hand(problem: Problem) -> tuple[Verdicts, Timeline | None]:
    """Begin with the schedule to start from in hand; return also what that takes, if it fits.

    Raises:
        InvalidSchedule: if it is not legal for the graph.
    """
    verdicts = Verdicts(problem.wiring)
    if problem.start is None:
        return verdicts, None
    timeline = simulate(problem.graph, problem.start)
    verdicts.show("start", problem.start, timeline.time, timeline.peak_bytes)
    return verdicts, timeline if timeline.peak_bytes <= problem.budget_bytes else None


def _search(
    problem: Problem, solver: str | Solver, limit: Limit, relay: _Relay, verdicts: Verdicts
) -> Solution:
    """Ask the solver, or those of `auto` in turn until one proves its schedule; the last answer."""
    if solver != AUTO:
        return _ask(resolve_solver(solver), problem, limit, relay, verdicts)
    trials: list[Trial] = []
    for name in _PORTFOLIO:
        began = limit.elapsed
        try:
            answer = _ask(resolve_solver(name), problem, limit, relay, verdicts)
        except BackEndFailed as error:
            best = _best_so_far(problem, limit, relay, verdicts)
            answer = uncertified(_nothing(name, limit) if best is None else best, str(error))
        trials.append(_trial(answer, limit.elapsed - began))
        if answer.status is Status.OPTIMAL:
            break
    return dataclasses.replace(answer, trials=tuple(trials))


def _trial(answer: Solution, seconds: float) -> Trial:
    """Sum up an answer, for which a solver took so many seconds."""
    return Trial(
        solver=answer.solver,
        status=answer.status,
        time=None if answer.schedule is None else answer.time,
        peak_bytes=answer.peak_bytes,
        lower_bound=answer.lower_bound,
        seconds=seconds,
    )


def _ask(
    chosen: Chosen, problem: Problem, limit: Limit, relay: _Relay, verdicts: Verdicts
) -> Solution:
    """Run one solver and check what it says."""
    reason = _why_not(chosen.solver, problem)
    if reason is not None:
        raise UnsuitableSolver(chosen.name, reason)
    relay.running, before = chosen, relay.last
    try:
        answer = chosen.solver.solve(problem, limit, relay)
    except SolverError:
        raise
    except Exception as error:
        if error is relay.raised:
            raise
        cause = f"it raised {type(error).__name__}: {error}"
        raise BrokenSolver(chosen.name, chosen.origin, cause) from error
    checked = _checked(chosen, problem, answer)
    if checked.schedule is None and relay.last is not before:
        _best_so_far(problem, limit, relay, verdicts)  # takes it in hand
    return _judged(chosen, problem, checked, verdicts)


def _judged(chosen: Chosen, problem: Problem, answer: Solution, verdicts: Verdicts) -> Solution:
    """Take in hand what was found, and hold what is claimed against all that is."""
    verdicts.claim(claim_of(chosen, problem.budget_bytes, answer))
    if answer.schedule is not None:
        verdicts.show(answer.solver, answer.schedule, answer.time, answer.peak_bytes)
    return _settled(answer, verdicts)


def _settled(answer: Solution, verdicts: Verdicts) -> Solution:
    """Take from an answer what a schedule in hand refutes.

    Raises:
        BrokenSolver: if no back end of ours said so.
    """
    for claim, cause in verdicts.refuted():
        answer = uncertified(answer, doubt_or_raise(claim, cause))
    return answer


def _or_start(answer: Solution, problem: Problem, timeline: Timeline | None) -> Solution:
    """Take the schedule to start from, if it fits and the one that was found is slower."""
    if timeline is None or (answer.schedule and answer.time <= timeline.time * (1 + TOLERANCE)):
        return answer
    bound = answer.lower_bound
    return dataclasses.replace(
        answer,
        status=Status.FEASIBLE,
        schedule=problem.start,
        time=timeline.time,
        peak_bytes=timeline.peak_bytes,
        lower_bound=None if bound is None else min(bound, timeline.time),
    )


def _nothing(solver: str, limit: Limit) -> Solution:
    """Say that a solver was stopped before it found anything."""
    return Solution(Status.LIMIT, None, math.inf, 0, None, solver, limit.elapsed)


def _best_so_far(
    problem: Problem, limit: Limit, relay: _Relay, verdicts: Verdicts
) -> Solution | None:
    """Make an answer, checked, of the last schedule that a solver reported, or the given one."""
    last = relay.last
    if last is None or last.incumbent is None or relay.running is None:
        return _fitting(problem, limit, AUTO, problem.start)
    schedule = last.incumbent()
    answer = Solution(
        status=Status.FEASIBLE,
        schedule=schedule,
        time=math.inf,
        peak_bytes=0,
        lower_bound=last.lower_bound,
        solver=last.solver,
        solve_seconds=limit.elapsed,
    )
    best = _judged(relay.running, problem, _checked(relay.running, problem, answer), verdicts)
    doubt = doubt_about(relay.running)
    return best if doubt is None else uncertified(best, doubt)


def _fitting(
    problem: Problem, limit: Limit, solver: str, schedule: Schedule | None
) -> Solution | None:
    """Make an answer of a schedule found elsewhere, if it fits."""
    if schedule is None:
        return None
    timeline = simulate(problem.graph, schedule)
    if timeline.peak_bytes > problem.budget_bytes:
        return None
    return Solution(
        status=Status.FEASIBLE,
        schedule=schedule,
        time=timeline.time,
        peak_bytes=timeline.peak_bytes,
        lower_bound=None,
        solver=solver,
        solve_seconds=limit.elapsed,
    )


def _why_not(chosen: Solver, problem: Problem) -> str | None:
    if chosen.needs_hierarchy and problem.hierarchy is None:
        return "it needs a hierarchy; make one with remat_partition.partition"
    if problem.graph.has_alternatives and not chosen.takes_alternatives:
        return (
            "it does not choose among alternatives, which the graph has; "
            "give it graph.without_alternatives(), or use 'refine'"
        )
    return chosen.can_solve(problem)


def _checked(chosen: Chosen, problem: Problem, answer: object) -> Solution:
    """Return the answer with the simulator's figures.

    Raises:
        BrokenSolver: if it is no `Solution`, its schedule is illegal or over budget, or its bound
            is above its own time.
    """
    name, origin = chosen.name, chosen.origin
    if not isinstance(answer, Solution):
        raise BrokenSolver(name, origin, f"it returned a {type(answer).__name__}, no Solution")
    if answer.solver == chosen.solver.name:
        answer = dataclasses.replace(answer, solver=name)
    claims_schedule = answer.status in (Status.OPTIMAL, Status.FEASIBLE)
    if claims_schedule != (answer.schedule is not None):
        has = "no schedule" if answer.schedule is None else "a schedule"
        raise BrokenSolver(name, origin, f"it claims {answer.status.value!r} with {has}")
    if answer.schedule is None:
        return answer
    try:
        timeline = simulate(problem.graph, answer.schedule)
    except InvalidSchedule as error:
        raise BrokenSolver(name, origin, f"its schedule is illegal ({error})") from error
    if timeline.peak_bytes > problem.budget_bytes:
        cause = (
            f"its schedule peaks at {timeline.peak_bytes} bytes, "
            f"over the budget of {problem.budget_bytes}"
        )
        raise BrokenSolver(name, origin, cause)
    bound = answer.lower_bound
    if bound is not None and bound > timeline.time * (1 + 1e-9):
        cause = f"it claims the bound {bound}, but its own schedule takes {timeline.time}"
        raise BrokenSolver(name, origin, cause)
    return dataclasses.replace(answer, time=timeline.time, peak_bytes=timeline.peak_bytes)


def _smallest(problem: Problem, seconds: float, verdicts: Verdicts) -> SmallestBudget:
    """Look for the minimal peak, and take that in hand, too; the one to start from may be lower."""
    graph, start = problem.graph, problem.start
    smallest = smallest_budget(graph, limit_seconds=seconds)
    timeline = simulate(graph, smallest.schedule)
    verdicts.show(_MINIMAL_PEAK, smallest.schedule, timeline.time, timeline.peak_bytes)
    verdicts.claim(minimal_peak_claim(smallest.least_bytes))
    peak = smallest.peak_bytes if start is None else simulate(graph, start).peak_bytes
    if start is not None and peak < smallest.peak_bytes:
        smallest = dataclasses.replace(smallest, peak_bytes=peak, schedule=start)
    if smallest.least_bytes > peak:
        floor = peak_bound(problem.wiring)
        least_bytes = min(floor.peak_bytes, peak)
        smallest = dataclasses.replace(smallest, least_bytes=least_bytes, least_at=floor.op)
    return smallest


def _too_small(problem: Problem, smallest: SmallestBudget, status: Status) -> BudgetTooSmall:
    """Say what would fit."""
    least_bytes, least_at = smallest.least_bytes, smallest.least_at
    proved = status is Status.INFEASIBLE
    if proved and least_bytes <= problem.budget_bytes:
        least_bytes, least_at = problem.budget_bytes + 1, None
    status = Status.INFEASIBLE if least_bytes > problem.budget_bytes else Status.LIMIT
    graph = problem.graph
    results = sum(value.size_bytes for value in graph.values if value.name in graph.results)
    return BudgetTooSmall(
        problem.budget_bytes,
        smallest.peak_bytes,
        least_bytes,
        least_at,
        status,
        results,
        smallest.schedule,
    )
