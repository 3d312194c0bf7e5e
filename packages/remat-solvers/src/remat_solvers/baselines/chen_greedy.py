"""`chen-greedy`: on a chain, end a segment when it has come to b bytes, b swept.

Guarantee: of the segment sizes tried, the fastest that fits. Complexity: at most 65 sizes, each
O(ops x values). Limits: chains only; knows sizes, no times.
Source: Chen et al. 2016, algorithm 3; a baseline in Jain et al. 2020, section 3 and table 1.
"""

from __future__ import annotations

from typing import ClassVar

from remat_graph import Solution
from remat_solvers.baselines.forward import why_no_chain, why_unsuitable
from remat_solvers.baselines.segments import greedy_choices, keep_segments
from remat_solvers.baselines.sweep import cheapest
from remat_solvers.checkmate.attempt import Attempt
from remat_solvers.problem import Limit, Problem, Report

__all__ = ["ChenGreedy"]


class ChenGreedy:
    """Segments of about equal bytes of a chain."""

    name: ClassVar[str] = "chen-greedy"
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
        """Sweep the segment size; keep the fastest schedule that fits."""
        attempt = Attempt(self.name, problem, limit, report)
        candidates = range(problem.graph.boundary_index)
        choices = greedy_choices(attempt.stages, candidates)
        proposals = (
            (f"segments of {size:.0f} bytes", keep_segments(attempt.stages, chosen))
            for size, chosen in choices
        )
        return cheapest(attempt, limit, proposals)
