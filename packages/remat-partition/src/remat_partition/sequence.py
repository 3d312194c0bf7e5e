"""The chain that Rockmate sees: the forward graph cut wherever all that comes later needs one op.

HiRemate, C.1 and C.1.3. An op is a cut if what depends on it and what it depends on hang together
through it alone: an articulation op of the undirected graph whose incoming and outgoing
dependencies lie in different biconnected components. Resident values make no dependency, so the
second input of an encoder-decoder model leaves the encoder a chain. Where several chains meet or
part, one of them is the chain, that with most cuts, and the others go whole into the block that
they meet. What hangs together with nothing in the chain is in the last block.

A block of one op is that op. Blocks are as large as the graph makes them, which for an
encoder-decoder model is most of it: there are no bounds, and so no options. Linear time.

Guarantee: between consecutive members of the root passes the value of one op, and no cut can be
added to those made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import rustworkx as rx

from remat_graph import Graph, Hierarchy
from remat_partition.quotient import Quotient
from remat_partition.tree import Member, build

__all__ = ["Sequential"]


class Sequential:
    """One level: a chain of blocks, each of which passes one op's values on to the next."""

    name: ClassVar[str] = "sequence"

    def partition(self, graph: Graph) -> Hierarchy:
        """Cut a graph at its articulation ops; any graph can be cut."""
        quotient = Quotient.of(graph)
        segments = _segments(quotient, _longest_chain(quotient))
        if len(segments) == 1:
            return build(graph, segments[0])
        members: list[Member] = [ops[0] if len(ops) == 1 else ops for ops in segments]
        return build(graph, members)


def _longest_chain(quotient: Quotient) -> list[int]:
    """Find the cuts of a chain with as many as there are, in order; of equal ones, the earliest."""
    cuts = _cuts(quotient)
    piece = _pieces(quotient, cuts)
    # A tree of pieces: each cut leads from the piece that it ends to the piece behind it.
    entering: dict[int, list[int]] = {}
    for node in sorted(cuts):
        entering.setdefault(piece[_behind(quotient, node)], []).append(node)
    tree: rx.PyDiGraph[None, None] = rx.PyDiGraph()
    tree.add_nodes_from([None] * len(piece))
    tree.add_edges_from_no_data([(piece[n], piece[_behind(quotient, n)]) for n in sorted(cuts)])
    length = [0] * len(piece)
    last: list[int | None] = [None] * len(piece)
    for own in rx.topological_sort(tree):
        for node in entering.get(own, ()):
            if length[piece[node]] + 1 > length[own]:
                length[own] = length[piece[node]] + 1
                last[own] = node
    chain: list[int] = []
    at = last[length.index(max(length))] if cuts else None
    while at is not None:
        chain.append(at)
        at = last[piece[at]]
    return chain[::-1]


def _cuts(quotient: Quotient) -> set[int]:
    edges = [(source, node) for node, sources in enumerate(quotient.before) for source in sources]
    undirected: rx.PyGraph[None, None] = rx.PyGraph()
    undirected.add_nodes_from([None] * len(quotient))
    undirected.add_edges_from_no_data(edges)
    component = dict(rx.biconnected_components(undirected))
    coming: list[set[int]] = [set() for _ in quotient.before]
    leaving: list[set[int]] = [set() for _ in quotient.before]
    for source, node in edges:
        ends = (source, node) if (source, node) in component else (node, source)
        leaving[source].add(component[ends])
        coming[node].add(component[ends])
    return {n for n in range(len(quotient)) if leaving[n] and leaving[n].isdisjoint(coming[n])}


def _pieces(quotient: Quotient, cuts: Collection[int]) -> list[int]:
    """Say in which piece each node is once the graph is cut behind some nodes, and what is behind.

    The second half of the list is for what is behind each node, see `_behind`. A piece goes by the
    least number in it.
    """
    halves: rx.PyGraph[None, None] = rx.PyGraph()
    halves.add_nodes_from([None] * (2 * len(quotient)))
    halves.add_edges_from_no_data(
        [
            (_behind(quotient, source) if source in cuts else source, node)
            for node, sources in enumerate(quotient.before)
            for source in sources
        ]
    )
    piece = [0] * (2 * len(quotient))
    for nodes in rx.connected_components(halves):
        least = min(nodes)
        for node in nodes:
            piece[node] = least
    return piece


def _behind(quotient: Quotient, node: int) -> int:
    return node + len(quotient)


def _segments(quotient: Quotient, chain: Sequence[int]) -> list[list[int]]:
    """List the nodes of each block of a chain; what hangs on none is in the last."""
    piece = _pieces(quotient, set(chain))
    number = {piece[_behind(quotient, node)]: i for i, node in enumerate(chain, start=1)}
    if chain:
        number[piece[chain[0]]] = 0
    segments: list[list[int]] = [[] for _ in range(len(chain) + 1)]
    for node in range(len(quotient)):
        segments[number.get(piece[node], len(chain))].append(node)
    return segments
