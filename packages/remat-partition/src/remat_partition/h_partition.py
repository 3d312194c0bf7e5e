"""H-Partition: blocks of bounded size with little to pass between them, at several levels.

HiRemate, section 3.1 and appendix A. One level: candidate groups from immediate dominators, merged
greedily by equation (1) (see `dominators`, `merging`); then every group is a node, and again, until
at most `max_top_ops` nodes are left, the members of the root.

A level has up to three rounds, each on the quotient by the one before; it ends where its blocks are
half full on average. First groups with one way out, then those with one way in, which are the
paper's, then neighbours in the order. The paper has the second alone. But a forward graph has many
ways in and one way out, the loss: a mask that every layer reads, or an encoder that every decoder
layer reads, leaves the joins without a dominator close by, and levels that hardly shrink (16 of
them for a Transformer 36-36). What was measured is in `docs/decisions/0008`.

Guarantee: every block is convex and every quotient acyclic, soft dependencies included; every block
but the root has 2 to `max_block_ops` members, the root at most `max_top_ops`, for every graph. The
answer depends neither on names nor on chance. Neighbours alone leave at most 2 * n / (b + 1) + 1 of
n nodes, with b for `max_block_ops`, so there are O(log n) levels, which together cost a constant
times the first.

Time of a level: dominators are looked at within c = min(b, 64) members, and groups made by them are
no larger; larger blocks are merged from those as neighbours. That is O(n * c) scores and, with d
dependencies of a node, O(n * c * d * log n) for walks and heap; then O(n) scores for neighbours. A
score takes time linear in what its groups read and make: O(c * d) before neighbours, with d at most
4 * c in a group (see `dominators`), and O(b * d) for neighbours.

Limits: the order of the graph decides what neighbours are, and greedy merging promises no least
cut. Forks and joins just short of 4 * c wide take four times as long as other graphs of their size.
"""

from __future__ import annotations

from typing import ClassVar

from remat_graph import Graph, Hierarchy
from remat_partition.dominators import dominated_groups
from remat_partition.merging import merge
from remat_partition.options import as_alpha, as_bound
from remat_partition.quotient import Quotient
from remat_partition.tree import Member, build

__all__ = ["MAX_BLOCK_OPS", "MAX_TOP_OPS", "HPartition"]

# Measured on models of HiRemate's table 3: docs/decisions/0011.
MAX_TOP_OPS = 20
MAX_BLOCK_OPS = 20

# The most members that rounds by dominators look at, and put together.
_WIDEST = 64


class HPartition:
    """The partitioner of HiRemate, with bounds that hold for every graph.

    Raises:
        InvalidOption: if a bound is no int or under 2, or `alpha` negative or not finite.
    """

    name: ClassVar[str] = "h-partition"

    def __init__(
        self,
        *,
        max_top_ops: int = MAX_TOP_OPS,
        max_block_ops: int = MAX_BLOCK_OPS,
        alpha: float = 0.5,
    ) -> None:
        self.max_top_ops = as_bound("max_top_ops", max_top_ops)
        self.max_block_ops = as_bound("max_block_ops", max_block_ops)
        self.alpha = as_alpha(alpha)

    def partition(self, graph: Graph) -> Hierarchy:
        """Cut a graph; any graph can be cut."""
        return build(graph, self.cut(Quotient.of(graph)))

    def cut(self, quotient: Quotient) -> list[Member]:
        """Cut a quotient: the members of the root, with its nodes for ops."""
        members: list[Member] = list(range(len(quotient)))
        while len(quotient) > self.max_top_ops:
            quotient = quotient.fresh()
            groups = self.level(quotient)
            members = [
                members[group[0]] if len(group) == 1 else [members[node] for node in group]
                for group in groups
            ]
            quotient = quotient.contract(groups)
        return members

    def level(self, quotient: Quotient) -> list[list[int]]:
        """Group the nodes of one level: groups in topological order, their nodes ascending."""
        start = len(quotient)
        groups = [[node] for node in range(start)]
        near = min(self.max_block_ops, _WIDEST)
        rounds = ((_one_way_out, near), (_one_way_in, near), (_neighbours, self.max_block_ops))
        for candidates, bound in rounds:
            merged = merge(
                quotient,
                candidates(quotient, bound),
                bound=bound,
                most=self.max_top_ops,
                alpha=self.alpha,
            )
            order = quotient.order(merged)
            quotient = quotient.contract(order)
            groups = [sorted(node for part in nodes for node in groups[part]) for nodes in order]
            half_full = len(groups) * (self.max_block_ops + 1) <= 2 * start
            if half_full or len(groups) <= self.max_top_ops:
                break
        return groups


def _one_way_out(quotient: Quotient, bound: int) -> list[list[int]]:
    return dominated_groups(quotient, bound, leaving=True)


def _one_way_in(quotient: Quotient, bound: int) -> list[list[int]]:
    return dominated_groups(quotient, bound)


def _neighbours(quotient: Quotient, bound: int) -> list[list[int]]:
    members = quotient.members
    return [[i, i + 1] for i in range(len(quotient) - 1) if members[i] + members[i + 1] <= bound]
