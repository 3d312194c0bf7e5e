"""A lower bound for all schedules in the order of the graph, also outside Checkmate's stages.

Between the first runs of ops t-1 and t, Checkmate computes each op at most once and in the order of
the graph; other schedules may need less memory there, so neither the bound nor the infeasibility of
its program holds for them. The program of `refine` asks only for what every schedule satisfies
(`refine.relaxation`); here with a checkpoint at every op, and all rows of running memory.

Guarantee: the optimum is at most the recomputation of any schedule in the order of the graph; if
it is infeasible, there is no schedule. Size: O(ops x edges).
"""

from __future__ import annotations

from remat_solvers.core.attempt import Attempt
from remat_solvers.core.milp import Outcome, Program, missing_back_end, relaxed, solve_program
from remat_solvers.core.problem import Problem
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.checkmate.formulation import count_columns
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.refine.relaxation import COST_OF_ONCE, relax

__all__ = ["bound_all", "bounding_program", "why_not"]


def why_not(problem: Problem, back_end: str, most_columns: int) -> str | None:
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


def bound_all(attempt: Attempt, seconds: float, back_end: str, *, whole: bool = True) -> Outcome:
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
