"""`monet`: checkpoints and the implementation of every op, jointly, by the program of MONeT.

Over a graph with alternatives (`Graph.with_numerics` says how exact) it is MONeT, over
`Graph.without_alternatives()` MONeT's checkpointing alone. It begins with what is found without a
program: storing everything in the fastest ways, the given schedule, and, where there is a choice,
storing everything under Gist's choice of implementations and some others, brought within the
budget. Then the program is solved, warm-started from the fastest of these that it admits.

Guarantee: given enough time, no schedule of MONeT's form that its program admits is faster than the
one returned, which may be one to begin with, of another form: the forward pass is run once, before
each op of the backward half ops of the forward half are computed again once at most and in order,
gradients are never computed again, and while something is computed again, what later ops may read
counts. The optimum of this program bounds no other schedules, so there is no `lower_bound` but the
time of the cheapest ways, stated where it is reached, and no `INFEASIBLE` but where one op needs
too much. Progress states the optimum or the bound of the program.
Complexity: a MILP of O(segments x values) columns; see `most_columns`.
Limits: for graphs with a forward and a backward half; refused above `most_columns` columns.
Source: Shah et al. 2021, "Memory Optimization for Deep Networks", section 4, appendices B and C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from remat_graph import Solution, simulate
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.alternatives import store_all_sequence
from remat_solvers.core.attempt import Attempt, solve_below
from remat_solvers.core.dead_runs import without_dead_runs
from remat_solvers.core.milp import HIGHS, Answer, missing_back_end, solve_program
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report, check_gap, check_whole
from remat_solvers.core.trace import Trace, sequence_time, trace
from remat_solvers.core.wiring import Floats, Ints, expand, sequence_of
from remat_solvers.published.baselines.forward import why_unsuitable
from remat_solvers.published.monet.columns import Columns, count_columns
from remat_solvers.published.monet.formulation import TOTAL, Formulation, formulate
from remat_solvers.published.monet.layout import Layout
from remat_solvers.published.monet.point import embed, read_point, settle
from remat_solvers.search.selection import arrange, first_choices
from remat_solvers.search.starts import starts
from remat_solvers.search.unfolding import unfold

__all__ = ["MOST_COLUMNS", "Monet"]

MOST_COLUMNS = 200_000
_MOST_OPS = 4000


@dataclass(frozen=True, slots=True)
class Monet(PlainSolver):
    """The integer program of MONeT, by any MILP solver that CVXPY has installed.

    `gap` is the relative gap of the whole time of a step, at which the back end may stop.

    Raises:
        InvalidProblem: if `gap` is no number of 0 or more, or `most_columns` no whole number of 0
            or more.
    """

    name: ClassVar[str] = "monet"
    takes_alternatives: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "A. Shah, C.-Y. Wu, J. Mohan, V. Chidambaram, P. Krähenbühl: "
        "Memory Optimization for Deep Networks. ICLR 2021."
    )

    back_end: str = HIGHS
    gap: float = 0.0
    most_columns: int = MOST_COLUMNS

    def __post_init__(self) -> None:
        check_gap(self.gap)
        check_whole("most_columns", self.most_columns, 0)

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs without two halves, programs that are too large, and missing back ends."""
        reason = why_unsuitable(problem.graph, _MOST_OPS) or missing_back_end(self.back_end)
        if reason is not None:
            return reason
        columns = count_columns(Layout.of(problem.wiring))
        if columns > self.most_columns:
            return (
                f"its program would have {columns:,} columns, more than {self.most_columns:,}; "
                f"use 'refine', which has stages only where memory binds"
            )
        return None

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Solve the program until it is closed or the limit is reached (60 s if none is set)."""
        course = _Course(self.name, problem, limit, report)
        if not course.begin(problem):
            course.search(self.back_end, self.gap)
        return course.kept.solution()


class _Course:
    """One solve: what it begins with, and the program."""

    def __init__(self, solver: str, problem: Problem, limit: Limit, report: Report) -> None:
        self.kept = Attempt(solver, problem, limit, report, bounded=False)
        self._layout = Layout.of(problem.wiring)
        self._starts: list[Trace] = []

    def begin(self, problem: Problem) -> bool:
        """Offer schedules that are found without a program; say whether there is nothing to gain.

        Takes a small share of the time.
        """
        kept, wiring = self.kept, self._layout.wiring
        if kept.settled_at_once(peak_bound(wiring).peak_bytes):
            return True
        self._starts.append(trace(wiring, store_all_sequence(wiring)))
        if problem.start is not None:
            self._offer(sequence_of(wiring, problem.start))
        if not problem.graph.has_alternatives:
            for schedule in starts(wiring, kept.budget_bytes, None, kept.deadline):
                self._offer(schedule.sequence)
        else:
            self._begin_with_choices()
        kept.say("began without a program")
        return kept.closed()

    def _begin_with_choices(self) -> None:
        """Offer what is found under each of the first choices of implementations."""
        layout, budget = self._layout, self.kept.budget_bytes
        wiring, alternatives = layout.wiring, layout.alternatives
        for choice in first_choices(wiring, alternatives):
            arranged = arrange(wiring, alternatives, choice)
            if arranged is not None:
                unfolded = unfold(wiring, arranged)
                for schedule in starts(unfolded.wiring, budget, None, self.kept.deadline):
                    self._offer(unfolded.fold(schedule).sequence)

    def search(self, back_end: str, gap: float) -> None:
        """Solve the program; slightly below the budget where its tolerances spoil the schedule."""
        kept, columns = self.kept, Columns.of(self._layout)

        def solve(share: float, seconds: float) -> Answer:
            formulation = formulate(self._layout, kept.budget_bytes * share)
            start = self._start(formulation)
            return solve_program(
                formulation.program, seconds=seconds, gap=gap, start=start, back_end=back_end
            )

        def take(point: Floats) -> bool:
            sequence = read_point(columns, point).sequence(self._layout)
            return self._offer(without_dead_runs(self._layout.wiring, sequence))

        answer, ended = solve_below(solve, take, kept.deadline)
        if answer is not None and answer.point is not None:
            ended += f": {answer.value / TOTAL:.4f}, its bound {answer.bound / TOTAL:.4f}"
        kept.say(f"MONeT's program {ended}")

    def _start(self, formulation: Formulation) -> Floats | None:
        """Write as a point the fastest schedule that the program admits."""
        program = formulation.program
        best: Floats | None = None
        for schedule in self._starts:
            decision = settle(formulation.columns, schedule)
            if decision is None:
                continue
            point = embed(formulation.columns, decision, len(program.cost))
            fits = bool(np.all(program.matrix @ point <= program.right + 1e-6))
            if fits and (best is None or program.cost @ point < program.cost @ best):
                best = point
        return best

    def _offer(self, sequence: Ints) -> bool:
        """Offer a sequence; say whether it fits.

        Raises:
            InvalidSchedule: if it is not legal, which is a defect of what made it.
        """
        wiring = self._layout.wiring
        simulate(wiring.graph, expand(wiring, sequence))
        schedule = trace(wiring, sequence)
        before = self.kept.best_time
        fits = self.kept.offer(schedule)
        self._starts.append(schedule)
        if self.kept.best_time < before:
            self.kept.say(f"a schedule of {sequence_time(wiring, sequence):.6g} was found")
        return fits
