"""Fewer calls for a view: of those that autograd records, many undo one another.

A linear layer's backward transposes its weight twice, and what an attention reads was viewed in two
shapes. A call of a view computes nothing, but where operators are short, a step waits for calls.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from remat_graph.torch import Call, Program, TensorFacts, Variable, operator_of

__all__ = ["shortened"]

aten = torch.ops.aten


def shortened(program: Program) -> dict[str, Call | str]:
    """Find the views that are what they are made of, or one call of `view` away from it.

    Each is replaced by the variable that it equals, or by the call that makes it of one further up.
    Outputs stay tensors of their own.
    """
    outputs = set(program.held)
    calls: dict[str, Call | str] = {}
    for name, call in program.views.items():
        above = _above(program, call)
        facts = program.facts[name]
        equal = next((other for other in above if program.facts[other] == facts), None)
        if equal is not None:
            if name not in outputs:
                calls[name] = equal
        elif call.target is aten.view.default:
            base = next((b for b in above if _is_view(program.facts[b], facts)), None)
            if base is not None and base != call.reads[0]:
                calls[name] = replace(call, args=(Variable(base), list(facts.shape)))
    return calls


def _above(program: Program, call: Call | None) -> list[str]:
    """List what a view is made of by plain views alone, furthest first."""
    above: list[str] = []
    while call is not None and operator_of(call.target).plain_view:
        above.append(call.reads[0])
        call = program.views.get(above[-1])
    return above[::-1]


def _is_view(base: TensorFacts, facts: TensorFacts) -> bool:
    """Whether one call of `view` makes a tensor of these facts."""
    if base.dtype != facts.dtype or base.offset != facts.offset:
        return False
    tensor = torch.empty_strided(base.shape, base.stride, dtype=base.dtype, device="meta")
    try:
        return tensor.view(facts.shape).stride() == facts.stride
    except (RuntimeError, ValueError):  # no strides do; under a fake mode that is a ValueError
        return False
