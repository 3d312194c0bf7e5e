"""The chain that Rockmate sees: the forward graph cut wherever all that comes later needs one op.

HiRemate, C.1 and C.1.3. An op is a cut if what depends on it and what it depends on hang together
through it alone: an articulation op of the undirected graph whose incoming and outgoing
dependencies lie in different biconnected components. Resident values make no dependency, so the
second input of an encoder-decoder model leaves the encoder a chain. Where several chains meet or
part, one of them is the chain, that with most cuts, and the others go whole into the block that
they meet. What hangs together with nothing in the chain, such as counters of batches, is in the
last block.

Only what a gradient may go back through makes the chain. Left out are soft dependencies, such as
the order of random numbers, which every dropout would hang together by, and those on what makes no
gradient (C.1.3), such as a mask that every layer reads. An op makes none if all that it reads is
resident or made by such ops, and it has no twin, or reads nothing resident: gradients are those of
resident values, and captured twins are now and then the op before the right one. In a graph without
twins none are known, and all count. What is left out still keeps its order: an op that makes
no gradient is in the block of the first that reads it, and blocks are merged where a soft
dependency runs against their order.

A block of one op is that op. Blocks are as large as the graph makes them, which for an
encoder-decoder model is most of it: there are no bounds, and so no options. Linear time.

Guarantee: between consecutive members of the root passes the value of one op, besides values that
make no gradient, and no cut can be added to those made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, TypeAlias

import rustworkx as rx

from remat_graph import Graph, Hierarchy
from remat_partition.quotient import Quotient
from remat_partition.tree import Member, build

__all__ = ["Sequential"]

# For each node, the nodes that it depends on.
_Before: TypeAlias = Sequence[Sequence[int]]


class Sequential:
    """One level: a chain of blocks, each of which passes one op's values on to the next."""

    name: ClassVar[str] = "sequence"

    def partition(self, graph: Graph) -> Hierarchy:
        """Cut a graph at its articulation ops; any graph can be cut."""
        before = _passing(graph)
        segments = _segments(before, _longest_chain(before), Quotient.of(graph).before)
        if len(segments) == 1:
            return build(graph, segments[0])
        members: list[Member] = [ops[0] if len(ops) == 1 else ops for ops in segments]
        return build(graph, members)


def _passing(graph: Graph) -> _Before:
    """List of which ops each forward op reads what may have a gradient."""
    without = _without_gradient(graph)
    producer = graph.producer
    return [
        ()
        if node in without
        else sorted({producer[v] for v in op.inputs if v in producer} - without)
        for node, op in enumerate(graph.ops[: graph.boundary_index])
    ]


def _without_gradient(graph: Graph) -> set[int]:
    """Find the forward ops that make no gradient; none where no op has a twin."""
    twins = {op.twin for op in graph.ops if op.twin is not None}
    without: set[int] = set()
    if not twins:
        return without
    for node, op in enumerate(graph.ops[: graph.boundary_index]):
        inputs = [v for v in op.inputs if v in graph.producer]
        starts = op.name in twins and (len(inputs) < len(op.inputs) or not graph.resident)
        if not starts and all(graph.producer[v] in without for v in inputs):
            without.add(node)
    return without


def _longest_chain(before: _Before) -> list[int]:
    """Find the cuts of a chain with as many as there are, in order; of equal ones, the earliest."""
    cuts = _cuts(before)
    piece = _pieces(before, cuts)
    # A tree of pieces: each cut leads from the piece that it ends to the piece behind it.
    entering: dict[int, list[int]] = {}
    for node in sorted(cuts):
        entering.setdefault(piece[_behind(before, node)], []).append(node)
    tree: rx.PyDiGraph[None, None] = rx.PyDiGraph()
    tree.add_nodes_from([None] * len(piece))
    tree.add_edges_from_no_data([(piece[n], piece[_behind(before, n)]) for n in sorted(cuts)])
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


def _cuts(before: _Before) -> set[int]:
    edges = [(source, node) for node, sources in enumerate(before) for source in sources]
    undirected: rx.PyGraph[None, None] = rx.PyGraph()
    undirected.add_nodes_from([None] * len(before))
    undirected.add_edges_from_no_data(edges)
    component = dict(rx.biconnected_components(undirected))
    coming: list[set[int]] = [set() for _ in before]
    leaving: list[set[int]] = [set() for _ in before]
    for source, node in edges:
        ends = (source, node) if (source, node) in component else (node, source)
        leaving[source].add(component[ends])
        coming[node].add(component[ends])
    return {n for n in range(len(before)) if leaving[n] and leaving[n].isdisjoint(coming[n])}


def _pieces(before: _Before, cuts: Collection[int]) -> list[int]:
    """Say in which piece each node is once the graph is cut behind some nodes, and what is behind.

    The second half of the list is for what is behind each node, see `_behind`. A piece goes by the
    least number in it.
    """
    halves: rx.PyGraph[None, None] = rx.PyGraph()
    halves.add_nodes_from([None] * (2 * len(before)))
    halves.add_edges_from_no_data(
        [
            (_behind(before, source) if source in cuts else source, node)
            for node, sources in enumerate(before)
            for source in sources
        ]
    )
    piece = [0] * (2 * len(before))
    for nodes in rx.connected_components(halves):
        least = min(nodes)
        for node in nodes:
            piece[node] = least
    return piece


def _behind(before: _Before, node: int) -> int:
    return node + len(before)


def _segments(before: _Before, chain: Sequence[int], order: _Before) -> list[list[int]]:
    """List the nodes of each block of a chain, where `order` has all dependencies.

    What hangs on none is in the block of what first needs it, or in the last.
    """
    piece = _pieces(before, set(chain))
    last = len(chain)
    number = {piece[_behind(before, node)]: i for i, node in enumerate(chain, start=1)}
    if chain:
        number[piece[chain[0]]] = 0
    place = [number.get(piece[node], -1) for node in range(len(before))]
    needed: dict[int, int] = {}
    for node in reversed(range(len(before))):
        if place[node] < 0:
            place[node] = needed.get(node, last)
        for source in order[node]:
            needed[source] = min(place[node], needed.get(source, last))
    ends = list(range(last + 1))
    for source, needs in needed.items():
        ends[needs] = max(ends[needs], place[source])
    segments: list[list[int]] = [[] for _ in ends]
    for node in range(len(before)):
        segments[place[node]].append(node)
    return _merged(segments, ends)


def _merged(segments: Sequence[Sequence[int]], ends: Sequence[int]) -> list[list[int]]:
    """Merge each block with all up to the last that it needs."""
    merged: list[list[int]] = []
    end = -1
    for i, nodes in enumerate(segments):
        if i > end:
            merged.append([])
        merged[-1] += nodes
        end = max(end, ends[i])
    return [sorted(nodes) for nodes in merged]
