"""The forward half of a graph with groups contracted to nodes: what partitioners cut.

Nodes are numbered in a topological order. Dependencies are those through values and the soft ones,
which keep blocks convex although they cost no memory (HiRemate, C.1.2). Resident values are left
out, as dependencies and as bytes: they are there whatever the cut (C.1.3). A backward op stands
where its twin does, so a value that it reads is read by the node of the twin. Reading,
contracting and splitting take time linear in the dependencies, but for sorts.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat_graph import Graph

__all__ = ["Flow", "Quotient"]


class Flow(NamedTuple):
    """The values with one producer and the same readers, the producer excepted.

    `kept` says that they are read outside the quotient, whatever the cut: results of the graph.
    """

    producer: int
    readers: tuple[int, ...]
    kept: bool


@dataclass(frozen=True, slots=True)
class Quotient:
    """A DAG of nodes `0 .. n-1` in topological order, each standing for one op or more.

    `before` and `after` are the direct predecessors and successors of each node, ascending; `ops`
    is the number of original ops in each, `members` the number of nodes of the level that is being
    cut, which is what bounds count. `flows` has the bytes of what is read elsewhere than where it
    is made.
    """

    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    ops: tuple[int, ...]
    members: tuple[int, ...]
    flows: dict[Flow, int]

    def __len__(self) -> int:
        return len(self.before)

    @classmethod
    def of(cls, graph: Graph) -> Quotient:
        """Read the forward half of a graph, one node per op in execution order."""
        count = graph.boundary_index
        index, producer, consumers = graph.op_index, graph.producer, graph.consumers
        sizes = graph.value_by_name
        place = list(range(count))
        place += [-1 if op.twin is None else index[op.twin] for op in graph.ops[count:]]
        before = []
        flows: dict[Flow, int] = {}
        for node, op in enumerate(graph.ops[:count]):
            sources = {producer[v] for v in op.inputs if v in producer}
            sources.update(index[name] for name in op.order_after)
            before.append(tuple(sorted(sources)))
            for v in op.outputs:
                readers = {place[i] for i in consumers[v]} - {node, -1}
                _add(flows, sizes[v].size_bytes, node, readers, v in graph.results)
        ones = (1,) * count
        return cls(tuple(before), _reversed(before), ones, ones, flows)

    def order(self, groups: Iterable[Sequence[int]]) -> list[list[int]]:
        """Sort groups that cover all nodes topologically, ties by first node; nodes ascending.

        Raises:
            ValueError: if their quotient has a cycle.
        """
        parts = sorted(sorted(group) for group in groups)
        place = self._places(parts)
        waiting = [0] * len(parts)
        after: list[set[int]] = [set() for _ in parts]
        for node, targets in enumerate(self.after):
            after[place[node]].update(place[target] for target in targets)
        for i, targets_of in enumerate(after):
            targets_of.discard(i)
            for target in targets_of:
                waiting[target] += 1
        ready = [i for i, count in enumerate(waiting) if not count]
        ordered = []
        while ready:
            i = heapq.heappop(ready)
            ordered.append(parts[i])
            for target in after[i]:
                waiting[target] -= 1
                if not waiting[target]:
                    heapq.heappush(ready, target)
        if len(ordered) < len(parts):
            raise ValueError(f"the quotient by {len(parts)} groups has a cycle")
        return ordered

    def contract(self, groups: Sequence[Sequence[int]]) -> Quotient:
        """Make each group one node; the groups cover all nodes and are in topological order."""
        place = self._places(groups)
        before = []
        for i, group in enumerate(groups):
            sources = {place[source] for node in group for source in self.before[node]}
            sources.discard(i)
            before.append(tuple(sorted(sources)))
        flows: dict[Flow, int] = {}
        for flow, size in self.flows.items():
            producer = place[flow.producer]
            readers = {place[reader] for reader in flow.readers}
            readers.discard(producer)
            _add(flows, size, producer, readers, flow.kept)
        return Quotient(
            tuple(before),
            _reversed(before),
            tuple(sum(self.ops[node] for node in group) for group in groups),
            tuple(sum(self.members[node] for node in group) for group in groups),
            flows,
        )

    def fresh(self) -> Quotient:
        """Count every node as one member: the quotient that the next level cuts."""
        return Quotient(self.before, self.after, self.ops, (1,) * len(self), self.flows)

    def split(self, groups: Sequence[Sequence[int]]) -> list[Quotient]:
        """Cut out each of several disjoint groups, nodes ascending, as a quotient of its own.

        What is read of a group elsewhere is kept, whatever the cut.
        """
        place = self._places(groups)
        own = [0] * len(self)
        for group in groups:
            for i, node in enumerate(group):
                own[node] = i
        flows: list[dict[Flow, int]] = [{} for _ in groups]
        for flow, size in self.flows.items():
            group_of = place[flow.producer]
            if group_of >= 0:
                readers = [own[r] for r in flow.readers if place[r] == group_of]
                kept = flow.kept or len(readers) < len(flow.readers)
                _add(flows[group_of], size, own[flow.producer], readers, kept)
        parts = []
        for i, group in enumerate(groups):
            before = [tuple(own[s] for s in self.before[n] if place[s] == i) for n in group]
            parts.append(
                Quotient(
                    tuple(before),
                    _reversed(before),
                    tuple(self.ops[node] for node in group),
                    tuple(self.members[node] for node in group),
                    flows[i],
                )
            )
        return parts

    def _places(self, groups: Sequence[Sequence[int]]) -> list[int]:
        place = [-1] * len(self)
        for i, group in enumerate(groups):
            for node in group:
                place[node] = i
        return place


def _reversed(before: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    after: list[list[int]] = [[] for _ in before]
    for node, sources in enumerate(before):
        for source in sources:
            after[source].append(node)
    return tuple(map(tuple, after))


def _add(
    flows: dict[Flow, int], size: int, producer: int, readers: Collection[int], kept: bool
) -> None:
    """Count bytes that are made in one node, if they are read elsewhere."""
    if size and (readers or kept):
        flow = Flow(producer, tuple(sorted(readers)), kept)
        flows[flow] = flows.get(flow, 0) + size
