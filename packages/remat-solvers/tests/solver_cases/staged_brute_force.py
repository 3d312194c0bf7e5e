"""The fastest schedule in Checkmate's stages, by Dijkstra over states: once each, in order."""

from __future__ import annotations

import heapq
import itertools

from remat_graph import Graph
from remat_solvers.testing.brute_force import overwritten

State = tuple[int, int, int]


def fastest_staged(graph: Graph, budget_bytes: int) -> float | None:
    """Return the least time of a staged schedule, or `None` if nothing fits.

    A state is the stage, the first op that may still be run in it, and the values alive (as bits).
    """
    names = [v for op in graph.ops for v in op.outputs]
    bit = {v: 1 << i for i, v in enumerate(names)}
    size = [graph.value_by_name[v].size_bytes for v in names]
    reads = [sum(bit[v] for v in op.inputs if v in bit) for op in graph.ops]
    makes = [sum(bit[v] for v in op.outputs) for op in graph.ops]
    made = [
        sum(graph.value_by_name[v].size_bytes for v in op.outputs) + op.workspace_bytes
        for op in graph.ops
    ]
    wanted = sum(bit[v] for v in graph.results if v in bit)
    count = len(graph.ops)
    distance: dict[State, float] = {(0, 0, 0): 0.0}
    tie = itertools.count()
    heap = [(0.0, next(tie), (0, 0, 0))]
    while heap:
        time, _, state = heapq.heappop(heap)
        if time > distance[state]:
            continue
        stage, since, alive = state
        if stage == count and alive & wanted == wanted:
            return time
        held = sum(s for i, s in enumerate(size) if alive >> i & 1)
        following = [((stage, since, alive & ~bit[v]), 0.0) for v in names if alive & bit[v]]
        for op in range(since, min(stage + 1, count)):
            if reads[op] & ~alive or not (op == stage or graph.ops[op].replayable):
                continue
            at = (stage + 1, 0) if op == stage else (stage, op + 1)
            for over in overwritten(graph.ops[op]):
                spared = sum(graph.value_by_name[v].size_bytes for v in over)
                if held + made[op] - spared <= budget_bytes:
                    left = alive & ~sum(bit[v] for v in over)
                    following.append(((*at, left | makes[op]), graph.ops[op].time))
        for new, cost in following:
            if time + cost < distance.get(new, float("inf")):
                distance[new] = time + cost
                heapq.heappush(heap, (time + cost, next(tie), new))
    return None
