"""`checkmate-rounding`: the linear relaxation of Checkmate, rounded in two phases.

The relaxation is solved for a budget of (1 - epsilon) M, to leave room for what rounding adds.
Phase one rounds S at a threshold, or, where draws are asked for, to 1 with the probability S; phase
two completes it with the least R for which the schedule is legal (`Stages.least_run`). Of all
epsilons, thresholds and draws tried, the fastest schedule within the budget M is kept. Epsilon
rises through a grid until the relaxation is infeasible, or the last few schedules that fit were no
faster. The paper's threshold is 0.5 (`thresholds=(0.5,)`); others cost little beside the linear
program and find schedules at budgets where 0.5 finds none. Nor does the paper take out afterwards
what the budget allows to keep (`prune`), which rounding S stage by stage leaves in, or begin with
schedules that are found without a program (`starts`); with `pruned=False` neither is done.

Guarantee: none on the time (1.06x of the optimum is what the paper saw); `lower_bound` is that of
the relaxation of `bound` and holds for all schedules in the order of the graph, and `INFEASIBLE` is
proved by it. Complexity: one linear program per epsilon, of O(ops x edges) columns.
Limits: refused above `most_columns` columns. Randomised rounding depends on `seed` alone.
Source: Jain et al. 2020, section 5, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from remat_solvers.core.attempt import Attempt
from remat_solvers.core.milp import HIGHS, BudgetedProgram, relaxed
from remat_solvers.core.problem import Problem, check_whole
from remat_solvers.core.trace import Trace, sequence_time
from remat_solvers.core.wiring import Floats
from remat_solvers.errors import InvalidProblem
from remat_solvers.published.checkmate.bound import MOST_COLUMNS, ProgramSolver
from remat_solvers.published.checkmate.formulation import Form, formulate
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.search.prune import prune

__all__ = ["CheckmateRounding"]

_EPSILONS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
_PATIENCE = 3
_THRESHOLDS = (0.5, *(k / 20 for k in range(1, 20) if k != 10))


@dataclass(frozen=True, slots=True)
class CheckmateRounding(ProgramSolver):
    """Deterministic two-phase rounding; with `draws`, that many random ones per epsilon as well.

    Raises:
        InvalidProblem: if `draws`, `seed` or `most_columns` is no whole number of 0 or more, there
            are draws without a `seed`, thresholds are no shares, or there is nothing to round by.
    """

    name: ClassVar[str] = "checkmate-rounding"
    citation: ClassVar[str] = (
        "P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. Gonzalez: "
        "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization. MLSys 2020, "
        "section 5."
    )

    _whole_bound: ClassVar[bool] = False

    thresholds: tuple[float, ...] = _THRESHOLDS
    draws: int = 0
    seed: int | None = None
    pruned: bool = True
    back_end: str = HIGHS
    form: Form = Form.TIGHT
    most_columns: int = MOST_COLUMNS

    def __post_init__(self) -> None:
        check_whole("draws", self.draws, 0)
        check_whole("most_columns", self.most_columns, 0)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        if not _are_shares(self.thresholds):
            raise InvalidProblem(
                f"thresholds={self.thresholds!r}; give numbers from 0 to 1, such as (0.5,)"
            )
        if self.draws and self.seed is None:
            raise InvalidProblem(f"draws={self.draws} needs a seed, such as seed=0")
        if not self.draws and not self.thresholds:
            raise InvalidProblem("thresholds=() and draws=0; give one of them, such as (0.5,)")

    def _starts(self, attempt: Attempt, problem: Problem) -> Iterable[Trace]:
        return ProgramSolver._starts(self, attempt, problem) if self.pruned else ()

    def _search(self, attempt: Attempt, _fitting: list[Trace]) -> None:
        stages = Stages.of(attempt.wiring)
        formulation = formulate(stages, self.form)
        program = BudgetedProgram(relaxed(formulation.program), formulation.per_byte, self.back_end)
        rng = np.random.default_rng(self.seed)

        idle, fastest = 0, math.inf
        for epsilon in _EPSILONS:
            if attempt.closed() or attempt.left() <= 0 or idle >= _PATIENCE:
                return
            answer = program.solve(attempt.budget_bytes * (1 - epsilon), seconds=attempt.left())
            if answer.point is None:
                return
            rounded_time = self._round(attempt, stages, formulation.read(answer.point)[1], rng)
            idle = idle + 1 if fastest <= rounded_time < math.inf else 0
            fastest = min(fastest, rounded_time)
            fits = "fits" if rounded_time < math.inf else "over budget"
            attempt.say(f"rounded at epsilon {epsilon:.4g}: {fits}")

    def _round(
        self, attempt: Attempt, stages: Stages, share: Floats, rng: np.random.Generator
    ) -> float:
        """Round S in every way asked for, complete it, offer it; the least time of what fits."""
        choices = [share > threshold for threshold in self.thresholds]
        choices += [rng.random(share.shape) < share for _ in range(self.draws)]
        fastest = math.inf
        for kept in choices:
            rounded = stages.schedule(kept)
            if attempt.offer(rounded):
                if self.pruned:
                    rounded = prune(attempt.wiring, rounded, attempt.budget_bytes)
                    attempt.offer(rounded)
                fastest = min(fastest, sequence_time(attempt.wiring, rounded.sequence))
        return fastest


def _are_shares(thresholds: object) -> bool:
    if not isinstance(thresholds, Sequence):
        return False
    return all(isinstance(share, int | float) and 0 <= share <= 1 for share in thresholds)
