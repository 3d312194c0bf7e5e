"""Reads of memory that others may write to, and that eager would not have kept.

Inputs, parameters, buffers and outputs are not the plan's alone. Of what eager keeps for its own
backward it sees a change in place, by torch's count, and so does a plan, which saves it the same
way. What only a plan reads again is compared by checksums: then a change is seen that is not
counted, too. So are outputs whose changes torch counts apart from those of the memory that they
view, as it does for `_unsafe_view`, which a bias-free linear layer makes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remat_graph.torch import Program, read_as_traced

__all__ = ["ExposedReads", "exposed_reads"]

_SMALLER = 8  # times, for what comes of a value to be compared in its place


@dataclass(frozen=True, slots=True)
class ExposedReads:
    """The values that are compared before a backward, and the ops whose results are in their place.

    These are ops that read a little of something large, as an embedding does.
    """

    values: frozenset[str]
    ops: frozenset[str]


def exposed_reads(program: Program) -> ExposedReads:
    """Find what to compare where a backward reads it or runs it again."""
    storage = program.storage
    kept, again, readers = set(), set(), dict[str, list[str]]()
    for op, call in program.calls.items():
        read = {storage[name] for name in call.reads if name in storage}
        if op in program.backward_ops and op not in program.alternatives:
            as_traced = read_as_traced(call)
            kept |= {storage[name] for name in as_traced if name in storage}
            others = set(call.reads).difference(as_traced)  # of the same value, it may be
            again |= {storage[name] for name in others if name in storage}
        for value in read:
            readers.setdefault(value, []).append(op)
    handed = {storage[name] for name in program.held}
    values = ((handed | program.resident) - (kept - again)) | (handed & _uncounted(program))
    ops = {
        value: frozenset(readers.get(value, ()))
        for value in program.resident & values
        if _makes_little(program, value, readers.get(value, []))
    }
    return ExposedReads(frozenset(values - ops.keys()), frozenset().union(*ops.values()))


def _uncounted(program: Program) -> set[str]:
    """Find the values with views that do not say so: torch counts their changes apart."""
    return {
        program.storage[name]
        for name, call in program.views.items()
        if isinstance(call.target, torch._ops.OpOverload)
        and not any(item.alias_info for item in call.target._schema.returns)
    }


def _makes_little(program: Program, value: str, readers: list[str]) -> bool:
    """Whether what is computed from a value is far smaller, and the same each time."""
    result_bytes = 0
    for op in readers:
        call = program.calls[op]
        apart = op in program.alternatives or op in program.backward_ops
        if apart or call.random is not None or call.replay is not None:
            return False
        results = (name for name in call.results if name is not None)
        result_bytes += sum(program.facts[name].storage_bytes for name in results)
    return 0 < _SMALLER * result_bytes < program.facts[value].storage_bytes
