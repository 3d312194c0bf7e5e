"""A lower bound for all schedules in the order of the graph, also outside Checkmate's stages.

Between the first runs of ops t-1 and t, Checkmate computes each op at most once and in the order of
the graph; other schedules may need less memory there, so neither the bound nor the infeasibility of
its program holds for them. The program of `refine` asks only for what every schedule satisfies
(`refine.relaxation`); here with a checkpoint at every op, and all rows of running memory.

Guarantee: the optimum is at most the recomputation of any schedule in the order of the graph; if
it is infeasible, there is no schedule. Size: O(ops x edges).

`ProgramSolver` is what the solvers that prove this bound have in common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from remat_graph import Solution
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.attempt import Attempt
from remat_solvers.core.milp import Outcome, Program, missing_back_end, relaxed, solve_program
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.checkmate.formulation import count_columns
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.refine.relaxation import COST_OF_ONCE, relax
from remat_solvers.search.starts import starts

__all__ = ["MOST_COLUMNS", "ProgramSolver", "bounding_program"]

MOST_COLUMNS = 200_000
_BOUND_SHARE = 0.3  # of the time


class ProgramSolver(PlainSolver, ABC):
    """A solver by a program in Checkmate's stages, which also bounds all schedules."""

    __slots__ = ()

    name: ClassVar[str]
    _whole_bound: ClassVar[bool] = True  # else by its linear relaxation

    back_end: str
    most_columns: int

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse programs that are too large, and back ends that are not installed."""
        return _why_not(problem, self.back_end, self.most_columns)

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Solve until the schedule is proved the fastest, or the limit (60 s if none is set).

        First come schedules without a program, then a bound on all, for a share of the time, then
        the program, and at last the bound again, if it was stopped and there is time.
        """
        attempt = Attempt(self.name, problem, limit, report)
        if attempt.settled_at_once(peak_bound(attempt.wiring).peak_bytes):
            return attempt.solution()
        fitting = attempt.begin(self._starts(attempt, problem))
        if attempt.closed():
            return attempt.solution()
        seconds = _BOUND_SHARE * attempt.left()
        outcome = _bound_all(attempt, seconds, self.back_end, whole=self._whole_bound)
        attempt.say("bounded all schedules")
        if not attempt.infeasible and not attempt.closed() and attempt.left() > 0:
            self._search(attempt, fitting)
            if outcome is Outcome.STOPPED and not attempt.closed() and attempt.left() > 0:
                _bound_all(attempt, attempt.left(), self.back_end, whole=self._whole_bound)
                attempt.say("bounded all schedules again")
        return attempt.solution()

    def _starts(self, attempt: Attempt, problem: Problem) -> Iterable[Trace]:
        """Give the schedules to begin with."""
        return starts(attempt.wiring, attempt.budget_bytes, problem.start, attempt.deadline)

    @abstractmethod
    def _search(self, attempt: Attempt, fitting: list[Trace]) -> None:
        """Solve the program, from schedules that fit, fastest first."""


def _why_not(problem: Problem, back_end: str, most_columns: int) -> str | None:
    """Say why Checkmate's program cannot be written or handed to the back end, or `None`."""
    if not problem.graph.ops:
        return "the graph has no ops"
    missing = missing_back_end(back_end)
    if missing is not None:
        return missing
    columns = count_columns(Stages.of(problem.wiring))
    if columns > most_columns:
        return (
            f"its program would have {columns:,} columns, more than {most_columns:,}; "
            f"use 'refine', which has stages only where memory binds"
        )
    return None


def bounding_program(wiring: Wiring, budget_bytes: int) -> Program:
    """Write the program; its value is in thousandths of the time of computing every op once."""
    return relax(wiring, budget_bytes, range(wiring.op_count), complete=True).program


def _bound_all(attempt: Attempt, seconds: float, back_end: str, *, whole: bool) -> Outcome:
    """Bound the time of every schedule in the order of the graph, or prove there is none.

    Without `whole`, by the linear relaxation.
    """
    program = bounding_program(attempt.wiring, attempt.budget_bytes)
    program = program if whole else relaxed(program)
    answer = solve_program(program, seconds=seconds, back_end=back_end)
    if answer.outcome is Outcome.INFEASIBLE:
        attempt.refuse(back_end)
    else:
        attempt.raise_bound(attempt.once * (1 + answer.bound / COST_OF_ONCE), back_end)
    return answer.outcome
