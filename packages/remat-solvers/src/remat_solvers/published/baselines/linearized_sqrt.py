"""`linearized-sqrt`: `chen-sqrt` on any graph, as if its order were a chain.

What a segment reads of another one besides its checkpoint is computed again with it.
Guarantee: none. Complexity: O(ops x values). Limits: knows no costs, and has one schedule whatever
the budget; needs a forward and a backward half.
Source: Jain et al. 2020, section 6.1 and appendix on baselines (linearized root n).
"""

from __future__ import annotations

from typing import ClassVar

from remat_solvers.published.baselines.checkpoints import CHECKMATE_PAPER, EveryRoot

__all__ = ["LinearizedSqrt"]


class LinearizedSqrt(EveryRoot):
    """Every root-n-th forward op is a checkpoint."""

    name: ClassVar[str] = "linearized-sqrt"
    citation: ClassVar[str] = CHECKMATE_PAPER
