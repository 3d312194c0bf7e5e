"""The six baselines that choose checkpoints among candidates: every root-n-th, or by bytes.

| | every root-n-th candidate | segments of about b bytes, b swept |
|---|---|---|
| all forward ops of a chain | `chen-sqrt` | `chen-greedy` |
| articulation ops | `ap-sqrt` | `ap-greedy` |
| all forward ops, as if the order were a chain | `linearized-sqrt` | `linearized-greedy` |

All that backward needs of what lies before an articulation op can be computed again without what
lies after it; where there are none, nothing is kept. What a segment of a graph taken for a chain
reads of another one besides its checkpoint is computed again with it.
Guarantee: by bytes, of the segment sizes tried, the fastest that fits; every root-n-th, none (on a
chain of n unit ops, O(root n) memory for at most one more forward). Complexity: O(ops x values) for
a choice, of which there is one, or at most 65 by bytes.
Limits: they know sizes at most, no times; every root-n-th is one schedule whatever the budget. They
need a forward and a backward half.
Source: Chen et al. 2016, section 4.1 and algorithm 3; Jain et al. 2020, section 6.1, table 1 and
appendix on baselines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from remat_graph import Solution
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.baselines.forward import (
    articulation_ops,
    why_no_chain,
    why_unsuitable,
)
from remat_solvers.published.baselines.segments import every_root, greedy_choices, keep_segments
from remat_solvers.published.baselines.sweep import cheapest
from remat_solvers.published.checkmate.stages import Stages

__all__ = [
    "CHECKMATE_PAPER",
    "ApGreedy",
    "ApSqrt",
    "ChenGreedy",
    "ChenSqrt",
    "LinearizedGreedy",
    "LinearizedSqrt",
]

CHECKMATE_PAPER = (
    "P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. Gonzalez: "
    "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization. MLSys 2020."
)
_CHEN_PAPER = (
    "T. Chen, B. Xu, C. Zhang, C. Guestrin: Training Deep Nets with Sublinear Memory Cost. "
    "arXiv:1604.06174, 2016."
)


class _Checkpoints(PlainSolver):
    name: ClassVar[str]
    citation: ClassVar[str] = CHECKMATE_PAPER

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs without two halves."""
        return why_unsuitable(problem.graph)

    def candidates(self, wiring: Wiring) -> Sequence[int]:
        """List the forward ops that may be checkpoints, in order: all of them."""
        return range(wiring.graph.boundary_index)


class _EveryRoot(_Checkpoints):
    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Schedule the one choice there is."""
        stages = Stages.of(problem.wiring)
        chosen = every_root(self.candidates(stages.wiring))
        kept = keep_segments(stages, chosen)
        return cheapest(
            self.name,
            stages,
            problem.budget_bytes,
            limit,
            report,
            [(f"{len(chosen)} checkpoints", kept)],
        )


class _GreedyBytes(_Checkpoints):
    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Sweep the segment size; keep the fastest schedule that fits."""
        stages = Stages.of(problem.wiring)
        choices = greedy_choices(stages, self.candidates(stages.wiring))
        proposals = (
            (f"segments of {size:.0f} bytes", keep_segments(stages, chosen))
            for size, chosen in choices
        )
        return cheapest(self.name, stages, problem.budget_bytes, limit, report, proposals)


class _OfChains(_Checkpoints):
    citation: ClassVar[str] = _CHEN_PAPER

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs without two halves, and those whose forward half is no chain."""
        return why_unsuitable(problem.graph) or why_no_chain(problem.graph)


class _OfArticulations(_Checkpoints):
    def candidates(self, wiring: Wiring) -> Sequence[int]:
        """List the articulation ops."""
        return articulation_ops(wiring)


class ChenSqrt(_OfChains, _EveryRoot):
    """Every root-n-th op of a chain is a checkpoint."""

    name: ClassVar[str] = "chen-sqrt"


class ChenGreedy(_OfChains, _GreedyBytes):
    """Segments of about equal bytes of a chain."""

    name: ClassVar[str] = "chen-greedy"


class ApSqrt(_OfArticulations, _EveryRoot):
    """Every root-n-th articulation op is a checkpoint."""

    name: ClassVar[str] = "ap-sqrt"


class ApGreedy(_OfArticulations, _GreedyBytes):
    """Segments of about equal bytes that end at articulation ops."""

    name: ClassVar[str] = "ap-greedy"


class LinearizedSqrt(_EveryRoot):
    """Every root-n-th forward op is a checkpoint."""

    name: ClassVar[str] = "linearized-sqrt"


class LinearizedGreedy(_GreedyBytes):
    """Segments of about equal bytes, in the order of the graph."""

    name: ClassVar[str] = "linearized-greedy"
