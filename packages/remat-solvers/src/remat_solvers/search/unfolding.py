"""A sequence that uses several implementations of a value, as one of an ordinary graph.

Each *version* of an op, the op together with the versions of all that it reads, becomes an op of
its own, in the order in which they first run, and so each version of a value a value of its own.
Who made what is read is fixed then, so everything that improves a schedule works there, and can use
each maker that the sequence has once more. All versions of a value are one in the given graph,
where a later one replaces an earlier: what is folded back never holds more, nor takes longer.
Linear in the sequence. A graph without alternatives is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from remat_graph import Graph, Op, Stage, Value
from remat_solvers.core.dead_runs import without_dead_runs
from remat_solvers.core.trace import Trace, first_runs, trace
from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["Keeps", "Unfolded", "unfold"]

Keeps = Callable[[int, int], bool]
Version = tuple[int, tuple[int, ...]]  # an op, and which versions of ops made what it reads


@dataclass(frozen=True, slots=True, eq=False)
class Unfolded:
    """The ordinary graph, wired, whose op `i` is op `origin[i]` of the given one."""

    original: Wiring
    wiring: Wiring
    origin: Ints
    start: Trace

    def fold(self, now: Trace) -> Trace:
        """Turn a sequence of the ordinary graph into one of the original, without dead runs."""
        if self.wiring is self.original:
            return now
        return trace(self.original, without_dead_runs(self.original, self.origin[now.sequence]))

    def keeps(self) -> Keeps:
        """Say, of an op and a value, whether the value is there when the op first runs."""
        now = self.start
        first = [*first_runs(self.wiring, now).tolist(), now.steps]
        lives: list[list[tuple[int, int]]] = [[] for _ in range(self.wiring.value_count)]
        ends = zip(now.copy_start.tolist(), now.copy_last.tolist(), strict=True)
        for v, life in zip(now.copy_value.tolist(), ends, strict=True):
            lives[v].append(life)
        return lambda op, v: any(since <= first[op] <= until for since, until in lives[v])


def unfold(wiring: Wiring, now: Trace) -> Unfolded:
    """Make the ordinary graph of a legal sequence."""
    if not wiring.graph.has_alternatives:
        return Unfolded(wiring, wiring, np.arange(wiring.op_count), now)
    number: dict[Version, int] = {}
    latest = [-1] * wiring.value_count
    order: list[int] = []
    for op in without_dead_runs(wiring, now.sequence).tolist():
        version = (op, tuple(latest[v] for v in wiring.inputs[op]))
        order.append(number.setdefault(version, len(number)))
        for v in wiring.outputs[op]:
            latest[v] = order[-1]
    graph = _graph(wiring, list(number), [latest[v] for v in wiring.results.tolist()])
    unfolded = Wiring.of(graph)
    origin = np.array([op for op, _ in number], dtype=np.int64)
    return Unfolded(wiring, unfolded, origin, trace(unfolded, np.array(order, dtype=np.int64)))


def _graph(wiring: Wiring, versions: list[Version], last_versions: list[int]) -> Graph:
    """Write the ordinary graph; `last_versions` are the versions that make the results."""
    graph = wiring.graph
    names: set[str] = set()
    named: dict[tuple[int, int], str] = {}
    values = [graph.value_by_name[name] for name in sorted(graph.resident)]
    ops: list[Op] = []
    boundary = None
    for i, (number, sources) in enumerate(versions):
        op = graph.ops[number]
        again = f" #{i}" if op.name in names else ""
        names.add(op.name)
        if boundary is None and op.stage is Stage.BACKWARD:
            boundary = op.name
        new = {
            wiring.values[v]: named[source, v]
            for v, source in zip(wiring.inputs[number], sources, strict=True)
        }
        for v in wiring.outputs[number]:
            name = wiring.values[v]
            named[i, v] = new[name] = f"{name} #{i}" if name in names else name
            names.add(name)
            values.append(Value(new[name], int(wiring.size[v])))
        ops.append(
            replace(
                op,
                name=f"{op.name}{again}",
                inputs=tuple(new.get(name, name) for name in op.inputs),
                outputs=tuple(new[name] for name in op.outputs),
                stage=Stage.FORWARD if boundary is None else Stage.BACKWARD,
                twin=None,
                order_after=(),
                overwrites=tuple((new[read], new[written]) for read, written in op.overwrites),
                alternative_of=None,
                optional=False,
            )
        )
    results = zip(wiring.results.tolist(), last_versions, strict=True)
    ends = frozenset(named[source, v] for v, source in results)
    return Graph(
        tuple(values), tuple(ops), graph.resident, ends | graph.results & graph.resident, boundary
    )
