"""`chen-sqrt`: on a chain, keep every k-th forward op, k the root of their number.

Guarantee: on a chain of n unit ops, O(root n) memory for at most one more forward; whether that is
within the budget is not up to it. Complexity: O(ops x values). Limits: chains only; knows no costs.
Source: Chen et al. 2016, section 4.1; a baseline in Jain et al. 2020, section 3 and table 1.
"""

from __future__ import annotations

from typing import ClassVar

from remat_solvers.published.baselines.checkpoints import CHEN_PAPER, EveryRoot

__all__ = ["ChenSqrt"]


class ChenSqrt(EveryRoot):
    """Every root-n-th op of a chain is a checkpoint."""

    name: ClassVar[str] = "chen-sqrt"
    citation: ClassVar[str] = CHEN_PAPER
    chains_only: ClassVar[bool] = True
