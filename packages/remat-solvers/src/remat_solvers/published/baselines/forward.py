"""The forward half of a graph as the baselines see it: a chain, its articulation ops, its turns.

Articulation ops are those without which the undirected graph of forward ops falls into more pieces
(by networkx; linear time). Edges are values; resident ones make no edge.
"""

from __future__ import annotations

import networkx as nx

from remat_graph import Graph
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.checkmate.stages import Stages

__all__ = ["articulation_ops", "turns", "why_no_chain", "why_unsuitable"]

_MOST_OPS = 8000


def why_unsuitable(graph: Graph, most_ops: int = _MOST_OPS) -> str | None:
    """Say why a graph has no two halves to recompute between, or is too large, or `None`."""
    if not graph.ops:
        return "the graph has no ops"
    if graph.boundary_index in (0, len(graph.ops)):
        return "the graph has no forward or no backward half; its rule is about the two"
    if len(graph.ops) > most_ops:
        return f"the graph has {len(graph.ops):,} ops, more than {most_ops:,}; use 'refine'"
    return None


def why_no_chain(graph: Graph) -> str | None:
    """Say why the forward ops are no chain, or `None`."""
    for i, op in enumerate(graph.ops[: graph.boundary_index]):
        inputs = [v for v in op.inputs if v not in graph.resident]
        foreign = [v for v in inputs if graph.producer[v] != i - 1]
        if foreign or (i > 0 and not inputs):
            what = f"reads {foreign[0]!r}, not made by" if foreign else "reads nothing made by"
            return (
                f"it is for chains, and forward op {op.name!r} {what} the op right before it; "
                f"use an 'ap-' or 'linearized-' solver"
            )
    return None


def articulation_ops(wiring: Wiring) -> list[int]:
    """List the articulation ops of the forward half, in order."""
    near: nx.Graph[int] = nx.Graph()
    for op in range(wiring.graph.boundary_index):
        near.add_edges_from((wiring.producer_list[v], op) for v in wiring.inputs[op])
    return sorted(nx.articulation_points(near))


def turns(stages: Stages) -> list[int]:
    """Give for each backward op the forward op whose turn it is, never a later one than before.

    That is its twin; an op without one belongs to the turn before it. Where no op has a twin,
    it is the last forward op of which it reads something.
    """
    wiring = stages.wiring
    graph = wiring.graph
    since = graph.boundary_index
    twins = any(op.twin is not None for op in graph.ops)
    now = since - 1
    turns_of = []
    for i, op in enumerate(graph.ops[since:], since):
        producers = [wiring.producer_list[v] for v in wiring.inputs[i]]
        forward = [producer for producer in producers if producer < since]
        if op.twin is not None:
            now = min(now, graph.op_index[op.twin])
        elif not twins and forward:
            now = min(now, max(forward))
        turns_of.append(now)
    return turns_of
