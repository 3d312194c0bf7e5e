"""`ap-sqrt`: `chen-sqrt` on any graph, with articulation ops as the candidates.

All that backward needs of what lies before an articulation op can be computed again without what
lies after it. Where there are none, nothing is kept. Guarantee: none. Complexity: O(ops x values).
Limits: knows no costs, and has one schedule whatever the budget; needs a forward and a backward
half.
Source: Jain et al. 2020, section 6.1 and appendix on baselines (AP root n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from remat_solvers.core.wiring import Wiring
from remat_solvers.published.baselines.checkpoints import CHECKMATE_PAPER, EveryRoot
from remat_solvers.published.baselines.forward import articulation_ops

__all__ = ["ApSqrt"]


class ApSqrt(EveryRoot):
    """Every root-n-th articulation op is a checkpoint."""

    name: ClassVar[str] = "ap-sqrt"
    citation: ClassVar[str] = CHECKMATE_PAPER

    def candidates(self, wiring: Wiring) -> Sequence[int]:
        """List the articulation ops."""
        return articulation_ops(wiring)
