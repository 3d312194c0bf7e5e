"""Minimum cuts of small networks, in plain Python: scipy takes a fifth of a millisecond to begin.

Shortest augmenting paths, Edmonds and Karp (1972). Of all minimum cuts the one with the fewest
nodes on the side of the source, which is the same for every maximum flow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["FEW_ARCS", "least_cut"]

FEW_ARCS = 250  # up to which this is faster than scipy


def least_cut(
    arcs: Iterable[tuple[int, int, int]], source: int, sink: int
) -> tuple[int, list[int]]:
    """Give the value of a minimum cut, and the nodes on the side of the source.

    An arc is its tail, its head and its capacity. A node is any number.
    """
    heads: list[int] = []
    left: list[int] = []
    leaving: dict[int, list[int]] = {source: [], sink: []}
    for tail, head, capacity in arcs:  # an arc and, behind it, the one that takes its flow back
        leaving.setdefault(tail, []).append(len(heads))
        leaving.setdefault(head, []).append(len(heads) + 1)
        heads += (head, tail)
        left += (capacity, 0)
    value = 0
    while True:
        reached_by = _reached(leaving, heads, left, source, sink)
        if sink not in reached_by:
            return value, list(reached_by)
        path = []
        node = sink
        while node != source:
            path.append(reached_by[node])
            node = heads[path[-1] ^ 1]
        more = min(left[arc] for arc in path)
        for arc in path:
            left[arc] -= more
            left[arc ^ 1] += more
        value += more


def _reached(
    leaving: Mapping[int, list[int]], heads: list[int], left: list[int], source: int, sink: int
) -> dict[int, int]:
    """Give for each node that can be reached the last arc of a shortest way, up to the sink."""
    reached_by = {source: -1}
    pending = [source]
    for node in pending:
        for arc in leaving[node]:
            head = heads[arc]
            if left[arc] > 0 and head not in reached_by:
                reached_by[head] = arc
                if head == sink:
                    return reached_by
                pending.append(head)
    return reached_by
