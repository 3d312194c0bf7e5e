"""`linearized-greedy`: `chen-greedy` on any graph, as if its order were a chain.

What a segment reads of another one besides its checkpoint is computed again with it.
Guarantee: of the segment sizes tried, the fastest that fits. Complexity: at most 65 sizes, each
O(ops x values). Limits: knows sizes, no times; needs a forward and a backward half.
Source: Jain et al. 2020, section 6.1 and appendix on baselines (linearized greedy).
"""

from __future__ import annotations

from typing import ClassVar

from remat_solvers.published.baselines.checkpoints import CHECKMATE_PAPER, GreedyBytes

__all__ = ["LinearizedGreedy"]


class LinearizedGreedy(GreedyBytes):
    """Segments of about equal bytes, in the order of the graph."""

    name: ClassVar[str] = "linearized-greedy"
    citation: ClassVar[str] = CHECKMATE_PAPER
