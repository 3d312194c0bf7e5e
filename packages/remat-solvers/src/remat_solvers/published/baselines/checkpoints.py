"""The baselines that choose checkpoints among candidates: every root-n-th, or by bytes.

A solver of these says what its candidates are, and whether it is for chains alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from remat_graph import Solution
from remat_solvers.core.problem import Limit, Problem, Report
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.baselines.forward import why_no_chain, why_unsuitable
from remat_solvers.published.baselines.segments import every_root, greedy_choices, keep_segments
from remat_solvers.published.baselines.sweep import cheapest
from remat_solvers.published.checkmate.attempt import Attempt

__all__ = ["CHECKMATE_PAPER", "CHEN_PAPER", "EveryRoot", "GreedyBytes"]

CHECKMATE_PAPER = (
    "P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. Gonzalez: "
    "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization. MLSys 2020."
)
CHEN_PAPER = (
    "T. Chen, B. Xu, C. Zhang, C. Guestrin: Training Deep Nets with Sublinear Memory Cost. "
    "arXiv:1604.06174, 2016."
)


class _Checkpoints:
    name: ClassVar[str]
    citation: ClassVar[str]
    exact: ClassVar[bool] = False
    needs_hierarchy: ClassVar[bool] = False
    chains_only: ClassVar[bool] = False

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs without two halves; if it is for chains, other graphs too."""
        reason = why_unsuitable(problem.graph)
        return reason or (why_no_chain(problem.graph) if self.chains_only else None)

    def candidates(self, wiring: Wiring) -> Sequence[int]:
        """List the forward ops that may be checkpoints, in order: all of them."""
        return range(wiring.graph.boundary_index)


class EveryRoot(_Checkpoints):
    """Every root-n-th candidate is a checkpoint."""

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Schedule the one choice there is."""
        attempt = Attempt(self.name, problem, limit, report)
        chosen = every_root(self.candidates(attempt.wiring))
        kept = keep_segments(attempt.stages, chosen)
        return cheapest(attempt, limit, [(f"{len(chosen)} checkpoints", kept)])


class GreedyBytes(_Checkpoints):
    """Segments of about equal bytes that end at candidates."""

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Sweep the segment size; keep the fastest schedule that fits."""
        attempt = Attempt(self.name, problem, limit, report)
        choices = greedy_choices(attempt.stages, self.candidates(attempt.wiring))
        proposals = (
            (f"segments of {size:.0f} bytes", keep_segments(attempt.stages, chosen))
            for size, chosen in choices
        )
        return cheapest(attempt, limit, proposals)
