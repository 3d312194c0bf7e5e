"""A solve by integer programs or rules over stages: how it begins, what it keeps, its bound."""

from __future__ import annotations

import numpy as np

from remat_graph import Schedule
from remat_solvers.bounds.least import least
from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.milp import Outcome, missing_back_end, relaxed, solve_program
from remat_solvers.core.problem import Limit, Problem, Report
from remat_solvers.core.trace import Trace, sequence_time, trace
from remat_solvers.core.wiring import Ints
from remat_solvers.published.checkmate.bound import COST_OF_ONCE, bounding_program
from remat_solvers.published.checkmate.formulation import count_columns
from remat_solvers.published.checkmate.stages import Bits, Stages
from remat_solvers.search.starts import starts

__all__ = ["Attempt", "why_not"]


def why_not(problem: Problem, back_end: str, most_columns: int) -> str | None:
    """Say why the program cannot be written or handed to the back end, or `None`."""
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


class Attempt(Incumbent):
    """One solve: begins without a program, offers what is kept at stages, bounds all schedules."""

    def __init__(self, solver: str, problem: Problem, limit: Limit, report: Report) -> None:
        super().__init__(solver, problem.wiring, problem.budget_bytes, limit, report)
        self.stages = Stages.of(self.wiring)

    def settled_at_once(self, *, any_order: bool = False) -> bool:
        """Store everything if that fits; prove that nothing does if one op needs too much.

        With `any_order`, also in another order than that of the graph.
        """
        self.offer(trace(self.wiring, np.arange(self.wiring.op_count)))
        if self.best is not None:
            self.say("storing everything fits")
        elif least(self.wiring, any_order=any_order).peak_bytes > self.budget_bytes:
            self.refuse()
            self.say("one op alone needs more than the budget")
        return self.infeasible or self.closed()

    def begin(self, given: Schedule | None, deadline: float) -> list[Trace]:
        """Offer schedules that are found without a program; return those that fit, fastest first.

        The given one is offered first. Takes a small share of the time until `deadline`.
        """
        fitting: list[Trace] = []
        for found in starts(self.wiring, self.budget_bytes, given, deadline):
            if self.take(found.sequence):
                fitting.append(found)
        return sorted(fitting, key=lambda found: sequence_time(self.wiring, found.sequence))

    def take(self, sequence: Ints) -> bool:
        """Offer a sequence, and report it if it is the fastest; say whether it fits."""
        before = self.best_time
        fits = self.offer(trace(self.wiring, sequence))
        if self.best_time < before:
            self.say("a schedule was found")
        return fits

    def offer_kept(self, kept: Bits) -> bool:
        """Offer the least recomputation for what is kept."""
        return self.offer(trace(self.wiring, self.stages.sequence(self.stages.least_run(kept))))

    def bound_all(self, seconds: float, back_end: str, *, whole: bool = True) -> Outcome:
        """Bound the time of every schedule in the order of the graph, or prove there is none.

        Without `whole`, by the linear relaxation.
        """
        program = bounding_program(self.stages, self.budget_bytes)
        program = program if whole else relaxed(program)
        answer = solve_program(program, seconds=seconds, back_end=back_end)
        if answer.outcome is Outcome.INFEASIBLE:
            self.refuse(back_end)
        else:
            self.raise_bound(answer.bound / COST_OF_ONCE, back_end)
        return answer.outcome
