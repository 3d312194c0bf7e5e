"""A planned backward without what is needed only for gradients that nobody asked for.

It runs what is left in the same order, and frees where the plan does: in no more memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remat_graph import Compute, Graph, Step, leaves
from remat_graph.torch import Call, Program

__all__ = ["prune_backward"]


def prune_backward(
    steps: tuple[Step, ...], graph: Graph, program: Program, unwanted: frozenset[str]
) -> tuple[tuple[Step, ...], dict[str, Call]]:
    """Leave out what gradients of inputs other than `unwanted` do not need.

    Also gives the calls, by op, that make less than planned.
    """
    storage = program.storage
    needed = {storage[g] for name, g in program.gradients.items() if name not in unwanted}
    kept: list[Step] = []
    used: dict[str, set[str]] = {}
    for step in reversed(steps):
        if isinstance(step, Compute):
            op = graph.ops[graph.op_index[step.op]]
            if leaves(step.op):  # of which some are given out
                kept.append(step)
                continue
            if step.op not in program.writes and needed.isdisjoint(op.outputs):
                continue
            used.setdefault(step.op, set()).update(needed.intersection(op.outputs))
            needed.difference_update(op.outputs)
            needed.update(op.inputs)
        kept.append(step)
    calls = {op: program.calls[op] for op in used if op in program.calls}
    partial = {op: _making(call, used[op], storage) for op, call in calls.items()}
    return tuple(reversed(kept)), {op: c for op, c in partial.items() if c is not calls[op]}


def _making(call: Call, values: set[str], storage: Mapping[str, str]) -> Call:
    """Give the call that makes these values alone, if its operator can leave out the others."""
    schema: Any = getattr(call.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "output_mask" not in names:
        return call
    at = names.index("output_mask")
    results = tuple(name if name and storage[name] in values else None for name in call.results)
    if results == call.results or at >= len(call.args):
        return call
    mask = [bool(on and name) for on, name in zip(call.args[at], results, strict=True)]
    return replace(call, results=results, args=(*call.args[:at], mask, *call.args[at + 1 :]))
