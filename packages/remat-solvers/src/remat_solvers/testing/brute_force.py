"""The fastest schedule within a budget, by looking at all: Dijkstra over states.

Of all schedules that compute every op, the first time in the order of the graph; of a graph with
alternatives, those that make what each owed op makes, by any of its implementations. Complexity:
exponential in the number of values, of which a dozen are few enough.
"""

from __future__ import annotations

import heapq
import itertools

from remat_graph import Graph, Op

__all__ = ["fastest", "overwritten"]

_State = tuple[int, int, int]


def fastest(graph: Graph, budget_bytes: int) -> float | None:
    """Return the least time of a schedule within a budget, or `None` if nothing fits.

    A state is how many owed ops are done, what is alive, and which outputs of the next owed op were
    made (both as bits). Only ops that are not optional may be non-replayable.
    """
    names = list(dict.fromkeys(v for op in graph.ops for v in op.outputs))
    bit = {v: 1 << i for i, v in enumerate(names)}
    size = {v: graph.value_by_name[v].size_bytes for v in names}
    owed = [op.name for op in graph.ops if op.owed]
    place = {name: at for at, name in enumerate(owed)}
    reads = [sum(bit[v] for v in op.inputs if v in bit) for op in graph.ops]
    makes = [sum(bit[v] for v in op.outputs) for op in graph.ops]
    needed = [sum(size[v] for v in op.outputs) + op.workspace_bytes for op in graph.ops]
    owes = [makes[graph.op_index[name]] for name in owed]
    wanted = sum(bit[v] for v in graph.results if v in bit)
    start: _State = (0, 0, 0)
    distance: dict[_State, float] = {start: 0.0}
    heap = [(0.0, start)]
    while heap:
        time, state = heapq.heappop(heap)
        if time > distance[state]:
            continue
        done, alive, now = state
        if done == len(owed) and alive & wanted == wanted:
            return time
        weight = sum(size[v] for v in names if alive & bit[v])
        following = [((done, alive & ~bit[v], now), 0.0) for v in names if alive & bit[v]]
        for i, op in enumerate(graph.ops):
            at = -1 if op.optional else place[op.alternative_of or op.name]
            if at > done or reads[i] & ~alive:
                continue
            if not op.replayable and (at < done or now & makes[i]):
                continue
            after, which = done, now
            if at == done:
                which |= makes[i]
                if which == owes[done]:
                    after, which = done + 1, 0
            for over in overwritten(op):
                if weight + needed[i] - sum(size[v] for v in over) <= budget_bytes:
                    left = alive & ~sum(bit[v] for v in over)
                    following.append(((after, left | makes[i], which), op.time))
        for new, cost in following:
            if time + cost < distance.get(new, float("inf")):
                distance[new] = time + cost
                heapq.heappush(heap, (time + cost, new))
    return None


def overwritten(op: Op) -> list[tuple[str, ...]]:
    """List what an op may overwrite: any part of what it can."""
    can = [read for read, _ in op.overwrites]
    return [part for n in range(len(can) + 1) for part in itertools.combinations(can, n)]
