"""What `regress` looks for, without any of its shortcuts: for tests, on small graphs."""

from __future__ import annotations

import heapq
from itertools import count

from remat_graph import Graph

__all__ = ["minimal_peaks"]


def minimal_peaks(graph: Graph) -> int:
    """Find the largest over all ops, and the end, of the minimal peak that makes what it reads.

    Every set of values counts, every op may have completed it, and every value weighs what it
    weighs. What cannot be made again and is needed later is part of what must be there. What an op
    can overwrite is there while it runs only if it is after it.
    """
    size = {v.name: v.size_bytes for v in graph.values if v.name not in graph.resident}
    place = {op.name: i for i, op in enumerate(graph.ops)}
    maker = {v: op for op in graph.ops for v in op.outputs}
    reads = {op.name: frozenset(v for v in op.inputs if v in size) for op in graph.ops}
    held = {op.name: reads[op.name] - {read for read, _ in op.overwrites} for op in graph.ops}
    results = frozenset(v for v in graph.results if v in size)

    def weigh(values) -> int:
        return sum(size[v] for v in values)

    def minimal_peak(wanted: frozenset[str]) -> int:
        order = count()
        pending = [(0, next(order), wanted)]
        done: set[frozenset[str]] = set()
        while True:
            peak, _, now = heapq.heappop(pending)
            if not now:
                return peak
            if now in done:
                continue
            done.add(now)
            for op in {maker[v].name: maker[v] for v in now}.values():
                before = now - set(op.outputs) | reads[op.name]
                later = (place[maker[v].name] > place[op.name] for v in before)
                if not op.replayable and any(later):
                    continue
                there = weigh(now | set(op.outputs) | held[op.name]) + op.workspace_bytes
                heapq.heappush(pending, (max(peak, there), next(order), before))

    most = minimal_peak(results)
    for i, op in enumerate(graph.ops):
        needed = results.union(*(reads[other.name] for other in graph.ops[i:]))
        once = {v for v in needed if place[maker[v].name] < i and not maker[v].replayable}
        wanted = reads[op.name] | once
        after = results.union(*(reads[other.name] for other in graph.ops[i + 1 :]))
        while_running = weigh(held[op.name] | (once & after) | set(op.outputs))
        while_running += op.workspace_bytes
        most = max(most, minimal_peak(frozenset(wanted)), while_running)
    return most
