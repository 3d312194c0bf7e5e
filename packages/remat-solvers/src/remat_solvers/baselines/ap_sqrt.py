"""`ap-sqrt`: `chen-sqrt` on any graph, with articulation ops as the candidates.

All that backward needs of what lies before an articulation op can be computed again without what
lies after it. Where there are none, nothing is kept. Guarantee: none. Complexity: O(ops x values).
Source: Jain et al. 2020, section 6.1 and appendix on baselines (AP root n).
"""

from __future__ import annotations

from typing import ClassVar

from remat_graph import Solution
from remat_solvers.baselines.forward import articulation_ops, why_unsuitable
from remat_solvers.baselines.segments import every_root, keep_segments
from remat_solvers.baselines.sweep import cheapest
from remat_solvers.checkmate.attempt import Attempt
from remat_solvers.problem import Limit, Problem, Report

__all__ = ["ApSqrt"]


class ApSqrt:
    """Every root-n-th articulation op is a checkpoint."""

    name: ClassVar[str] = "ap-sqrt"
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
        """Schedule the one choice there is."""
        attempt = Attempt(self.name, problem, limit, report)
        chosen = every_root(articulation_ops(attempt.wiring))
        kept = keep_segments(attempt.stages, chosen)
        return cheapest(attempt, limit, [(f"{len(chosen)} checkpoints", kept)])
