"""What surely runs and is surely there, whichever alternatives are chosen: for bounds on the peak.

A graph with alternatives becomes an ordinary one, in which any of its schedules can be followed
without holding more. Of what a group makes, that stays which the same ops make; the rest is always
there and weighs nothing. The op of the group reads what all of these read and none overwrites, and
has the least workspace of all. What is optional is left out. Proof: certified-bounds.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from remat_graph import Graph
from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["at_places", "common_core"]


def common_core(wiring: Wiring) -> Wiring:
    """Leave what surely runs; the same wiring where there are no alternatives."""
    graph = wiring.graph
    if not graph.has_alternatives:
        return wiring
    alternatives = Alternatives.of(wiring)
    ops, free = [], set()
    for c in np.flatnonzero(alternatives.owed).tolist():
        op = graph.ops[c]
        if alternatives.chosen[c]:
            members = alternatives.members(c).tolist()
            stay = _heaviest(wiring, members, c)
            able = [graph.ops[p] for p in members if stay <= set(graph.ops[p].outputs)]
            free.update(set(op.outputs) - stay)
            read = set(op.inputs)
            for other in able:
                read &= set(other.inputs) - {v for v, _ in other.overwrites}
            op = dataclasses.replace(
                op,
                inputs=tuple(v for v in op.inputs if v in read),
                outputs=tuple(v for v in op.outputs if v in stay),
                workspace_bytes=min(other.workspace_bytes for other in able),
                overwrites=(),
            )
        ops.append(op)
    names = {op.name for op in ops}
    for i, op in enumerate(ops):
        ops[i] = dataclasses.replace(
            op,
            overwrites=tuple((v, new) for v, new in op.overwrites if v not in free),
            inputs=tuple(v for v in op.inputs if v not in free),
            order_after=tuple(name for name in op.order_after if name in names),
        )
    outputs = {v for op in ops for v in op.outputs} | graph.resident
    left = Graph(
        values=tuple(v for v in graph.values if v.name in outputs),
        ops=tuple(ops),
        resident=graph.resident,
        results=graph.results & outputs,
        boundary=graph.boundary,
    )
    return Wiring.of(left)


def at_places(wiring: Wiring, need: Ints) -> Ints:
    """Bound, for each op, what is held at the place of its group, given what each op needs alone.

    Each value of the group is made there by one of its implementations, the last of them at most.
    """
    alternatives = Alternatives.of(wiring)
    bound = np.where(alternatives.owed & ~alternatives.chosen, need, 0)
    for v, begins in alternatives.beginners.items():
        c = wiring.producer_list[v]
        bound[c] = max(int(bound[c]), int(need[list(begins)].min()))
    return bound


def _heaviest(wiring: Wiring, members: list[int], c: int) -> set[str]:
    """Choose the largest set of values that are made by the same ops of a group."""
    graph = wiring.graph
    alike: dict[tuple[int, ...], set[str]] = {}
    for v in graph.ops[c].outputs:
        makes = tuple(p for p in members if v in graph.ops[p].outputs)
        alike.setdefault(makes, set()).add(v)
    return max(alike.values(), key=lambda names: sum(_size(graph, v) for v in names))


def _size(graph: Graph, value: str) -> int:
    return graph.value_by_name[value].size_bytes
