"""The fastest schedule within a budget, first computations in order, by Dijkstra over states."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from remat_graph import Graph, Op

State = tuple[int, int]


def fastest(graph: Graph, budget_bytes: int) -> float | None:
    """Return the least time of a schedule that computes every op, or `None` if nothing fits.

    A state is the number of ops computed so far and the set of values alive (as bits).
    """
    names = [v for op in graph.ops for v in op.outputs]
    bit = {v: 1 << i for i, v in enumerate(names)}
    size = {v: graph.value_by_name[v].size_bytes for v in names}
    weight = [sum(size[v] for v in names if s & bit[v]) for s in range(1 << len(names))]
    reads = [sum(bit[v] for v in op.inputs if v in bit) for op in graph.ops]
    makes = [sum(bit[v] for v in op.outputs) for op in graph.ops]
    made = [sum(size[v] for v in op.outputs) + op.workspace_bytes for op in graph.ops]
    wanted = sum(bit[v] for v in graph.results if v in bit)
    start: State = (0, 0)
    distance: dict[State, float] = {start: 0.0}
    tie = itertools.count()
    heap = [(0.0, next(tie), start)]
    while heap:
        time, _, state = heapq.heappop(heap)
        if time > distance[state]:
            continue
        done, alive = state
        if done == len(graph.ops) and alive & wanted == wanted:
            return time
        following: list[tuple[State, float]] = [
            ((done, alive & ~bit[v]), 0.0) for v in names if alive & bit[v]
        ]
        for i, op in enumerate(graph.ops[: done + 1]):
            first = i == done
            if not (first or op.replayable) or reads[i] & alive != reads[i]:
                continue
            for over in overwritten(op):
                spared = sum(size[v] for v in over)
                if weight[alive] + made[i] - spared <= budget_bytes:
                    left = alive & ~sum(bit[v] for v in over)
                    following.append(((done + first, left | makes[i]), op.time))
        for new, cost in following:
            if time + cost < distance.get(new, float("inf")):
                distance[new] = time + cost
                heapq.heappush(heap, (time + cost, next(tie), new))
    return None


def overwritten(op: Op) -> list[tuple[str, ...]]:
    """List what an op may overwrite: any part of what it can."""
    can = [read for read, _ in op.overwrites]
    return [part for n in range(len(can) + 1) for part in itertools.combinations(can, n)]


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
