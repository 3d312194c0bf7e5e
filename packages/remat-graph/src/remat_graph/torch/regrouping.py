"""A program in which groups of ops are one call each: a stretch in slices, a compiled group.

The call of a group stands where the last of its ops stood; what reads of it comes behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from remat_graph.torch.calls import Call
from remat_graph.torch.lowering import equivalence_of
from remat_graph.torch.program import LOSS, Program

__all__ = ["values_read", "with_groups"]


def with_groups(
    program: Program,
    calls: Mapping[str, Call],
    groups: Mapping[str, str],
    backward: Mapping[str, str | None],
    beside: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """Write a program without alternatives anew, with these calls by the name of their op.

    `groups` names, for each op that is gone, the new one in whose place it stands. `backward` has
    the new ops of the backward half, each with its twin, if it has one. `beside` names new ops that
    stand for no op of their own, each with the one at whose place it stands.
    """
    new = calls.keys() - program.calls.keys()
    kept = _values_of(program, calls)
    gone = _values_of(program, {op: program.calls[op] for op in groups}) - kept
    storage = {name: value for name, value in program.storage.items() if value not in gone}
    facts = {name: program.facts[name] for name in storage}
    twins = {op: groups.get(twin, twin) for op, twin in program.twins.items() if op not in groups}
    twins |= {op: twin for op, twin in backward.items() if twin is not None}
    return replace(
        program,
        calls=calls,
        views={name: call for name, call in program.views.items() if name in storage},
        order=_order(program, calls, groups, beside),
        storage=storage,
        facts=facts,
        backward_ops=(program.backward_ops - groups.keys()) | backward.keys(),
        twins={op: twin for op, twin in twins.items() if twin in calls},
        equivalence={
            op: equivalence_of(call, facts) if op in new else program.equivalence[op]
            for op, call in calls.items()
        },
        rounding=(program.rounding - groups.keys()) | new,
        provenance={
            **{groups.get(op, op): origin for op, origin in program.provenance.items()},
            **{
                new: program.provenance[op]
                for new, op in beside.items()
                if op in program.provenance
            },
        },
    )


def values_read(program: Program, calls: Mapping[str, Call]) -> set[str]:
    """Name the values that calls, writes and the user read."""
    names = {*program.held, *program.gradients.values()}
    names.update(write.variable for write in program.writes.values())
    names.update(name for call in calls.values() for name in call.reads)
    return {program.storage[name] for name in names if name in program.storage}


def _values_of(program: Program, calls: Mapping[str, Call]) -> set[str]:
    return {
        program.storage[name]
        for call in calls.values()
        for name in call.results
        if name is not None
    }


def _order(
    program: Program,
    calls: Mapping[str, Call],
    groups: Mapping[str, str],
    beside: Mapping[str, str],
) -> tuple[str, ...]:
    """Put a group where its last op stood, and what reads of it behind it; draws stay in order."""
    place = {groups.get(op, op): at for at, op in enumerate(program.order)}
    place.update((new, program.order.index(op)) for new, op in beside.items())
    loss = program.order.index(LOSS)
    storage = program.storage
    maker = {storage[n]: op for op, call in calls.items() for n in call.results if n is not None}
    first = [op for op in place if place[op] < loss and op in calls]
    last = [op for op in place if place[op] > loss]
    between = [op for op in program.order if op in program.writes or op == LOSS]
    return (*_sorted(first, calls, maker, storage, place), *between,
            *_sorted(last, calls, maker, storage, place))  # fmt: skip


def _sorted(
    ops: Collection[str],
    calls: Mapping[str, Call],
    maker: Mapping[str, str],
    storage: Mapping[str, str],
    place: Mapping[str, int],
) -> Sequence[str]:
    """Sort ops by what they read of one another, else by their places."""
    own = set(ops)
    behind: dict[str, set[str]] = {}
    drawn: dict[torch.device, str] = {}
    for op in sorted(ops, key=lambda op: place[op]):
        call = calls[op]
        values = (storage[name] for name in call.reads if name in storage)
        behind[op] = {maker[value] for value in values if maker.get(value) in own} - {op}
        if call.random is not None:
            if call.random in drawn:
                behind[op].add(drawn[call.random])
            drawn[call.random] = op
    after: dict[str, list[str]] = {op: [] for op in ops}
    for op, sources in behind.items():
        for source in sources:
            after[source].append(op)
    ready = [(place[op], op) for op in ops if not behind[op]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, op = heapq.heappop(ready)
        order.append(op)
        for reader in after[op]:
            behind[reader].discard(op)
            if not behind[reader]:
                heapq.heappush(ready, (place[reader], reader))
    return order
