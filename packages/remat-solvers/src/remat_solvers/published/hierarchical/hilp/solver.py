"""`h-ilp` and `rk-checkmate`: the hierarchical integer program of HiRemate, and it without blocks.

Blocks are planned from the lowest level up, each kind once and at several budgets (`blocks`); what
comes out are its options. The top level is solved with the options of its blocks, with corrections
for what is freed inside them. Every answer is a sequence of ops whose memory has been traced, so
none is over budget, whatever the program believed. Both begin with the given schedule and with what
is found without a program (`starts`), from which the programs are warm-started. For `h-ilp`, what
those schedules do in a block is an option of it, too (`blocks.adopt`); where these options together
need more than the budget, others are tried. A given schedule that fits is kept, in whatever order.

Guarantee: a schedule within the budget. `rk-checkmate` proves bounds as `checkmate` does. The bound
of `h-ilp` is that of what fits between the halves of the whole graph (`bounds.kept_bytes`), while
the op at the boundary runs, and holds for schedules in any order; so does its `INFEASIBLE`.
Complexity: an integer program of O(nodes x (options + reads)) columns for each kind of block and
budget, whose size depends on the partition alone; the number of kinds grows with the graph.
Limits: the order of first computations is that of the hierarchy or that of the graph; the programs
count what an op could overwrite as if it stayed.
Source: Gusak et al. 2024, "HiRemate", section 3.2 and appendix B; Zhao et al. 2023, "Rockmate".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from remat_graph import Solution, simulate
from remat_solvers.bounds.kept_bytes import KeptBytesProgram
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.attempt import Attempt
from remat_solvers.core.milp import HIGHS, missing_back_end
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report, check_gap, check_whole
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Ints, sequence_of
from remat_solvers.errors import InvalidProblem
from remat_solvers.published.checkmate.bound import MOST_COLUMNS, ProgramSolver
from remat_solvers.published.hierarchical.blocks.bottom_up import Blocks
from remat_solvers.published.hierarchical.blocks.level import Level
from remat_solvers.published.hierarchical.hilp.planner import LevelPlanner
from remat_solvers.published.hierarchical.hilp.search import search
from remat_solvers.search.starts import starts

__all__ = ["HILP", "RKCheckmate"]

_BLOCKS_SHARE = 0.5
_BOUND_SHARE = 0.1
_PLANNER = LevelPlanner()


@dataclass(frozen=True, slots=True)
class HILP(PlainSolver):
    """H-ILP over the hierarchy of the problem.

    `most_options` (N_o) is shared out among the blocks of a level. The smallest blocks at the top
    are dissolved while that leaves at most `most_nodes` nodes there. `gap` is the relative gap of
    the time at which the back end may stop.

    Raises:
        InvalidProblem: if `most_options` or `most_nodes` is no whole number of 1 or more, or `gap`
            is no number of 0 or more.
    """

    name: ClassVar[str] = "h-ilp"
    needs_hierarchy: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "J. Gusak, X. Zhao, T. Le Hellard, Z. Li, L. Eyraud-Dubois, O. Beaumont: HiRemate: "
        "Hierarchical Approach for Efficient Re-materialization of Neural Networks. 2024."
    )

    most_options: int = 80
    most_nodes: int = 28
    gap: float = 0.003
    back_end: str = HIGHS
    planner: LevelPlanner = _PLANNER

    def __post_init__(self) -> None:
        check_whole("most_options", self.most_options)
        check_whole("most_nodes", self.most_nodes)
        check_gap(self.gap)

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs without ops, and back ends that are not installed."""
        return PlainSolver.can_solve(self, problem) or missing_back_end(self.back_end)

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Plan the blocks, then the top, until the limit is reached (60 s if none is set)."""
        if problem.hierarchy is None:
            raise InvalidProblem(f"{self.name} needs a hierarchy")
        attempt = Attempt(self.name, problem, limit, report)
        wiring, deadline = attempt.wiring, attempt.deadline
        until = deadline - (1 - _BLOCKS_SHARE) * attempt.left()
        if attempt.settled_at_once(peak_bound(wiring, any_order=True).peak_bytes):
            return attempt.solution()
        sequences = _user_start(attempt, problem)
        fitting = attempt.begin(starts(wiring, attempt.budget_bytes, problem.start, deadline))
        sequences += [start.sequence for start in fitting]
        if attempt.closed() or self._bounded(attempt):
            return attempt.solution()
        blocks = Blocks(problem.hierarchy, self.most_options)
        blocks.plan(self.planner, problem.executor, until, attempt.say)
        top = search(
            blocks.top(self.most_nodes, sequences),
            problem.budget_bytes,
            deadline=deadline,
            gap=self.gap,
            corrected=True,
            back_end=self.back_end,
            tell=attempt.take,
            starts=sequences,
        )
        attempt.say(f"the program of the top level is {top.outcome.value}")
        return attempt.solution()

    def _bounded(self, attempt: Attempt) -> bool:
        """Bound all schedules, in any order; say whether that settles it."""
        if attempt.wiring.graph.boundary is None:
            return False
        keeping = KeptBytesProgram(attempt.wiring, any_order=True, back_end=self.back_end)
        bound = keeping.bound(attempt.budget_bytes, _BOUND_SHARE * attempt.left())
        if bound == math.inf:
            attempt.refuse(self.back_end)
        else:
            attempt.raise_bound(bound, self.back_end)
        attempt.say("bounded all schedules")
        return attempt.infeasible or attempt.closed()


def _user_start(attempt: Attempt, problem: Problem) -> list[Ints]:
    """Keep the given schedule if it fits, whatever its order; list it as a sequence.

    Raises:
        InvalidSchedule: if it is not legal.
    """
    if problem.start is None:
        return []
    simulate(problem.graph, problem.start)
    sequence = sequence_of(attempt.wiring, problem.start)
    attempt.take(sequence)
    return [sequence]


@dataclass(frozen=True, slots=True)
class RKCheckmate(ProgramSolver):
    """H-ILP's program over single ops: Rockmate's extension of Checkmate.

    Raises:
        InvalidProblem: if `gap` is no number of 0 or more, or `most_columns` no whole number of 0
            or more.
    """

    name: ClassVar[str] = "rk-checkmate"
    exact: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "X. Zhao, T. Le Hellard, L. Eyraud-Dubois, J. Gusak, O. Beaumont: Rockmate: an Efficient, "
        "Fast, Automatic and Generic Tool for Re-materialization in PyTorch. ICML 2023."
    )

    gap: float = 0.0
    back_end: str = HIGHS
    most_columns: int = MOST_COLUMNS

    def __post_init__(self) -> None:
        check_gap(self.gap)
        check_whole("most_columns", self.most_columns, 0)

    def _search(self, attempt: Attempt, fitting: list[Trace]) -> None:
        """Solve the program."""
        result = search(
            Level.of(attempt.wiring),
            attempt.budget_bytes,
            deadline=attempt.deadline,
            gap=self.gap,
            corrected=True,
            back_end=self.back_end,
            tell=attempt.take,
            starts=[start.sequence for start in fitting],
        )
        attempt.say(f"the program is {result.outcome.value}")
