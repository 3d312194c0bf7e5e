"""The fastest schedule of MONeT's form that its own count of bytes admits; without alternatives.

Written from the paper's formulas (1), (2), (12) and (13) over sets, for every choice of what to
store; what runs again follows from that. A value is named by its place in the forward half.
"""

from __future__ import annotations

import itertools
import math

from remat_graph import Graph

Values = frozenset[str]


def fastest_of_monet(graph: Graph, budget_bytes: int) -> float | None:
    """Return the least time, or `None` if the count admits nothing."""
    case = _Case(graph, budget_bytes)
    costs: dict[Values, float] = {
        stored: 0.0 for stored in _subsets(case.forward_values) if case.forward_fits(stored)
    }
    for b in range(len(case.backward) + 1):
        following: dict[Values, float] = {}
        for stored, cost in costs.items():
            for after in _subsets(case.forward_values):
                extra = case.segment(b, stored, after)
                if extra is not None and cost + extra < following.get(after, math.inf):
                    following[after] = cost + extra
        costs = following
    return graph.time + min(costs.values()) if costs else None


def _subsets(values: list[str]) -> list[Values]:
    return [
        frozenset(part)
        for count in range(len(values) + 1)
        for part in itertools.combinations(values, count)
    ]


class _Case:
    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.budget = budget_bytes
        self.size = {v.name: v.size_bytes for v in graph.values}
        self.forward = graph.ops[: graph.boundary_index]
        self.backward = graph.ops[graph.boundary_index :]
        self.forward_values = [v for op in self.forward for v in op.outputs]
        self.reads = [frozenset(op.inputs) & set(self.forward_values) for op in self.backward]
        self.reads.append(graph.results & set(self.forward_values))

    def bytes(self, values: Values | set[str]) -> int:
        return sum(self.size[v] for v in values)

    def forward_fits(self, stored: Values) -> bool:
        done: set[str] = set()
        for i, op in enumerate(self.forward):
            later = {v for t in self.forward[i + 1 :] for v in t.inputs}
            held = done & (stored | later | set(op.inputs))
            held -= {v for v, _ in op.overwrites if v not in stored | later}
            if self._over(held, op.outputs, op.workspace_bytes):
                return False
            done.update(op.outputs)
        return True

    def segment(self, b: int, stored: Values, after: Values) -> float | None:
        """Time of the runs before the b-th backward op; `None` if they cannot be or do not fit."""
        runs = self._least_runs(stored, after | self.reads[b])
        useful = self._useful(b)
        if runs is None or not runs <= useful:
            return None
        gradients = self._gradients(b)
        there = after | self.reads[b]
        done: set[str] = set()
        for i, op in enumerate(self.forward):
            ahead = set(self.forward_values) - done
            if self._over((done & there) | (ahead & stored), (), gradients):
                return None
            if i in runs:
                later = {v for t in sorted(useful) if t > i for v in self.forward[t].inputs}
                held = done & (there | later | set(op.inputs))
                held |= (ahead - set(op.outputs)) & stored
                again = {v for t in runs if t > i for v in self.forward[t].inputs}
                held -= {v for v, _ in op.overwrites if v not in there | again}
                if self._over(held, op.outputs, op.workspace_bytes + gradients):
                    return None
            done.update(op.outputs)
        if self._over(there, (), gradients):
            return None
        if b < len(self.backward):
            op = self.backward[b]
            needed = {v for t in self.backward[b + 1 :] for v in t.inputs} | self.graph.results
            gone = {v for v, _ in op.overwrites if v not in after}
            spared = {v for v in gone if v in self.forward_values or v not in needed}
            made = self.bytes(set(op.outputs)) + op.workspace_bytes
            if gradients + made + self.bytes(there) - self.bytes(spared) > self.budget:
                return None
        return math.fsum(self.forward[i].time for i in runs)

    def _over(self, held: set[str] | Values, made: tuple[str, ...], more: int) -> bool:
        return self.bytes(held) + self.bytes(set(made)) + more > self.budget

    def _least_runs(self, stored: Values, wanted: Values) -> set[int] | None:
        runs: set[int] = set()
        needed = set(wanted)
        for i in reversed(range(len(self.forward))):
            op = self.forward[i]
            if set(op.outputs) & needed - stored:
                if not op.replayable:
                    return None
                runs.add(i)
                needed.update(op.inputs)
        return runs

    def _useful(self, b: int) -> set[int]:
        """Find the forward ops that can matter to the b-th backward op or a later one."""
        needed = set().union(*self.reads[b:])
        found = set()
        for i in reversed(range(len(self.forward))):
            if needed & set(self.forward[i].outputs) and self.forward[i].replayable:
                found.add(i)
                needed |= set(self.forward[i].inputs)
        return found

    def _gradients(self, b: int) -> int:
        made = {v for op in self.backward[:b] for v in op.outputs}
        needed = {v for op in self.backward[b:] for v in op.inputs} | self.graph.results
        return self.bytes(made & needed)
