"""Which ops make a value, and from when on: what alternatives and optional ops add to a graph.

A *group* is an owed op and its alternatives, numbered by the owed op; its *place* in a schedule is
where it first runs, after all groups before it. What is optional belongs to no group. A value can
exist from the place of its group on; what an optional op makes, as soon as all that it reads can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat_graph import InvalidSchedule, simulate
from remat_solvers.core.wiring import Floats, Ints, Wiring, expand

__all__ = [
    "Alternatives",
    "is_in_order",
    "keeps_order",
    "least_time",
    "lightest_ways",
    "store_all_sequence",
]

_MOST_OUTPUTS = 10  # of a group, of which the cheapest way is searched exactly


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """The groups and places of the ops of a wiring, and the further ops that make its values.

    `group[i]` is the owed op for which op `i` stands, itself if there is no other; `place[i]` the
    group at whose place it can first run (-1: from the start on), `rank[v]` that at which value `v`
    can first exist. `owed`, `optional` and `chosen` say of an op whether it is owed, whether it is
    optional, and whether its group has a choice; `optional_value` whether its producer is.
    `more_op[j]` makes `more_value[j]` besides its producer. `beginners[v]` are the ops that can be
    the first to make an owed value of a group with a choice; `opens[i]` says whether op `i` needs
    nothing that its own group makes.
    """

    group: Ints
    place: Ints
    rank: Ints
    owed: NDArray[np.bool_]
    optional: NDArray[np.bool_]
    chosen: NDArray[np.bool_]
    opens: NDArray[np.bool_]
    optional_value: NDArray[np.bool_]
    more_value: Ints
    more_op: Ints
    beginners: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, wiring: Wiring) -> Alternatives:
        """Read a wiring; arrays without content where there are no alternatives."""
        ops, count = wiring.graph.ops, wiring.op_count
        group = np.arange(count)
        everything = np.ones(count, dtype=np.bool_)
        none = np.zeros(0, dtype=np.int64)
        if not wiring.graph.has_alternatives:
            rank = wiring.producer
            optional = np.zeros(wiring.value_count, dtype=np.bool_)
            return cls(
                group=group,
                place=group,
                rank=rank,
                owed=everything,
                optional=~everything,
                chosen=~everything,
                opens=everything,
                optional_value=optional,
                more_value=none,
                more_op=none,
                beginners={},
            )
        index = wiring.graph.op_index
        for i, op in enumerate(ops):
            if op.alternative_of is not None:
                group[i] = index[op.alternative_of]
        owed = np.array([op.owed for op in ops])
        free = np.array([op.optional for op in ops])
        rank, place = wiring.producer.copy(), group.copy()
        sources_of: dict[int, frozenset[int]] = {}
        for i, op in enumerate(ops):
            since = max((int(rank[v]) for v in wiring.inputs[i]), default=-1)
            place[i] = since if op.optional else max(since, int(group[i]))
            if op.optional:
                sources = _with_sources(wiring.inputs[i], sources_of)
                for v in wiring.outputs[i]:
                    rank[v] = since
                    sources_of[v] = sources | {v}
        chosen = np.zeros(count, dtype=np.bool_)
        chosen[group[~owed & ~free]] = True
        out_op = wiring.out_op
        more = out_op != wiring.producer[wiring.out_value]
        beginners: dict[int, tuple[int, ...]] = {}
        for i, v in zip(out_op.tolist(), wiring.out_value.tolist(), strict=True):
            here = chosen[group[i]] and place[i] == group[i]
            if here and v not in _with_sources(wiring.inputs[i], sources_of):
                beginners[v] = (*beginners.get(v, ()), i)
        opens = np.array(
            [all(rank[v] < group[i] for v in wiring.inputs[i]) for i in range(count)], np.bool_
        )
        return cls(
            group=group,
            place=place,
            rank=rank,
            owed=owed,
            optional=free,
            chosen=chosen[group] & ~free,
            opens=opens & ~free,
            optional_value=free[wiring.producer],
            more_value=wiring.out_value[more],
            more_op=out_op[more],
            beginners=beginners,
        )

    @property
    def plain(self) -> bool:
        """Whether there are no alternatives, and nothing is optional."""
        return bool(self.owed.all())

    def further(self, values: Ints) -> tuple[Ints, Ints]:
        """List the ops that make values besides their producers: of which value, which op."""
        if not len(self.more_value):
            return self.more_value, self.more_op
        order = np.argsort(values, kind="stable")
        since, until = (
            np.searchsorted(values[order], self.more_value, side) for side in ("left", "right")
        )
        which = [order[a:b] for a, b in zip(since, until, strict=True)]
        return np.concatenate(which), np.repeat(self.more_op, until - since)

    def members(self, group: int) -> Ints:
        """List the ops of a group."""
        members: Ints = np.flatnonzero((self.group == group) & ~self.optional)
        return members

    def groups(self) -> list[int]:
        """List the groups that have a choice, in order."""
        groups: list[int] = np.flatnonzero(self.chosen & self.owed).tolist()
        return groups


def _with_sources(values: tuple[int, ...], sources_of: dict[int, frozenset[int]]) -> frozenset[int]:
    """Collect values, and all that what is optional among them is made of."""
    sources = frozenset(values)
    for v in values:
        sources |= sources_of.get(v, frozenset())
    return sources


def _fewest(wanted: tuple[int, ...], ways: list[tuple[float, tuple[int, ...]]]) -> float:
    """Return the least cost of ways that together make all that is wanted; infinite if none do.

    Exact for up to ten wanted values; a lower bound beyond.
    """
    if len(wanted) > _MOST_OUTPUTS:
        return max(
            min((cost for cost, outputs in ways if v in outputs), default=np.inf) for v in wanted
        )
    bit = {v: 1 << i for i, v in enumerate(wanted)}
    masks = [(cost, sum(bit[v] for v in outputs)) for cost, outputs in ways]
    least = [0.0] + [np.inf] * ((1 << len(wanted)) - 1)
    for done in range(len(least)):
        for cost, mask in masks:
            least[done | mask] = min(least[done | mask], least[done] + cost)
    return float(least[-1])


def least_time(wiring: Wiring, alternatives: Alternatives | None = None) -> float:
    """Time that every schedule takes: that of each group in its cheapest way."""
    if not wiring.graph.has_alternatives:
        return wiring.graph.time
    alternatives = Alternatives.of(wiring) if alternatives is None else alternatives
    total = [
        wiring.time_list[i]
        for i in np.flatnonzero(alternatives.owed & ~alternatives.chosen).tolist()
    ]
    for c in alternatives.groups():
        wanted = wiring.outputs[c]
        members = {p for v in wanted for p in alternatives.beginners[v]}
        ways = [
            (
                wiring.time_list[p],
                tuple(v for v in wiring.outputs[p] if p in alternatives.beginners[v]),
            )
            for p in sorted(members)
        ]
        total.append(_fewest(wanted, ways))
    return math.fsum(total)


def lightest_ways(wiring: Wiring, alternatives: Alternatives, weight: Floats) -> list[list[int]]:
    """Choose for each group with a choice a way of little weight, which reads nothing optional.

    One op that makes everything, or ops that make everything between them, each value once.
    """
    lightest: list[list[int]] = []
    for c in alternatives.groups():
        whole = set(wiring.outputs[c])
        able = [
            p
            for p in alternatives.members(c).tolist()
            if alternatives.opens[p]
            and not alternatives.optional_value[list(wiring.inputs[p])].any()
        ]
        ways = [[p] for p in able if set(wiring.outputs[p]) == whole]
        cover: list[int] = []
        covered: set[int] = set()
        for p in sorted(able, key=lambda p: float(weight[p])):
            if covered.isdisjoint(wiring.outputs[p]) and len(wiring.outputs[p]) < len(whole):
                cover.append(p)
                covered.update(wiring.outputs[p])
        if covered == whole:
            ways.append(sorted(cover))
        lightest.append(min(ways, key=lambda ops: math.fsum(float(weight[p]) for p in ops)))
    return lightest


def store_all_sequence(wiring: Wiring) -> Ints:
    """List all owed ops in order, those of groups with a choice in the fastest way that there is.

    Of ways that are as fast it is one of least workspace.
    """
    alternatives = Alternatives.of(wiring)
    if alternatives.plain:
        return np.arange(wiring.op_count)
    workspace = wiring.workspace / max(1, int(wiring.workspace.max(initial=0)))
    weight = wiring.time + 1e-9 * (wiring.time[wiring.time > 0].min(initial=1.0)) * workspace
    chosen = {
        int(alternatives.group[ops[0]]): ops for ops in lightest_ways(wiring, alternatives, weight)
    }
    sequence = [p for c in np.flatnonzero(alternatives.owed).tolist() for p in chosen.get(c, [c])]
    return np.array(sequence, dtype=np.int64)


def is_in_order(wiring: Wiring, sequence: Ints) -> bool:
    """Say whether a sequence is legal and makes what all groups owe in the order of the graph."""
    if not keeps_order(wiring, sequence):
        return False
    try:
        simulate(wiring.graph, expand(wiring, sequence))
    except InvalidSchedule:
        return False
    return True


def keeps_order(wiring: Wiring, sequence: Ints) -> bool:
    """Say whether a legal sequence makes what all groups owe in the order of the graph."""
    alternatives = Alternatives.of(wiring)
    available: set[int] = set()
    owed = np.flatnonzero(alternatives.owed).tolist()
    ends = {c: set(wiring.outputs[c]) for c in owed}
    at = 0
    for op in sequence.tolist():
        if not available.issuperset(wiring.inputs[op]):
            return False
        available.update(wiring.outputs[op])
        if not alternatives.optional[op]:
            group = int(alternatives.group[op])
            if at < len(owed) and group > owed[at]:
                return False
            if at < len(owed) and group == owed[at] and available >= ends[group]:
                at += 1
    return at == len(owed)
