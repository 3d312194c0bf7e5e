"""How many bytes cross between groups of forward ops, and the groups that METIS makes.

A value counts once if an op of another group than its maker's reads it in the forward half.
Resident values do not count. METIS balances the parts of an undirected graph in which an edge
weighs what one op reads of another; it knows nothing of directions, so its parts may depend on one
another in circles, and then are no blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
import pymetis

from remat_graph import Block, Graph, Hierarchy

__all__ = ["Cut", "lowest_groups", "measure_cut", "metis_groups", "top_groups"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Groups, ops in the largest, bytes that cross, and groups that depend on one another."""

    groups: int
    largest: int
    size_bytes: int
    circular: int


def top_groups(hierarchy: Hierarchy) -> list[int]:
    """Give each forward op, in the order of the graph, the number of its member of the root."""
    members = hierarchy.root.members
    return _numbered(hierarchy, (_ops(member) for member in members))


def lowest_groups(hierarchy: Hierarchy) -> list[int]:
    """Give each forward op the number of its lowest block, or one of its own beside blocks."""
    return _numbered(hierarchy, _lowest(hierarchy.root))


def _ops(member: str | Block) -> list[str]:
    return [member] if isinstance(member, str) else list(member.op_names())


def _lowest(block: Block) -> Iterator[list[str]]:
    if any(isinstance(member, Block) for member in block.members):
        for member in block.members:
            if isinstance(member, Block):
                yield from _lowest(member)
            else:
                yield [member]
    else:
        yield list(block.op_names())


def _numbered(hierarchy: Hierarchy, groups: Iterator[list[str]]) -> list[int]:
    number = {name: i for i, names in enumerate(groups) for name in names}
    graph = hierarchy.graph
    return [number[op.name] for op in graph.ops[: graph.boundary_index]]


def measure_cut(graph: Graph, groups: Sequence[int]) -> Cut:
    """Measure groups, given by a number for each forward op."""
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(groups)
    crossing: dict[str, int] = {}
    for value, maker, reader in _flows(graph):
        if groups[maker] != groups[reader]:
            quotient.add_edge(groups[maker], groups[reader])
            crossing[value] = graph.value_by_name[value].size_bytes
    for i, op in enumerate(graph.ops[: graph.boundary_index]):
        for earlier in op.order_after:
            if groups[graph.op_index[earlier]] != groups[i]:
                quotient.add_edge(groups[graph.op_index[earlier]], groups[i])
    circles = [part for part in nx.strongly_connected_components(quotient) if len(part) > 1]
    return Cut(
        groups=len(set(groups)),
        largest=max(Counter(groups).values(), default=0),
        size_bytes=sum(crossing.values()),
        circular=sum(map(len, circles)),
    )


def metis_groups(graph: Graph, parts: int) -> list[int]:
    """Cut the forward ops into so many parts of about the same number of ops."""
    weights: list[dict[int, int]] = [{} for _ in graph.ops[: graph.boundary_index]]
    for value, maker, reader in _flows(graph):
        size = graph.value_by_name[value].size_bytes
        for one, other in ((maker, reader), (reader, maker)):
            weights[one][other] = weights[one].get(other, 0) + size
    unit = max((size for row in weights for size in row.values()), default=0) // 100_000 + 1
    starts, ends, sizes = [0], [], []
    for row in weights:
        for other, size in row.items():
            ends.append(other)
            sizes.append(1 + size // unit)
        starts.append(len(ends))
    adjacency = pymetis.CSRAdjacency(starts, ends)
    found = pymetis.part_graph(parts, adjacency, eweights=sizes, recursive=True)
    return list(found.vertex_part)


def _flows(graph: Graph) -> Iterator[tuple[str, int, int]]:
    """Yield each value with the positions of its maker and of one reader, in the forward half."""
    for i, op in enumerate(graph.ops[: graph.boundary_index]):
        for value in op.inputs:
            if value in graph.producer:
                yield value, graph.producer[value], i
