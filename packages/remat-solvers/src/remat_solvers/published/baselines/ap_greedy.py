"""`ap-greedy`: `chen-greedy` on any graph, with articulation ops as the candidates.

Where there are none, nothing is kept. Guarantee: of the segment sizes tried, the fastest that fits.
Complexity: at most 65 sizes, each O(ops x values). Limits: knows sizes, no times; needs a forward
and a backward half.
Source: Jain et al. 2020, section 6.1 and appendix on baselines (AP greedy).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from remat_solvers.core.wiring import Wiring
from remat_solvers.published.baselines.checkpoints import CHECKMATE_PAPER, GreedyBytes
from remat_solvers.published.baselines.forward import articulation_ops

__all__ = ["ApGreedy"]


class ApGreedy(GreedyBytes):
    """Segments of about equal bytes that end at articulation ops."""

    name: ClassVar[str] = "ap-greedy"
    citation: ClassVar[str] = CHECKMATE_PAPER

    def candidates(self, wiring: Wiring) -> Sequence[int]:
        """List the articulation ops."""
        return articulation_ops(wiring)
