"""The smallest budget of a graph by brute force."""

from __future__ import annotations

from collections.abc import Callable

from remat_graph import Graph
from remat_solvers.testing.brute_force import fastest

__all__ = ["smallest"]


def smallest(graph: Graph, search: Callable[[Graph, int], float | None] = fastest) -> int:
    """Return the least budget for which a schedule exists, by halving."""
    low, high = (
        0,
        sum(v.size_bytes for v in graph.values) * 2 + max(op.workspace_bytes for op in graph.ops),
    )
    while low < high:
        middle = (low + high) // 2
        if search(graph, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low
