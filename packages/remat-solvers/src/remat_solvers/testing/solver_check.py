"""`check_solver`: whether a solver does what it says, on many small problems and a large one.

Small problems are solved by brute force, too. What is checked of an answer is in `answer_faults`;
beside that: what the solver says of itself, what it reports, that it refuses with a reason, and
that it ends at its limit. A solver need not be good at it, only right.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from remat_graph import Graph, InvalidSchedule, RematError, Solution, Status, simulate
from remat_graph.plugins import with_settings
from remat_graph.testing import (
    in_blocks,
    random_dag,
    random_training,
    unit_chain,
    with_mask,
)
from remat_solvers.core.problem import Limit, Problem, Progress, Solver, silent
from remat_solvers.core.store_all import store_all
from remat_solvers.registry import get_solver
from remat_solvers.testing.answer_faults import faults
from remat_solvers.testing.brute_force import fastest

__all__ = ["SolverCheck", "SolverCheckFailed", "check_solver"]

_MOST_FAULTS = 10
_LATE_SECONDS = 10.0
_LARGE_STEPS = 300


class SolverCheckFailed(RematError, AssertionError):
    """A solver that does not do what it says; `check` has all that was found."""

    def __init__(self, check: SolverCheck) -> None:
        super().__init__(str(check))
        self.check = check


@dataclass(slots=True)
class SolverCheck:
    """What came of a check; print it.

    `solved` counts problems for which there was a schedule, `proved` those with a claim that it is
    the fastest or that there is none, `refused` those that the solver said it cannot take. `faults`
    name the problem and what was wrong. `notes` are no faults.
    """

    solver: str
    problems: int = 0
    solved: int = 0
    proved: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Write all, the faults first."""
        lines = [
            f"solver {self.solver!r}: {len(self.faults)} faults; of {self.problems} problems "
            f"{self.solved} solved, {self.proved} with proof, {self.refused} refused",
            *(f"- {fault}" for fault in self.faults),
            *(f"(note: {note})" for note in self.notes),
        ]
        return "\n".join(lines)


def check_solver(
    solver: str | Solver | type[Solver],
    *,
    problems: int = 60,
    seed: int = 0,
    limit_seconds: float = 2.0,
) -> SolverCheck:
    """Check that a solver does what it says, and return what came of it.

    `solver` is one, its class, or a name from `list_solvers()`. `problems` random ones, drawn from
    `seed`, are solved within `limit_seconds` each, and some that are known; it ends at the tenth
    fault.

    Raises:
        SolverCheckFailed: with every fault: an illegal schedule or one over budget, wrong figures,
            a bound above the optimum, a claim that does not hold, an exception, a solve that does
            not end, a refusal without a reason, nothing solved at all, or of one that says it is
            exact less than half of the problems proved.
        SolverError: if there is no such solver.
    """
    checked = solver() if isinstance(solver, type) else get_solver(solver)
    check = SolverCheck(str(getattr(checked, "name", checked)))
    check.faults += _attributes(checked)
    if not check.faults:
        run = _Check(checked, check, limit_seconds)
        for label, problem in _problems(checked, problems, seed):
            run.solve(label, problem)
            if len(check.faults) >= _MOST_FAULTS:
                break
        else:
            run.ends_at_its_limit()
            run.lets_errors_through()
        accepted = check.problems - check.refused
        if checked.exact and check.proved < accepted / 2 and not check.faults:
            check.faults.append(
                f"it says that it is exact, but proved {check.proved} of {accepted}"
            )
        if not check.solved and not check.faults:
            check.faults.append("it solved none of these problems, not even a chain with room")
        if with_settings(checked.name, checked) is None:
            check.notes.append(
                "its settings are not attributes named like the arguments of its class, or no "
                "plain values: plans do not name them, and its solutions are not cached"
            )
    if check.faults:
        raise SolverCheckFailed(check)
    return check


def _attributes(solver: Solver) -> Iterator[str]:
    """Check what a solver says of itself."""
    if not (isinstance(getattr(solver, "name", None), str) and solver.name.strip()):
        yield "its `name` is no text"
    for name in ("exact", "needs_hierarchy", "takes_alternatives"):
        value = getattr(solver, name, None)
        if not isinstance(value, bool):
            yield f"its `{name}` is {value!r}; it must be True or False"
    for name in ("can_solve", "solve"):
        if not callable(getattr(solver, name, None)):
            yield f"it has no method `{name}`"
    citation = getattr(solver, "citation", None)
    if not isinstance(citation, str):
        yield f"its `citation` is {citation!r}, no text"


def _problems(solver: Solver, count: int, seed: int) -> Iterator[tuple[str, Problem]]:
    """Draw problems, each with what it is called; with a start now and then."""
    chain = unit_chain(4)
    yield "a chain of 4 steps with room", _problem(solver, chain, 100)
    yield "a chain of 4 steps within 4 bytes", _problem(solver, chain, 4)
    yield "a chain of 4 steps within 1 byte", _problem(solver, chain, 1)
    if solver.takes_alternatives:
        for budget in (40, 26, 20, 8):
            problem = _problem(solver, with_mask(2), budget)
            yield f"a chain with packed masks within {budget} bytes", problem
    random = Random(seed)
    for number in range(count):
        make = random_training if number % 3 else random_dag
        graph = make(random)
        roomy = simulate(graph, store_all(graph)).peak_bytes + 1
        budget = max(1, roomy - random.randint(0, roomy * 2 // 3))
        start = number % 4 == 0
        label = f"random problem {number} of seed {seed} ({len(graph.ops)} ops, {budget} bytes)"
        yield label, _problem(solver, graph, budget, start=start)


def _problem(solver: Solver, graph: Graph, budget: int, *, start: bool = False) -> Problem:
    hierarchy = in_blocks(graph) if solver.needs_hierarchy else None
    return Problem(graph, budget, hierarchy, start=store_all(graph) if start else None)


class _Stop(Exception):
    """What a receiver of progress raises to stop a solver."""


class _Check:
    """One check under way."""

    def __init__(self, solver: Solver, check: SolverCheck, limit_seconds: float) -> None:
        self._solver = solver
        self._check = check
        self._limit_seconds = limit_seconds

    def solve(self, label: str, problem: Problem) -> None:
        """Solve a small problem, and hold the answer against brute force."""
        check = self._check
        check.problems += 1
        best = fastest(problem.graph, problem.budget_bytes)
        reports: list[Progress] = []
        answer = self._ask(problem, self._limit_seconds, reports)
        wrong = [answer] if isinstance(answer, str) else []
        if isinstance(answer, Solution):
            wrong += faults(problem, answer, best)
            check.solved += answer.schedule is not None
            check.proved += answer.status in (Status.OPTIMAL, Status.INFEASIBLE)
        for progress in reports:
            wrong += _reported(problem, progress, best)
        check.faults += [f"{label}: {fault}" for fault in dict.fromkeys(wrong)]

    def ends_at_its_limit(self) -> None:
        """Ask for an answer at once, and soon, of a problem that takes longer."""
        problem = _problem(self._solver, unit_chain(_LARGE_STEPS), 40)
        for seconds in (0.0, 1.0):
            limit = Limit.starting_now(seconds)
            answer = self._ask(problem, seconds, [])
            label = f"a chain of {_LARGE_STEPS} steps within {seconds:g} s"
            if isinstance(answer, str):
                self._check.faults.append(f"{label}: {answer}")
            if limit.elapsed > seconds + _LATE_SECONDS:
                self._check.faults.append(f"{label}: it took {limit.elapsed:.1f} s")

    def lets_errors_through(self) -> None:
        """Raise where progress is received: nobody else may handle that."""
        problem = _problem(self._solver, unit_chain(6), 5)
        raised: list[bool] = []

        def stop(_progress: Progress, /) -> None:
            raised.append(True)
            raise _Stop

        if self._solver.can_solve(problem) is not None:
            return
        try:
            self._solver.solve(problem, Limit.starting_now(self._limit_seconds), stop)
        except _Stop:
            return
        except Exception as error:
            self._check.faults.append(f"stopped by its report, it raised {_described(error)}")
        if raised:
            self._check.faults.append("it went on where its report raised, which is to stop it")

    def _ask(self, problem: Problem, seconds: float, reports: list[Progress]) -> object:
        """Ask whether the solver can, and let it; what it gives, or as text what was wrong."""
        try:
            reason = self._solver.can_solve(problem)
            if reason is not None:
                self._check.refused += 1
                good = isinstance(reason, str) and reason.strip()
                return None if good else f"it refused without a reason: {reason!r}"
            report = reports.append if reports is not None else silent
            answer: object = self._solver.solve(problem, Limit.starting_now(seconds), report)
        except Exception as error:
            return f"it raised {_described(error)}"
        return answer if isinstance(answer, Solution) else f"it returned {answer!r}, no Solution"


def _reported(problem: Problem, progress: object, best: float | None) -> Iterator[str]:
    """Check what was reported on the way."""
    if not isinstance(progress, Progress):
        yield f"it reported a {type(progress).__name__}, no Progress"
        return
    peak, bound = progress.incumbent_peak_bytes, progress.lower_bound
    if peak is not None and peak > problem.budget_bytes:
        yield f"it reported a schedule of {peak} bytes as one that fits"
    if bound is not None and best is not None and bound > best * (1 + 1e-6):
        yield f"it reported the bound {bound:g}, but a schedule of time {best:g} fits"
    if progress.incumbent is not None:
        try:
            timeline = simulate(problem.graph, progress.incumbent())
        except InvalidSchedule as error:
            yield f"a schedule that it reported is illegal: {error}"
        else:
            if timeline.peak_bytes > problem.budget_bytes:
                yield f"a schedule that it reported peaks at {timeline.peak_bytes} bytes"


def _described(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
