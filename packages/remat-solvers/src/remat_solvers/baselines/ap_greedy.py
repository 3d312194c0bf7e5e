"""`ap-greedy`: `chen-greedy` on any graph, with articulation ops as the candidates.

Where there are none, nothing is kept. Guarantee: of the segment sizes tried, the fastest that fits.
Complexity: at most 65 sizes, each O(ops x values).
Source: Jain et al. 2020, section 6.1 and appendix on baselines (AP greedy).
"""

from __future__ import annotations

from typing import ClassVar

from remat_graph import Solution
from remat_solvers.baselines.forward import articulation_ops, why_unsuitable
from remat_solvers.baselines.segments import greedy_choices, keep_segments
from remat_solvers.baselines.sweep import cheapest
from remat_solvers.checkmate.attempt import Attempt
from remat_solvers.problem import Limit, Problem, Report

__all__ = ["ApGreedy"]


class ApGreedy:
    """Segments of about equal bytes that end at articulation ops."""

    name: ClassVar[str] = "ap-greedy"
    exact: ClassVar[bool] = False
    needs_hierarchy: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. Gonzalez: "
        "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization. MLSys 2020."
    )

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs without two halves."""
        return why_unsuitable(problem.graph)

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Sweep the segment size; keep the fastest schedule that fits."""
        attempt = Attempt(self.name, problem, limit, report)
        candidates = articulation_ops(attempt.wiring)
        choices = greedy_choices(attempt.stages, candidates)
        proposals = (
            (f"segments of {size:.0f} bytes", keep_segments(attempt.stages, chosen))
            for size, chosen in choices
        )
        return cheapest(attempt, limit, proposals)
