"""`last-node`: keep what the last op made, compute everything else again when it is read.

Guarantee: none; close to the least memory that one run per stage can reach, at up to n times the
time. Results stay, as the paper's gradients of parameters do.
Complexity: O(ops^2) steps. Limits: graphs above 2,000 ops are refused; one schedule whatever the
budget; needs a forward and a backward half.
Source: "checkpoint last node" of the code of Jain et al. 2020: S_{t,t-1} = 1, then the least R.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from remat_graph import Solution
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report
from remat_solvers.published.baselines.checkpoints import CHECKMATE_PAPER
from remat_solvers.published.baselines.forward import why_unsuitable
from remat_solvers.published.baselines.sweep import cheapest
from remat_solvers.published.checkmate.stages import Stages

__all__ = ["LastNode"]

_MOST_OPS = 2000


class LastNode(PlainSolver):
    """Between two stages only what the op before made is kept."""

    name: ClassVar[str] = "last-node"
    citation: ClassVar[str] = CHECKMATE_PAPER

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs without two halves, and large ones."""
        return why_unsuitable(problem.graph, _MOST_OPS)

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Schedule the one choice there is."""
        stages = Stages.of(problem.wiring)
        producer = stages.wiring.producer
        kept = np.arange(stages.count)[:, None] == producer + 1
        kept[:, stages.wiring.results] = True
        return cheapest(
            self.name,
            stages,
            problem.budget_bytes,
            limit,
            report,
            [("the last op's outputs", kept)],
        )
