"""Small graphs exactly: the fastest schedule by Dijkstra over all states.

A state is how many ops have been computed a first time and which values are alive. Guarantee: the
optimum over all schedules in the order of the graph, or a proof that nothing fits, unless a limit
is hit. Complexity: up to ops x 2^values states, so for graphs of about a dozen ops.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["ExhaustiveResult", "exhaust"]

_MOST_VALUES = 16
_MOST_STATES = 100_000

State = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class ExhaustiveResult:
    """The fastest sequence, `None` if it is proved that none fits."""

    sequence: Ints | None


def exhaust(wiring: Wiring, budget_bytes: int, deadline: float) -> ExhaustiveResult | None:
    """Search all states; `None` if there are too many, or at `deadline` of `perf_counter`."""
    if wiring.value_count > _MOST_VALUES:
        return None
    values = range(wiring.value_count)
    size: list[int] = wiring.size.tolist()
    reads = [sum(1 << v for v in row) for row in wiring.inputs]
    makes = [sum(1 << v for v in row) for row in wiring.outputs]
    during = [
        outputs + work
        for outputs, work in zip(wiring.output_bytes, wiring.workspace_list, strict=True)
    ]
    wanted = sum(1 << v for v in wiring.results.tolist())
    times = wiring.time_list
    start: State = (0, 0)
    least: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, int]] = {}
    heap: list[tuple[float, State]] = [(0.0, start)]
    while heap:
        cost, state = heapq.heappop(heap)
        if cost > least[state]:
            continue
        done, alive = state
        if done == wiring.op_count and alive & wanted == wanted:
            return ExhaustiveResult(_walk_back(came, state))
        if len(least) > _MOST_STATES or time.perf_counter() > deadline:
            return None
        room = budget_bytes - sum(size[v] for v in values if alive >> v & 1)
        edges = [((done, alive ^ 1 << v), cost, -1) for v in values if alive >> v & 1]
        for op in range(min(done + 1, wiring.op_count)):
            first = op == done
            if reads[op] & ~alive or not (first or wiring.replayable_list[op]):
                continue
            for over in _subsets(wiring.overwritten[op]):
                if during[op] - sum(size[v] for v in over) <= room:
                    left = alive & ~sum(1 << v for v in over)
                    edges.append(((done + first, left | makes[op]), cost + times[op], op))
        for after, total, op in edges:
            if total < least.get(after, np.inf):
                least[after] = total
                came[after] = (state, op)
                heapq.heappush(heap, (total, after))
    return ExhaustiveResult(None)


def _subsets(values: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for count in range(len(values) + 1):
        yield from itertools.combinations(values, count)


def _walk_back(came: dict[State, tuple[State, int]], state: State) -> Ints:
    ops: list[int] = []
    while state in came:
        state, op = came[state]
        if op >= 0:
            ops.append(op)
    return np.array(ops[::-1], dtype=np.int64)
