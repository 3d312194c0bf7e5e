"""`pw-remat`: divide and conquer over a path decomposition with a spine.

Kumar, Purohit, Svitkina, Vee, Wang: "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
section 5. The graph gets a spine, a path through all ops in execution order, and is decomposed into
a path of bags. With the spine, the last node of the bags grows towards the bag of the final node
from both sides. So the bags of a part of the graph that ends at some node lie around those of the
rest, and a part needed for an early node has fewer bags, and narrower ones.

The paper sketches the algorithm and leaves the details to its supplement. This is a construction
from the sketch: as Algorithm 1 (`tw_remat`), but every recursive call first restricts the path to
what is needed for what is wanted, merges bags by Lemma 1, and divides what is left in the middle,
into a left and a right side.

Guarantee: none. The polylogarithmic bounds of the paper are for its own version and for the best
path decomposition; here the decomposition is greedy, and no bound is proved,
but where every op runs once.
Complexity: that of the schedules' length times the width; sub-schedules are memoised.
Limits: those of `tw_remat`, on the order of first computations and on what is not replayable. Wide
graphs (attention with many branches) have wide paths, and then schedules are long.
"""

from __future__ import annotations

from typing import ClassVar

from remat_solvers.published.decompositions.decomposition import (
    Bag,
    Precedence,
    path_of,
    shrink_path,
)
from remat_solvers.published.decompositions.recursion import Recursion, RecursionSolver

__all__ = ["PWRemat", "PathRecursion"]

_Path = tuple[Bag, ...]


class PWRemat(RecursionSolver):
    """The recursion on a path, stopped below `k` bags; without `k`, swept over it."""

    name: ClassVar[str] = "pw-remat"
    citation: ClassVar[str] = (
        "Ravi Kumar, Manish Purohit, Zoya Svitkina, Erik Vee, Joshua R. Wang. "
        "Efficient Rematerialization for Deep Networks. NeurIPS 2019. Section 5."
    )

    def recursion(self, precedence: Precedence) -> PathRecursion:
        """Decompose a graph into a path of bags."""
        return PathRecursion(precedence)


class PathRecursion(Recursion):
    """The division of a path of bags into its left and right sides."""

    def __init__(self, precedence: Precedence) -> None:
        self.path = path_of(precedence)
        super().__init__(precedence, self.path)

    def order(self, k: int, most: int) -> list[int] | None:
        """Order computations of all ops; `None` if there are more than `most`."""
        self._start(k, most)
        return self._compute(self.path, frozenset({self.precedence.final}))

    def _compute(self, path: _Path, wanted: Bag) -> list[int] | None:
        needed = self.precedence.ancestors(wanted, frozenset().union(*path))
        key = (needed, wanted)
        if key in self._memo:
            return self._memo[key]
        path = shrink_path([bag & needed for bag in path])
        if len(path) < max(self._k, 2):
            self._memo[key] = sorted(needed)
            return self._memo[key]
        middle = len(path) // 2
        separator = path[middle]
        sides = [
            tuple(bag - separator for bag in side) for side in (path[:middle], path[middle + 1 :])
        ]
        parts = [(side, frozenset[int]().union(*side)) for side in sides]
        self._memo[key] = self._divide(sorted(separator), parts, wanted, self._compute)
        return self._memo[key]
