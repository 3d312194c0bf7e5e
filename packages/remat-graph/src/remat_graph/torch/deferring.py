"""What can be run again after the forward: all of it, or what makes an output that is made later.

An output that a step does not make is made when it is read, by running ops of the forward half
again, from the inputs as they were. So each of these ops must give the same twice, and read nothing
that the forward overwrites. One that draws gives the same from the state of its generator.

Guarantee: what is left makes all else in the same way. Complexity: one pass over the ops for each
output. Limits: an output that shares its memory with another one, or gets a gradient, is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

from remat_graph.torch.calls import Call
from remat_graph.torch.program import LOSS, Program
from remat_graph.torch.recomputing import may_run_again

__all__ = ["deferrable", "forward_runs_again", "ops_making", "with_deferred"]

# What computes by the numbers of the batch, and reads its statistics to write new ones.
_UPDATES = frozenset({torch.ops.aten._native_batch_norm_legit_functional.default})


def deferrable(program: Program, least_share: float = 0.0) -> frozenset[int]:
    """Find the positions, in what the forward returns, of outputs that can be made when read.

    Those that take less than this share of the largest value are not looked at.
    """
    storage = program.storage
    results = (v for call in program.calls.values() for v in call.results if v)
    largest = max((program.facts[storage[v]].storage_bytes for v in results), default=0)
    least_bytes = max(1, int(least_share * largest))
    values = [storage[name] for name in program.handed]
    fixed = program.resident | {storage[name] for name in program.gradients.values()}
    fixed |= {storage[write.variable] for write in program.writes.values()}
    count = Counter(values)
    return frozenset(
        position
        for position, value in enumerate(values)
        if program.facts[value].storage_bytes >= least_bytes
        and position not in program.tangents.values()
        and count[value] == 1
        and value not in fixed
        and _can_run_again(program, ops_making(program, position))
    )


def ops_making(program: Program, position: int) -> tuple[str, ...]:
    """List the ops of the forward half that make an output, in the order of the program."""
    needed = {program.storage[program.handed[position]]}
    found = []
    for op in reversed(program.order[: program.order.index(LOSS)]):
        call = program.calls.get(op)
        if call is not None and needed & _made(program, call):
            found.append(op)
            needed |= _read(program, call.replay or call)
    return tuple(reversed(found))


def _can_run_again(program: Program, ops: tuple[str, ...]) -> bool:
    written = {program.storage[write.target] for write in program.writes.values()}
    calls = [program.calls[op].replay or program.calls[op] for op in ops]
    return all(
        may_run_again(call.target, call.body) and not written & _read(program, call)
        for call in calls
    )


def forward_runs_again(program: Program) -> bool:
    """Whether the forward half gives the same once it has run: nothing in it decides or is sent.

    What it overwrites may be read by what is written alone, which nothing else reads, and by a
    batch norm in training.
    """
    storage = program.storage
    targets = {storage[write.target] for write in program.writes.values()}
    written = {storage[write.variable] for write in program.writes.values()}
    forward = [program.calls.get(op) for op in program.order[: program.order.index(LOSS)]]
    made_anew: set[str] = set()  # of what was there before: another time it would be another
    for call in forward:
        if call is None:
            continue
        if not may_run_again(call.target, call.body):
            return False
        if targets & _read(program, call):
            if call.target not in _UPDATES and not _made(program, call) <= written:
                return False
            made_anew |= _made(program, call) & written
    read = {storage[name] for name in program.handed}
    read |= {value for call in program.calls.values() for value in _read(program, call)}
    return not made_anew & read


def with_deferred(program: Program, positions: frozenset[int]) -> Program:
    """Leave out what only these outputs need, of a program without alternatives; draws stay."""
    left = replace(program, deferred=positions)
    storage = program.storage
    names: Iterable[str] = (
        *left.held,
        *program.gradients.values(),
        *program.tangents,
        *(write.variable for write in program.writes.values()),
    )
    needed = {storage[name] for name in names}
    calls: dict[str, Call] = {}
    for op in reversed([op for op in program.order if op in program.calls]):
        call = program.calls[op]
        made = _made(program, call)
        if call.random is not None or not made or made & needed:
            calls[op] = call
            needed |= _read(program, call)
    gone = program.calls.keys() - calls.keys()
    return replace(
        left,
        calls={op: call for op, call in program.calls.items() if op in calls},
        order=tuple(op for op in program.order if op not in gone),
        backward_ops=program.backward_ops - gone,
        twins={op: twin for op, twin in program.twins.items() if not {op, twin} & gone},
    )


def _made(program: Program, call: Call) -> set[str]:
    return {program.storage[name] for name in call.results if name is not None}


def _read(program: Program, call: Call) -> set[str]:
    return {program.storage[name] for name in call.reads if name in program.storage}
