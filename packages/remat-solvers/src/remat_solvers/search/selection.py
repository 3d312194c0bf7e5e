"""A choice of makers, and the ordinary graph that it leaves: its schedules are translated back.

`first` are the ops that run at the places of groups with a choice, `later` those that make some of
their values once more for the backward half: what reads these there reads the later copy, a value
of its own in the selected graph. The optional ops on which a chosen op depends come with it, each
right after the last op before it that reads the same. Both copies are one value in the given graph,
where the second replaces the first: a translated schedule never holds more, nor takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from remat_graph import Graph, InvalidGraph, Op, Stage, Value
from remat_solvers.bounds.least import while_running
from remat_solvers.core.makers import Makers, lightest_ways
from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["Choice", "Selection", "first_choices", "select", "tidy"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which ops run at the places of groups with a choice, and which make values once more."""

    first: frozenset[int]
    later: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The selected graph, wired; `origin[i]` is the op of the given graph that its op `i` is."""

    wiring: Wiring
    origin: Ints

    def translate(self, given: Wiring, makers: Makers, sequence: Ints) -> Ints:
        """Turn a sequence of the selected graph into one of the given graph, without waste."""
        return tidy(given, makers, self.origin[sequence])


def select(wiring: Wiring, makers: Makers, choice: Choice) -> Selection | None:
    """Leave out what was not chosen; `None` if what is left makes no graph."""
    entries = _Entries(wiring, makers, choice)
    if not entries.collect():
        return None
    try:
        graph = entries.graph()
    except InvalidGraph:
        return None
    return Selection(Wiring.of(graph), np.array([i for i, _, _ in entries.found], dtype=np.int64))


def first_choices(wiring: Wiring, makers: Makers) -> list[Choice]:
    """List the cheapest ways, what is owed, and the ways of least need, by themselves and packing.

    Those that pack make for the backward half whatever can be unpacked.
    """
    need = while_running(wiring).astype(np.float64)
    ways = [
        frozenset(op for ops in lightest_ways(wiring, makers, weight) for op in ops)
        for weight in (wiring.time, need)
    ]
    unpack = frozenset(
        op
        for op in makers.more_maker.tolist()
        if wiring.replayable_list[op] and makers.optional_value[list(wiring.inputs[op])].any()
    )
    found: list[Choice] = []
    for first in dict.fromkeys((ways[0], frozenset(makers.groups()), ways[1])):
        found.append(Choice(first))
        if unpack - first:
            found.append(Choice(first, unpack - first))
    return found


def tidy(wiring: Wiring, makers: Makers, sequence: Ints) -> Ints:
    """Leave out computations that make nothing that is read, nor anything owed a first time."""
    order: list[int] = sequence.tolist()
    made: set[int] = set()
    owed: list[bool] = []
    for op in order:
        new = made.isdisjoint([-1 - op]) if not wiring.outputs[op] else False
        new |= any(v not in made and not makers.optional_value[v] for v in wiring.outputs[op])
        owed.append(new)
        made.update(wiring.outputs[op] or (-1 - op,))
    needed = [False] * wiring.value_count
    for v in wiring.results.tolist():
        needed[v] = True
    kept: list[int] = []
    for op, must in zip(reversed(order), reversed(owed), strict=True):
        if must or any(needed[v] for v in wiring.outputs[op]):
            for v in wiring.outputs[op]:
                needed[v] = False
            for v in wiring.inputs[op]:
                needed[v] = True
            kept.append(op)
    return np.array(kept[::-1], dtype=np.int64)


Entry = tuple[int, tuple[str, ...], tuple[str, ...]]  # op, what it reads, what it makes


@dataclass(slots=True)
class _Entries:
    """Collects the ops of a selected graph in order."""

    wiring: Wiring
    makers: Makers
    choice: Choice
    found: list[Entry] = field(default_factory=list)
    _made: set[str] = field(default_factory=set)
    _later: dict[str, int] = field(default_factory=dict)

    def collect(self) -> bool:
        """Place all ops; say whether everything that they read is there."""
        graph, makers = self.wiring.graph, self.makers
        self._made = set(graph.resident)
        self._later = {
            v: op
            for op in sorted(self.choice.later)
            if self.wiring.replayable_list[op]
            for v in graph.ops[op].outputs
        }
        for c in np.flatnonzero(makers.owed).tolist():
            members = makers.members(c).tolist() if makers.chosen[c] else [c]
            ops = [p for p in members if p in self.choice.first] if makers.chosen[c] else [c]
            for op in ops:
                if not self._add(op):
                    return False
            if not self._made.issuperset(graph.ops[c].outputs):
                return False
        return True

    def graph(self) -> Graph:
        """Write the graph."""
        given = self.wiring.graph
        names = {given.ops[i].name for i, _, _ in self.found}
        backward = False
        ops: list[Op] = []
        values = [given.value_by_name[v] for v in sorted(given.resident)]
        boundary = None
        for i, inputs, outputs in self.found:
            op = given.ops[i]
            if op.stage is Stage.BACKWARD and not backward:
                backward, boundary = True, op.name
            new = dict(zip((*op.inputs, *op.outputs), (*inputs, *outputs), strict=True))
            ops.append(
                replace(
                    op,
                    inputs=inputs,
                    outputs=outputs,
                    stage=Stage.BACKWARD if backward else Stage.FORWARD,
                    twin=op.twin if op.twin in names else None,
                    order_after=tuple(name for name in op.order_after if name in names),
                    overwrites=tuple((new[a], new[b]) for a, b in op.overwrites),
                    alternative_of=None,
                    optional=False,
                )
            )
            sizes = (given.value_by_name[v].size_bytes for v in op.outputs)
            values += [Value(v, size) for v, size in zip(outputs, sizes, strict=True)]
        return Graph(tuple(values), tuple(ops), given.resident, given.results, boundary)

    def _add(self, op: int) -> bool:
        """Place an op that makes values a first time, after what it needs."""
        graph = self.wiring.graph
        stage = graph.ops[op].stage
        inputs = self._ready(op, graph.ops[op].inputs, late=stage is Stage.BACKWARD)
        if inputs is None:
            return False
        outputs = graph.ops[op].outputs
        if not self._made.isdisjoint(outputs):
            return False
        self.found.append((op, inputs, outputs))
        self._made.update(outputs)
        return True

    def _ready(self, op: int, wanted: Iterable[str], *, late: bool) -> tuple[str, ...] | None:
        """Make what an op reads; name it as it is there, `None` if it cannot be."""
        graph = self.wiring.graph
        named: list[str] = []
        for name in wanted:
            v = name
            again = self._later.get(v)
            if late and again is not None and v in self._made and again != op:
                if _again(v) not in self._made and not self._add_later(again):
                    return None
                v = _again(v)
            elif v not in self._made:
                maker = graph.producer[v]
                if not graph.ops[maker].optional or not self._add_optional(maker):
                    return None
            named.append(v)
        return tuple(named)

    def _add_later(self, op: int) -> bool:
        """Place an op that makes values once more, right before the first that reads them."""
        wanted = self.wiring.graph.ops[op]
        if op in self.choice.first:
            return False
        inputs = self._ready(op, wanted.inputs, late=False)
        outputs = tuple(map(_again, wanted.outputs))
        if inputs is None:
            return False
        self.found.append((op, inputs, outputs))
        self._made.update(outputs)
        return True

    def _add_optional(self, op: int) -> bool:
        """Place an optional op right after the last one that reads or makes what it reads."""
        wanted = self.wiring.graph.ops[op]
        inputs = self._ready(op, wanted.inputs, late=False)
        if inputs is None or not wanted.replayable:
            return False
        read = set(inputs)
        touching = (at for at, (_, i, o) in enumerate(self.found) if not read.isdisjoint((*i, *o)))
        self.found.insert(max(touching, default=-1) + 1, (op, inputs, wanted.outputs))
        self._made.update(wanted.outputs)
        return True


def _again(value: str) -> str:
    return f"{value} again"
