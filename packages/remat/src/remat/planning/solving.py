"""How a schedule of a captured graph is found: known, cached, shared, or by solving."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.cache import (
    cached_solution,
    keep_smallest,
    keep_solution,
    shared_solution,
    smallest_known,
)
from remat.planning.cutting import hierarchy_for
from remat.planning.slices import programs_by_cuts, whole_programs
from remat_graph import (
    Graph,
    InvalidSchedule,
    Schedule,
    Solution,
    Status,
    leave_late,
    put_in_leaves,
    simulate,
    without_leaves,
)
from remat_graph.torch import Capture, raise_missing
from remat_partition import Partitioner
from remat_solvers import BudgetTooSmall, Progress, Solver, resolve_solver, solve, store_all
from remat_solvers.toolkit import Wiring, least_time
from remat_solvers.verdicts import Verdicts, doubt_or_raise, minimal_peak_claim, unproved

__all__ = [
    "KNOWN_SCHEDULE",
    "Solve",
    "adapted",
    "either",
    "have_same_ops",
    "solution_for",
    "solved_in_best_program",
]

KNOWN_SCHEDULE = "known schedule"  # what solved it, where an earlier plan's schedule is taken

Solve = Callable[..., Solution]  # of a graph, and from a schedule to `start` from, if there is one

_MOST_TRIES = 4  # at a schedule that fits once gradients leave where they can
_NO_FASTER = 1.001  # times the least that a program takes: another one is not planned for that


def have_same_ops(one: Graph, other: Graph) -> bool:
    """Whether a schedule of one is a schedule of the other, whatever it takes there."""
    return (
        (one.resident, one.results) == (other.resident, other.results)
        and len(one.ops) == len(other.ops)
        and all(
            (a.name, a.inputs, a.outputs, a.stage, a.replayable, a.order_after)
            == (b.name, b.inputs, b.outputs, b.stage, b.replayable, b.order_after)
            for a, b in zip(one.ops, other.ops, strict=True)
        )
    )


def adapted(graph: Graph, target: int, schedules: Sequence[Schedule]) -> Solution | None:
    """Find the fastest of known schedules, and storing everything, that fits; `None` if none does.

    Storing everything alone is no known schedule: without any other, nothing is tried.
    """
    if not schedules:
        return None
    start = time.perf_counter()
    best: Solution | None = None
    for schedule in dict.fromkeys((store_all(graph), *schedules)):
        try:
            timeline = simulate(graph, schedule)
        except InvalidSchedule:  # of a graph whose outputs were let go of
            continue
        if timeline.peak_bytes <= target and (best is None or timeline.time < best.time):
            best = Solution(
                schedule=schedule,
                status=Status.FEASIBLE,
                peak_bytes=timeline.peak_bytes,
                time=timeline.time,
                lower_bound=graph.least_time,
                solver=KNOWN_SCHEDULE,
                solve_seconds=time.perf_counter() - start,
            )
    return best


def solved_in_best_program(
    captured: Capture,
    target: int,
    solve_fully: Solve,
    solve_briefly: Solve | None = None,
    *,
    gives_way: bool = False,
) -> tuple[Capture, Solution]:
    """Solve a capture as each program that its numerics allow, unless one cannot be faster.

    These are other layouts, and compiled groups, chosen for a fastest step without a look at the
    budget, in which there may be fewer ways to make a value; and cuts in slices. With
    `solve_briefly` all are solved so before any is solved fully, from what was found: most are then
    known to be slower than another. The fastest solution is given with its capture; its bound holds
    for all of them, in any number of slices that was looked at. A capture that `gives_way` to
    another is refused where solving it briefly finds nothing.

    Raises:
        BudgetTooSmall: if it is for all, with the minimal peaks of any.
    """
    groups = [_Group.of(each.graph, (each,)) for each in whole_programs(captured)]
    groups += [
        _Group.of(each.relaxed, each.programs, solve_briefly)
        for each in programs_by_cuts(captured, target)
    ]
    raise_missing()
    candidates = [candidate for group in groups for candidate in group.candidates]
    gives_way &= solve_briefly is not None
    if len(candidates) == 1 and not gives_way:
        return captured, solve_fully(captured.graph)
    for solved in (solve_briefly, solve_fully):
        for each in sorted(candidates, key=lambda candidate: candidate.bound):
            fastest = min(candidate.time for candidate in candidates)
            if solved is not None and not each.is_settled and fastest > each.bound * _NO_FASTER:
                each.solve(solved)
        if gives_way and solved and all(each.solution is None for each in candidates):
            break
    best = min(candidates, key=lambda candidate: candidate.time)
    if best.solution is None:
        raise functools.reduce(either, (each.refusal for each in candidates if each.refusal))
    solution, bound = best.solution, min(group.bound for group in groups)
    if bound != solution.lower_bound:
        solution = replace(solution, lower_bound=bound, status=Status.FEASIBLE)
    return best.program, solution


@dataclass(slots=True)
class _Candidate:
    """A program, a bound on the time of its schedules, and what solving it gave so far."""

    program: Capture
    bound: float
    solution: Solution | None = None
    refusal: BudgetTooSmall | None = None

    @property
    def time(self) -> float:
        """What its fastest schedule takes so far."""
        return math.inf if self.solution is None else self.solution.time

    @property
    def is_settled(self) -> bool:
        """Whether solving it for longer changes nothing."""
        proved = self.solution is not None and self.solution.status is Status.OPTIMAL
        return proved or math.isinf(self.bound)

    def solve(self, solved: Solve) -> None:
        """Solve it, from the best that is known, and keep the better."""
        start = {} if self.solution is None else {"start": self.solution.schedule}
        try:
            solution = solved(self.program.graph, **start)
        except BudgetTooSmall as error:
            self.refusal = error
            if error.status is Status.INFEASIBLE and self.solution is None:
                self.bound = math.inf
            return
        if solution.lower_bound is not None:
            self.bound = max(self.bound, solution.lower_bound)
        if solution.time < self.time:
            self.solution = solution


@dataclass(frozen=True, slots=True)
class _Group:
    """Programs that differ in numbers of slices, with a bound on all of these; or one program."""

    candidates: tuple[_Candidate, ...]
    bound_of_numbers: float | None

    @classmethod
    def of(
        cls,
        relaxed: Graph,
        programs: Sequence[Capture],
        solved: Solve | None = None,
    ) -> _Group:
        """Bound all numbers of slices by what is the least of all, if that is no program."""
        least = [least_time(Wiring.of(program.graph)) for program in programs]
        if len(programs) == 1 and relaxed.ops == programs[0].graph.ops:
            return cls((_Candidate(programs[0], least[0]),), None)
        bound = least_time(Wiring.of(relaxed))
        if solved is not None:
            try:
                bound = max(bound, solved(relaxed).lower_bound or 0.0)
            except BudgetTooSmall as error:
                bound = math.inf if error.status is Status.INFEASIBLE else bound
        at_least = 0.0 if math.isinf(bound) else bound  # they say themselves what they need
        pairs = zip(programs, least, strict=True)
        return cls(tuple(_Candidate(each, max(at_least, time)) for each, time in pairs), bound)

    @property
    def bound(self) -> float:
        """Time that no schedule of any of them is below."""
        if self.bound_of_numbers is None:
            return self.candidates[0].bound
        return self.bound_of_numbers


def either(one: BudgetTooSmall, other: BudgetTooSmall) -> BudgetTooSmall:
    """Combine the refusals of two programs, either of which might run, into one."""
    smallest = min(one, other, key=lambda error: error.smallest_bytes)
    least = min(one, other, key=lambda error: error.least_bytes)
    proved = one.status is other.status is Status.INFEASIBLE
    return BudgetTooSmall(
        smallest.budget_bytes,
        smallest.smallest_bytes,
        least.least_bytes,
        least.least_at,
        Status.INFEASIBLE if proved else Status.LIMIT,
        least.results_bytes,
    )


def solution_for(
    graph: Graph,
    budget: int,
    target: int,
    *given: Any,
    start: Schedule | None = None,
    **options: Any,
) -> Solution:
    """Find a schedule as `_found` does, in which no gradient leaves before its parameter is read.

    Where none is found, one that holds gradients to the end may be: then they leave in that. It is
    looked for from the one to `start` from.

    Raises:
        BudgetTooSmall: as `_found` does.
    """
    held = without_leaves(graph)
    if held is graph:
        return _found(graph, budget, target, *given, start=start, **options)
    try:
        return _leaving_late(graph, budget, target, *given, start=start, **options)
    except BudgetTooSmall as error:
        refusal = error
    try:
        solution = _found(held, budget, target, *given, **options)
    except BudgetTooSmall as error:
        raise either(refusal, error) from None
    if solution.schedule is None:
        return solution
    schedule = put_in_leaves(graph, solution.schedule)
    return replace(
        solution,
        schedule=schedule,
        peak_bytes=simulate(graph, schedule).peak_bytes,
        lower_bound=graph.least_time,
        status=Status.FEASIBLE,
    )


def _leaving_late(graph: Graph, budget: int, target: int, *given: Any, **options: Any) -> Solution:
    """Solve for less until the schedule, put right, takes no more than the target."""
    aim, peaks, bound = target, list[int](), None
    for attempt in range(_MOST_TRIES):
        try:
            solution = _found(graph, budget, aim, *given, **options)
        except BudgetTooSmall:
            if not attempt:
                raise
            break  # what is proved of less than the target is not proved of it
        schedule = solution.schedule
        late = schedule and leave_late(graph, schedule)
        if late is None or (late is schedule and not attempt):
            return solution
        peak = simulate(graph, late).peak_bytes
        if not attempt:
            bound = solution.lower_bound
        else:
            solution = replace(solution, lower_bound=bound, status=Status.FEASIBLE)
        if peak <= target:
            return replace(solution, schedule=late, peak_bytes=peak)
        peaks.append(peak)
        aim -= peak - target
    raise BudgetTooSmall(budget, min(peaks) + budget - target, 0, None, Status.LIMIT)


def _found(
    graph: Graph,
    budget: int,
    target: int,
    solver: str | Solver,
    limit_seconds: float | None,
    progress: Callable[[Progress], None] | None,
    *,
    start: Schedule | None = None,
    keep_best: bool = False,
    partitioner: str | Partitioner | None = None,
) -> Solution:
    """Take what is cached or, for the solver `"auto"`, shared; solve and cache if there is none.

    `target` is what the graph may take of the budget. With `keep_best`, Ctrl-C ends with the best
    schedule so far. What may have been cut short is not cached: then only an answer of `"auto"` is,
    which says what was run to its end. `"auto"` begins with the schedule to `start` from, or that
    of an earlier refusal; a solver that is named answers for itself.

    Raises:
        BudgetTooSmall: with the smallest budget whose target is known to be feasible, which is no
            larger than that of an earlier refusal.
    """
    stored = [cached_solution(graph, target, solver, limit_seconds, partitioner)]
    if solver == "auto":
        stored.append(shared_solution(graph, target, budget))
    best = min(filter(None, stored), key=lambda solution: solution.time, default=None)
    if best is not None:
        return best
    smallest = smallest_known(graph)
    try:
        solution = solve(
            graph,
            max(1, target),
            solver=solver,
            hierarchy=hierarchy_for(graph, solver, partitioner),
            limit_seconds=limit_seconds,
            progress=progress,
            keep_best=keep_best,
            start=(start or smallest) if solver == "auto" else None,
        )
    except BudgetTooSmall as error:
        raise _about_budget(error, graph, solver, smallest, budget, target) from None
    if not keep_best or solution.trials:
        keep_solution(graph, target, solver, limit_seconds, solution, partitioner)
    return solution


def _about_budget(
    error: BudgetTooSmall,
    graph: Graph,
    solver: str | Solver,
    smallest: Schedule | None,
    budget: int,
    target: int,
) -> BudgetTooSmall:
    """Turn a refusal of the target into one of the budget; `smallest` is an earlier schedule."""
    feasible_bytes = error.smallest_bytes
    least = None if smallest is None else simulate(graph, smallest).peak_bytes
    if smallest is not None and least is not None and least < error.least_bytes:
        error = _held_against(graph, solver, error, smallest)
    if least is not None and least <= feasible_bytes:
        feasible_bytes = least
    elif error.schedule is not None:
        late = leave_late(graph, error.schedule)
        if late is not error.schedule:
            feasible_bytes = simulate(graph, late).peak_bytes
        keep_smallest(graph, late)
    return BudgetTooSmall(
        budget,
        feasible_bytes + budget - target,
        error.least_bytes,
        error.least_at,
        error.status,
        error.results_bytes,
    )


def _held_against(
    graph: Graph, solver: str | Solver, error: BudgetTooSmall, schedule: Schedule
) -> BudgetTooSmall:
    """Take from a refusal what a schedule known from before refutes.

    Raises:
        BrokenSolver: if it is the solver's word, and no back end of ours is behind it.
    """
    wiring, timeline = Wiring.of(graph), simulate(graph, schedule)
    fits = timeline.peak_bytes <= error.budget_bytes
    verdicts = Verdicts(wiring)
    verdicts.show("an earlier plan", schedule, timeline.time, timeline.peak_bytes)
    verdicts.claim(
        minimal_peak_claim(
            error.least_bytes, resolve_solver(solver) if fits and solver != "auto" else None
        )
    )
    for claim, cause in verdicts.refuted():
        doubt_or_raise(claim, cause)
        error = unproved(error, wiring)
    return error
