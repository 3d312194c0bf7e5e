"""`checkmate`: the complete integer program, from the optimum of which a schedule is read.

It begins with what is found without a program (`starts`): the given schedule, and storing
everything brought within the budget. Then the program of `bound` is solved, for at most a share of
the time, and that of `formulation`, warm-started from the fastest of these that fits in Checkmate's
stages.

Guarantee: given enough time, no schedule in Checkmate's stages (between two first computations each
op at most once, in the order of the graph) is faster than the one returned, which may be one to
begin with, of other stages. `lower_bound`,
`OPTIMAL` and `INFEASIBLE` are claims about all schedules in the order of the graph, and are proved
by `bound`; where only Checkmate's stages are exhausted, the status is `FEASIBLE` or `LIMIT`.
Complexity: a MILP of O(ops x edges) columns; tens of ops take seconds, hundreds do not finish.
Limits: refused above `most_columns` columns; the order of first computations is fixed.
Source: Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", section 4, equations 1 to 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remat_solvers.core.attempt import Attempt, solve_below
from remat_solvers.core.milp import HIGHS, BudgetedProgram
from remat_solvers.core.problem import check_gap, check_whole
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Floats
from remat_solvers.errors import InvalidProblem
from remat_solvers.published.checkmate.bound import MOST_COLUMNS, ProgramSolver
from remat_solvers.published.checkmate.formulation import Form, Formulation, formulate
from remat_solvers.published.checkmate.stages import Stages

__all__ = ["Checkmate"]


@dataclass(frozen=True, slots=True)
class Checkmate(ProgramSolver):
    """The integer program of Checkmate, by any MILP solver that CVXPY has installed.

    `gap` is the relative gap of the program's objective, the time of recomputation, at which the
    back end may stop.

    Raises:
        InvalidProblem: if `gap` is no number of 0 or more, `form` no `Form`, or `most_columns` no
            whole number of 0 or more.
    """

    name: ClassVar[str] = "checkmate"
    exact: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. Gonzalez: "
        "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization. MLSys 2020."
    )

    back_end: str = HIGHS
    gap: float = 0.0
    form: Form = Form.TIGHT
    most_columns: int = MOST_COLUMNS

    def __post_init__(self) -> None:
        check_gap(self.gap)
        check_whole("most_columns", self.most_columns, 0)
        if not isinstance(self.form, Form):
            raise InvalidProblem(f"form={self.form!r}; give one of {', '.join(map(str, Form))}")

    def _search(self, attempt: Attempt, fitting: list[Trace]) -> None:
        """Solve the program; slightly below the budget where its tolerances spoil the schedule."""
        stages = Stages.of(attempt.wiring)
        formulation = formulate(stages, self.form)
        program = BudgetedProgram(formulation.program, formulation.per_byte, self.back_end)
        start = _start(stages, attempt.budget_bytes, fitting, formulation)
        _, ended = solve_below(
            lambda share, seconds: program.solve(
                attempt.budget_bytes * share, seconds=seconds, gap=self.gap, start=start
            ),
            lambda point: attempt.offer(stages.schedule(formulation.read(point)[1] > 0.5)),
            attempt.deadline,
        )
        attempt.say(f"Checkmate's program {ended}")


def _start(
    stages: Stages, budget_bytes: int, fitting: list[Trace], formulation: Formulation
) -> Floats | None:
    """Write as a point the first of the schedules that in Checkmate's stages still fits."""
    for schedule in fitting:
        kept = stages.read_off(schedule)
        if stages.schedule(kept).peak_bytes <= budget_bytes:
            return formulation.embed(stages.least_run(kept), kept)
    return None
