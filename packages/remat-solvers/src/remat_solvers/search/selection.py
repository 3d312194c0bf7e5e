"""A choice of alternatives, and storing everything by these: where a search over them begins.

`first` are the ops that run at the places of groups with a choice, `later` those that make some of
their values once more for the backward half. The optional ops on which a chosen op depends come
with it, each right after the last op before it that reads the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from remat_graph import Stage
from remat_solvers.bounds.peak import while_running
from remat_solvers.core.alternatives import Alternatives, lightest_ways
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Wiring

__all__ = ["Choice", "arrange", "first_choices", "least_kept"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which ops run at the places of groups with a choice, and which make values once more."""

    first: frozenset[int]
    later: frozenset[int] = frozenset()


def arrange(wiring: Wiring, alternatives: Alternatives, choice: Choice) -> Trace | None:
    """Store everything by the chosen ops; `None` if these do not make all that is read."""
    arrangement = _Arrangement(wiring, alternatives, choice)
    if not arrangement.run():
        return None
    return trace(wiring, np.array(arrangement.sequence, dtype=np.int64))


def first_choices(wiring: Wiring, alternatives: Alternatives) -> list[Choice]:
    """List the cheapest ways, those of least need, what is owed, and three that pack.

    The first of these keeps least of the forward half. The others make for the backward half
    whatever can be unpacked; the last one also runs first what reads something packed, where there
    is such a way.
    """
    need = while_running(wiring).astype(np.float64)
    ways = [
        frozenset(op for ops in lightest_ways(wiring, alternatives, weight) for op in ops)
        for weight in (wiring.time, need)
    ]
    reads_packed = [bool(alternatives.optional_value[list(row)].any()) for row in wiring.inputs]
    unpack = frozenset(
        op
        for op in alternatives.more_op.tolist()
        if wiring.replayable_list[op] and reads_packed[op]
    )
    packed = ways[0]
    for op in sorted(unpack):
        if alternatives.opens[op]:
            packed = with_way(wiring, alternatives, packed, op)
    choices = [Choice(first) for first in (*ways, frozenset(alternatives.groups()))]
    choices.append(least_kept(wiring, alternatives))
    choices += [Choice(first, unpack - first) for first in (ways[0], packed)]
    return list(dict.fromkeys(choices))


def least_kept(wiring: Wiring, alternatives: Alternatives) -> Choice:
    """Choose ways for which least of the forward half is kept, and unpack what can be unpacked."""
    half = wiring.graph.boundary_index
    size: dict[int, int] = dict(enumerate(wiring.size.tolist()))
    unpacks: dict[int, int] = {}
    for v, op in zip(alternatives.more_value.tolist(), alternatives.more_op.tolist(), strict=True):
        packed = any(alternatives.optional_value[w] for w in wiring.inputs[op])
        if packed and wiring.replayable_list[op] and wiring.producer_list[v] < half:
            read = sum(int(wiring.size[w]) for w in wiring.inputs[op])
            if read < size[v]:
                size[v], unpacks[v] = read, op
    anyway = _read_anyway(wiring, alternatives)

    def weight(op: int) -> tuple[int, float]:
        group = int(alternatives.group[op])
        kept = sum(
            size[v]
            for v in wiring.inputs[op]
            if wiring.producer_list[v] < half or alternatives.optional_value[v]
            if anyway.get(v, set()) <= {group}
        )
        return (kept if group >= half else 0), wiring.time_list[op]

    first = []
    for group in alternatives.groups():
        able = [op for op in alternatives.members(group).tolist() if alternatives.opens[op]]
        whole = [op for op in able if len(wiring.outputs[op]) == len(wiring.outputs[group])]
        first.append(min(whole, key=weight))
    return Choice(frozenset(first), frozenset(unpacks.values()) - frozenset(first))


def _read_anyway(wiring: Wiring, alternatives: Alternatives) -> dict[int, set[int]]:
    """Find which groups of the backward half read a value whichever of their ops runs."""
    readers_of: dict[int, set[int]] = {}
    for group in np.flatnonzero(alternatives.owed).tolist():
        if group < wiring.graph.boundary_index:
            continue
        members = alternatives.members(group).tolist()
        for v in wiring.inputs[group]:
            readers = {op for op in members if v in wiring.inputs[op]}
            if len(members) == 1 or any(
                readers.issuperset(op for op in members if w in wiring.outputs[op])
                for w in wiring.outputs[group]
            ):
                readers_of.setdefault(v, set()).add(group)
    return readers_of


def with_way(
    wiring: Wiring, alternatives: Alternatives, first: frozenset[int], op: int
) -> frozenset[int]:
    """Let an op run first, in place of those that overlap with it, and the rest by parts."""
    if op in first or not alternatives.opens[op]:
        return first
    members = alternatives.members(int(alternatives.group[op])).tolist()
    rest = set(wiring.outputs[alternatives.group[op]]) - set(wiring.outputs[op])
    ops = {op}
    for p in sorted(members, key=lambda p: wiring.time_list[p]):
        if rest and set(wiring.outputs[p]) <= rest:
            ops.add(p)
            rest -= set(wiring.outputs[p])
    return first if rest else (first - set(members)) | ops


_Place = tuple[int, ...]


@dataclass(slots=True)
class _Arrangement:
    """Collects the ops, each with its place: places are compared as tuples.

    What comes right after `(5,)` gets `(5, -1)`, the next one that does `(5, -2)`, before it.
    """

    wiring: Wiring
    alternatives: Alternatives
    choice: Choice
    _placed: list[tuple[_Place, int]] = field(default_factory=list)
    _ran: set[int] = field(default_factory=set)
    _available: set[int] = field(default_factory=set)
    _later: dict[int, int] = field(default_factory=dict)
    _again: set[int] = field(default_factory=set)
    _touched: dict[int, _Place] = field(default_factory=dict)  # where a value is read or made last
    _followed: dict[_Place, int] = field(default_factory=dict)

    @property
    def sequence(self) -> list[int]:
        """The ops in order."""
        return [op for _, op in sorted(self._placed)]

    def run(self) -> bool:
        """Place all ops; say whether everything that they read is there."""
        wiring, alternatives = self.wiring, self.alternatives
        self._later = {
            v: op
            for op in sorted(self.choice.later - self.choice.first)
            if wiring.replayable_list[op]
            for v in wiring.outputs[op]
        }
        for c in np.flatnonzero(alternatives.owed).tolist():
            members = alternatives.members(c).tolist() if alternatives.chosen[c] else [c]
            for op in members:
                if (op in self.choice.first or not alternatives.chosen[c]) and not self._place(op):
                    return False
            if not self._available.issuperset(wiring.outputs[c]):
                return False
        return True

    def _place(self, op: int) -> bool:
        """Place an op that makes values a first time, after what it needs."""
        wiring = self.wiring
        late = wiring.graph.ops[op].stage is Stage.BACKWARD
        if not self._ready(wiring.inputs[op], late=late):
            return False
        if not self._available.isdisjoint(wiring.outputs[op]):
            return False
        self._add(op)
        return True

    def _ready(self, wanted: Iterable[int], *, late: bool) -> bool:
        """Make what is read, for the backward half once more; say whether it is there."""
        for v in wanted:
            again = self._later.get(v)
            once = v in self._available and v not in self._again
            if late and again is not None and once and self._is_due(again):
                if not self._ready(self.wiring.inputs[again], late=False):
                    return False
                self._add(again)
                self._again.update(self.wiring.outputs[again])
            elif v not in self._available and not self._pack(v):
                return False
        return True

    def _is_due(self, op: int) -> bool:
        """Say whether what an op must come after has run."""
        graph, outputs = self.wiring.graph, self.wiring.outputs
        earlier = (graph.op_index[name] for name in graph.ops[op].order_after)
        return all(
            self._available.issuperset(outputs[e]) if outputs[e] else e in self._ran
            for e in earlier
        )

    def _pack(self, value: int) -> bool:
        """Place an optional op right after the last one that reads or makes what it reads."""
        wiring = self.wiring
        op = wiring.producer_list[value]
        if not wiring.graph.ops[op].optional or not wiring.replayable_list[op]:
            return False
        if not self._ready(wiring.inputs[op], late=False):
            return False
        after = max((self._touched[v] for v in wiring.inputs[op] if v in self._touched), default=())
        self._followed[after] = self._followed.get(after, 0) + 1
        self._put(op, (*after, -self._followed[after]))
        return True

    def _add(self, op: int) -> None:
        self._put(op, (len(self._placed),))

    def _put(self, op: int, place: _Place) -> None:
        self._placed.append((place, op))
        self._ran.add(op)
        self._available.update(self.wiring.outputs[op])
        for v in (*self.wiring.inputs[op], *self.wiring.outputs[op]):
            self._touched[v] = max(place, self._touched.get(v, place))
