"""Regions: graphs with an op between their halves, and what they can do, by search."""

from __future__ import annotations

import dataclasses
import heapq
import itertools

from hypothesis import strategies as st

from remat_graph import Graph, Op, Stage, Value
from remat_solvers.testing.brute_force import overwritten
from solver_cases.random_graphs import trainings


def closed(graph: Graph) -> Graph:
    """Make the op at the boundary one that runs once only."""
    middle = graph.boundary_index
    op = dataclasses.replace(graph.ops[middle], replayable=False, overwrites=())
    return dataclasses.replace(graph, ops=(*graph.ops[:middle], op, *graph.ops[middle + 1 :]))


@st.composite
def regions(draw, most_depth: int = 3) -> Graph:
    """Draw a region: a chain and its mirror, the loss between them, some ops that run once."""
    graph = draw(trainings(most_depth))
    middle = graph.boundary_index
    forward = [
        dataclasses.replace(op, replayable=draw(st.sampled_from([True, True, True, False])))
        for op in graph.ops[:middle]
    ]
    returned = forward[-1].outputs[0]
    loss = Op(
        "loss", (returned,), ("tangent",), 0.0, draw(st.sampled_from([0, 3])),
        Stage.BACKWARD, replayable=False,
    )  # fmt: skip
    first = dataclasses.replace(
        graph.ops[middle], inputs=tuple(dict.fromkeys((*graph.ops[middle].inputs, "tangent")))
    )
    results = set(graph.results)
    if draw(st.booleans()):
        results.add(returned)
        forward[-1] = dataclasses.replace(forward[-1], replayable=False)
    return Graph(
        (*graph.values, Value("tangent", draw(st.integers(0, 4)))),
        (*forward, loss, first, *graph.ops[middle + 1 :]),
        graph.resident,
        frozenset(results),
        "loss",
    )


def fastest_within(graph: Graph, kept_bytes: float, forward: float, backward: float):
    """Return the least time of a schedule within a box, or `None`; first computations in order."""
    names = [v for op in graph.ops for v in op.outputs]
    bit = {v: 1 << i for i, v in enumerate(names)}
    size = {v: graph.value_by_name[v].size_bytes for v in names}
    weight = [sum(size[v] for v in names if s & bit[v]) for s in range(1 << len(names))]
    reads = [sum(bit[v] for v in op.inputs if v in bit) for op in graph.ops]
    makes = [sum(bit[v] for v in op.outputs) for op in graph.ops]
    made = [sum(size[v] for v in op.outputs) + op.workspace_bytes for op in graph.ops]
    middle = graph.boundary_index
    wanted = sum(bit[v] for v in graph.results if v in bit)
    distance = {(0, 0): 0.0}
    tie = itertools.count()
    heap = [(0.0, next(tie), (0, 0))]
    while heap:
        time, _, state = heapq.heappop(heap)
        if time > distance[state]:
            continue
        done, alive = state
        if done == len(graph.ops) and alive & wanted == wanted:
            return time
        room = forward if done <= middle else backward
        # A value is freed in a step of its own, during which it is still held.
        following = [((done, alive & ~bit[v]), 0.0) for v in names if alive & bit[v]]
        if weight[alive] > room:
            following = []
        for i, op in enumerate(graph.ops[: done + 1]):
            if not (i == done or op.replayable) or reads[i] & alive != reads[i]:
                continue
            for over in overwritten(op):
                held = weight[alive] + made[i] - sum(size[v] for v in over)
                if i == middle:  # behind which values are freed before the second half begins
                    lefts = submasks(alive) if weight[alive] <= kept_bytes else ()
                else:
                    lefts = (alive & ~sum(bit[v] for v in over),) if held <= room else ()
                for left in lefts:
                    following.append(((done + (i == done), left | makes[i]), op.time))
        for new, cost in following:
            if time + cost < distance.get(new, float("inf")):
                distance[new] = time + cost
                heapq.heappush(heap, (time + cost, next(tie), new))
    return None


def submasks(mask: int):
    """List all sets of bits of a mask."""
    left = mask
    while left:
        yield left
        left = (left - 1) & mask
    yield 0


def least_kept(graph: Graph) -> int:
    """Return the least that any schedule keeps between the halves."""
    inf = float("inf")
    return next(k for k in itertools.count() if fastest_within(graph, k, inf, inf) is not None)
