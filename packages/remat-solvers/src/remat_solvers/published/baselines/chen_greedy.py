"""`chen-greedy`: on a chain, end a segment when it has come to b bytes, b swept.

Guarantee: of the segment sizes tried, the fastest that fits. Complexity: at most 65 sizes, each
O(ops x values). Limits: chains only; knows sizes, no times.
Source: Chen et al. 2016, algorithm 3; a baseline in Jain et al. 2020, section 3 and table 1.
"""

from __future__ import annotations

from typing import ClassVar

from remat_solvers.published.baselines.checkpoints import CHEN_PAPER, GreedyBytes

__all__ = ["ChenGreedy"]


class ChenGreedy(GreedyBytes):
    """Segments of about equal bytes of a chain."""

    name: ClassVar[str] = "chen-greedy"
    citation: ClassVar[str] = CHEN_PAPER
    chains_only: ClassVar[bool] = True
