"""`linearized-sqrt`: `chen-sqrt` on any graph, as if its order were a chain.

What a segment reads of another one besides its checkpoint is computed again with it.
Guarantee: none. Complexity: O(ops x values).
Source: Jain et al. 2020, section 6.1 and appendix on baselines (linearized root n).
"""

from __future__ import annotations

from typing import ClassVar

from remat_graph import Solution
from remat_solvers.baselines.forward import why_unsuitable
from remat_solvers.baselines.segments import every_root, keep_segments
from remat_solvers.baselines.sweep import cheapest
from remat_solvers.checkmate.attempt import Attempt
from remat_solvers.problem import Limit, Problem, Report

__all__ = ["LinearizedSqrt"]


class LinearizedSqrt:
    """Every root-n-th forward op is a checkpoint."""

    name: ClassVar[str] = "linearized-sqrt"
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
        chosen = every_root(range(problem.graph.boundary_index))
        kept = keep_segments(attempt.stages, chosen)
        return cheapest(attempt, limit, [(f"{len(chosen)} checkpoints", kept)])
