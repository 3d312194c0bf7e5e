"""Networks with a block for each layer, or for some layers in a row."""

from __future__ import annotations

from itertools import groupby

from remat_graph import Block, Graph, Hierarchy
from solver_cases.feed_forward import feed_forward
from solver_cases.synthetic import gpt2


def feed_forward_in_blocks(depth: int, size: int) -> Hierarchy:
    """A feed-forward network in blocks of `size` layers, the loss by itself."""
    graph = feed_forward(depth)
    names = _forward(graph)
    parts = [tuple(names[i : i + 2 * size]) for i in range(0, 2 * depth, 2 * size)]
    blocks = [Block(f"block{i}", part) for i, part in enumerate(parts)]
    return Hierarchy(graph, Block("root", (*blocks, names[-1])))


def transformer_in_blocks(layers: int) -> Hierarchy:
    """A transformer with a block for each layer, named as its ops are: h0, h1, ..."""
    graph = gpt2(layers)
    blocks = {f"h{i}" for i in range(layers)}
    members: list[str | Block] = []
    for prefix, part in groupby(_forward(graph), key=lambda name: name.split(".")[0]):
        names = tuple(part)
        members += [Block(prefix, names)] if prefix in blocks else names
    return Hierarchy(graph, Block("root", tuple(members)))


def _forward(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops[: graph.boundary_index]]
