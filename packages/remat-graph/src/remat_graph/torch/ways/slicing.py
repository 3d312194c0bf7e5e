"""A program in which cuts run in slices: each of the two stretches of a cut is one call.

The call stands where the last op of its stretch stood; what reads of it comes behind it. Of the
forward stretch it gives what something else reads: what the backward stretch alone reads is made
again there.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from remat_graph.torch.calls import Call, Variable
from remat_graph.torch.lowering import equivalence_of
from remat_graph.torch.program import LOSS, Program
from remat_graph.torch.ways.cuts import Cut
from remat_graph.torch.ways.slice_by_slice import SlicedBody, numbered

__all__ = ["bytes_of_cut", "chosen_cuts", "in_slices", "read_as_traced", "run_in_slices"]


def run_in_slices(body: SlicedBody, slices: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Run a body in so many slices, of as equal sizes as can be."""
    return body.run(inputs, body.bounds(slices))


def read_as_traced(call: Call) -> tuple[str, ...]:
    """List what a call reads as it was traced, not for calls that run again in it."""
    if call.target is not run_in_slices:
        return call.reads
    body, _, *inputs = call.args
    pairs = zip(inputs, body.body.inputs, strict=True)
    return tuple(variable.name for variable, name in pairs if name in body.read_as_traced)


def chosen_cuts(
    kinds: Sequence[Sequence[Cut]], sliced: Iterable[tuple[int, int]]
) -> list[tuple[Cut, int]]:
    """List the cuts of these kinds, by position, each with the number of slices it can have."""
    return [
        (cut, min(slices, cut.units))
        for kind, slices in sliced
        for cuts in kinds[kind : kind + 1]  # for other gradients there may be fewer
        for cut in cuts
    ]


def in_slices(program: Program, chosen: Iterable[tuple[Cut, int]]) -> Program:
    """Write a program without alternatives anew, with each of these cuts in so many slices.

    No op may be in two of them.
    """
    chosen = list(chosen)
    if not chosen:
        return program
    calls, groups = dict(program.calls), dict[str, str]()
    forwards: dict[str, tuple[Cut, int]] = {}
    twins: dict[str, str] = {}
    for cut, slices in chosen:
        forward = f"{cut.forward.ops[-1]}__in_{slices}_slices"
        backward = f"{cut.backward.own[-1]}__in_{slices}_slices"
        groups.update(dict.fromkeys(cut.forward.ops, forward))
        groups.update(dict.fromkeys(cut.backward.own, backward))
        calls[forward] = _call(cut.forward.body, slices)
        calls[backward] = _call(cut.backward.body, slices)
        forwards[forward], twins[backward] = (cut, slices), forward
    for op in groups:
        del calls[op]
    needed = _read_by(program, calls)
    for name, (cut, slices) in forwards.items():
        outputs = cut.forward.body.body.outputs
        needed_outputs = {output for output in outputs if program.storage[output] in needed}
        calls[name] = _call(cut.forward.body.giving(needed_outputs), slices)
    kept = _values_of(program, calls)
    gone = _values_of(program, {op: program.calls[op] for op in groups}) - kept
    storage = {name: value for name, value in program.storage.items() if value not in gone}
    facts = {name: program.facts[name] for name in storage}
    new = {*forwards, *twins}
    others = {op: twin for op, twin in program.twins.items() if op not in groups}
    return replace(
        program,
        calls=calls,
        views={name: call for name, call in program.views.items() if name in storage},
        order=_order(program, calls, groups),
        storage=storage,
        facts=facts,
        backward_ops=(program.backward_ops - groups.keys()) | twins.keys(),
        twins={**{op: groups.get(twin, twin) for op, twin in others.items()}, **twins},
        equivalence={
            op: equivalence_of(call, facts) if op in new else program.equivalence[op]
            for op, call in calls.items()
        },
        rounding=(program.rounding - groups.keys()) | new,
        provenance={groups.get(op, op): origin for op, origin in program.provenance.items()},
    )


def bytes_of_cut(program: Program, cut: Cut, slices: int, kept: Collection[str]) -> int:
    """Predict the most that a cut in so many slices needs, with what it reads and gives.

    Its forward stretch gives what the backward one does not make again. Values that are `kept`
    anyway do not count.
    """
    slices = min(slices, cut.units)
    outputs = set(cut.forward.body.body.outputs).difference(cut.backward.body.again)
    calls = {
        "forward": _call(cut.forward.body.giving(outputs), slices),
        "backward": _call(cut.backward.body, slices),
    }
    alone = replace(program, calls=calls, order=tuple(calls))
    return max(alone.touched_bytes(op, kept) + call.workspace_bytes for op, call in calls.items())


def _call(sliced: SlicedBody, slices: int) -> Call:
    body = numbered(sliced)
    return Call(
        run_in_slices,
        (body, slices, *map(Variable, sliced.body.inputs)),
        {},
        sliced.body.outputs,
        sequence=True,
        workspace_bytes=body.workspace_bytes(slices),
        body=body.body,
    )


def _read_by(program: Program, calls: Mapping[str, Call]) -> set[str]:
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
    program: Program, calls: Mapping[str, Call], groups: Mapping[str, str]
) -> tuple[str, ...]:
    """Put a group where its last op stood, and what reads of it behind it; draws stay in order."""
    place = {groups.get(op, op): at for at, op in enumerate(program.order)}
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
