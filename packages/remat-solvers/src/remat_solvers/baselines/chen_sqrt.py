"""`chen-sqrt`: on a chain, keep every k-th forward op, k the root of their number.

Guarantee: on a chain of n unit ops, O(root n) memory for at most one more forward; whether that is
within the budget is not up to it. Complexity: O(ops x values). Limits: chains only; knows no costs.
Source: Chen et al. 2016, section 4.1; a baseline in Jain et al. 2020, section 3 and table 1.
"""

from __future__ import annotations

from typing import ClassVar

from remat_graph import Solution
from remat_solvers.baselines.forward import why_no_chain, why_unsuitable
from remat_solvers.baselines.segments import every_root, keep_segments
from remat_solvers.baselines.sweep import cheapest
from remat_solvers.checkmate.attempt import Attempt
from remat_solvers.problem import Limit, Problem, Report

__all__ = ["ChenSqrt"]


class ChenSqrt:
    """Every root-n-th op of a chain is a checkpoint."""

    name: ClassVar[str] = "chen-sqrt"
    exact: ClassVar[bool] = False
    needs_hierarchy: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "T. Chen, B. Xu, C. Zhang, C. Guestrin: Training Deep Nets with Sublinear Memory Cost. "
        "arXiv:1604.06174, 2016."
    )

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs whose forward ops are no chain."""
        return why_unsuitable(problem.graph) or why_no_chain(problem.graph)

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Schedule the one choice there is."""
        attempt = Attempt(self.name, problem, limit, report)
        chosen = every_root(range(problem.graph.boundary_index))
        kept = keep_segments(attempt.stages, chosen)
        return cheapest(attempt, limit, [(f"{len(chosen)} checkpoints", kept)])
