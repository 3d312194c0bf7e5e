"""`tw-remat`: divide and conquer over a tree decomposition.

Kumar, Purohit, Svitkina, Vee, Wang: "Efficient Rematerialization for Deep Networks" (NeurIPS 2019),
Algorithm 1, Lemmas 1 and 3, section 4.3. To compute some nodes of a part of the graph, take the
bag whose removal leaves components of at most half the bags; for each of its nodes, in topological
order, have every component compute what the node needs, then compute the node and keep it; then
have the components compute what else is wanted. `TWRemat(k)` stops the recursion at fewer than k
bags and computes what is needed there in order: k = 1 saves most, a large k stores everything.
Without a k the solver tries many and takes the fastest schedule within the budget.

Guarantee (Theorem 5, k = 1, width w, n ops): memory O((Min + w Mmax) log n), length
O(n^log(w + 2)) times w; none on the time within a budget, so no bound is claimed,
but where every op runs once.
Complexity: the decomposition (`decomposition`), then linear in the length of the schedules;
separators and sub-schedules are memoised.

As in the paper the memory is that of liveness: a value goes after the last use of each copy. Ops
that are not needed for what is wanted are left out, and recomputations that nothing reads.
Limits: the order of first computations is the recursion's, not the graph's, so a schedule may use
less memory than any in the order of the graph, and the bounds of other solvers do not apply to it.
An op that is not replayable runs once, where it is first met; its outputs live until their last
use, which costs the memory that recomputing them would have saved. `order_after` is kept. A time
limit is looked at between schedules; the decomposition is not interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from remat_solvers.published.decompositions.decomposition import (
    Bag,
    Precedence,
    Tree,
    balanced_bag,
    tree_of,
    without_bag,
)
from remat_solvers.published.decompositions.recursion import Recursion, RecursionSolver

__all__ = ["TWRemat", "TreeRecursion"]


class TWRemat(RecursionSolver):
    """Algorithm 1 with the recursion stopped below `k` bags; without `k`, swept over it."""

    name: ClassVar[str] = "tw-remat"
    citation: ClassVar[str] = (
        "Ravi Kumar, Manish Purohit, Zoya Svitkina, Erik Vee, Joshua R. Wang. "
        "Efficient Rematerialization for Deep Networks. NeurIPS 2019."
    )

    def recursion(self, precedence: Precedence) -> TreeRecursion:
        """Decompose a graph into a tree of bags."""
        return TreeRecursion(precedence)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the graph: its separator in topological order, and what is left without it."""

    members: Bag
    bag_count: int
    separator: tuple[int, ...]
    parts: tuple[_Part, ...]


class TreeRecursion(Recursion):
    """Algorithm 1 over the tree decomposition of a graph."""

    def __init__(self, precedence: Precedence) -> None:
        self.tree = tree_of(precedence)
        super().__init__(precedence, self.tree.bags)

    @cached_property
    def _root(self) -> _Part:
        return _divided(self.tree)

    def order(self, k: int, most: int) -> list[int] | None:
        """Order computations of all ops; `None` if there are more than `most`."""
        self._start(k, most)
        return self._compute(self._root, frozenset({self.precedence.final}))

    def _compute(self, part: _Part, wanted: Bag) -> list[int] | None:
        key = (id(part), wanted)
        if key in self._memo:
            return self._memo[key]
        needed = self.precedence.ancestors(wanted, part.members)
        if part.bag_count < self._k:
            self._memo[key] = sorted(needed)
            return self._memo[key]
        separator = [node for node in part.separator if node in needed]
        inner = [(p, p.members) for p in part.parts]
        self._memo[key] = self._divide(separator, inner, wanted, self._compute)
        return self._memo[key]


def _divided(tree: Tree) -> _Part:
    """Cut a tree at its balanced separators, down to single bags."""
    middle = balanced_bag(tree)
    return _Part(
        members=_union(tree.bags),
        bag_count=len(tree.bags),
        separator=tuple(sorted(tree.bags[middle])),
        parts=tuple(_divided(part) for part in without_bag(tree, middle)),
    )


def _union(bags: Iterable[Bag]) -> Bag:
    return frozenset().union(*bags)
