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
times the first: O(n * b) scores and O(n * b * log n) for the heap.

Limits: the order of the graph decides what neighbours are, and greedy merging promises no least
cut. The dominators of rustworkx take time quadratic in the length of a chain each of whose nodes a
last one reads: 2 s of 13 for an unrolled RNN of 10^5 ops.
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
            groups = self._level(quotient)
            members = [
                members[group[0]] if len(group) == 1 else [members[node] for node in group]
                for group in groups
            ]
            quotient = quotient.contract(groups)
        return members

    def _level(self, quotient: Quotient) -> list[list[int]]:
        """Group the nodes of one level: groups in topological order, their nodes ascending."""
        start = len(quotient)
        groups = [[node] for node in range(start)]
        for candidates in (_one_way_out, _one_way_in, _neighbours):
            merged = merge(
                quotient,
                candidates(quotient, self.max_block_ops),
                bound=self.max_block_ops,
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
