"""Fewer calls for a view: of those that autograd records, many undo one another.

A linear layer's backward transposes its weight twice, and what an attention reads was viewed in two
shapes. A call of a view computes nothing, but where operators are short, a step waits for calls.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from remat_graph.torch import Call, Program, TensorFacts, Variable, operator_of, run_fused

__all__ = ["METHODS", "shortened"]

aten = torch.ops.aten

METHODS = {
    aten.as_strided.default: "as_strided",
    aten.expand.default: "expand",
    aten.permute.default: "permute",
    aten.select.int: "select",
    aten.squeeze.dim: "squeeze",
    aten.squeeze.dims: "squeeze",
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.unsqueeze.default: "unsqueeze",
    aten.view.default: "view",
}
"""Views whose method of a tensor takes the same arguments, and is called in half of the time."""

_BY_BIT = frozenset({aten._conj.default, aten._neg_view.default})  # not by shape and strides alone


def shortened(program: Program) -> dict[str, Call | str]:
    """Find the views that are what they are made of, or one call away from something further up.

    Each is replaced by the variable that it equals, or by a call of `view` that makes it at once;
    of what is laid out as planned whatever is read, by one of `as_strided`. Outputs stay tensors of
    their own.
    """
    outputs = set(program.held)
    laid_out = {
        name
        for call in program.calls.values()
        if call.target is run_fused or operator_of(call.target).is_product
        for name in call.results
    }
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
        if name in calls or name in outputs or (len(above) < 2 and not call.sequence):
            continue
        root = _root(program, name)
        if root is not None and root in laid_out:
            args = (Variable(root), facts.shape, facts.stride, facts.offset)
            calls[name] = Call(aten.as_strided.default, args, {}, (name,), sequence=False)
    return calls


def _above(program: Program, call: Call | None) -> list[str]:
    """List what a view is made of by plain views alone, furthest first."""
    above: list[str] = []
    while call is not None and operator_of(call.target).plain_view:
        above.append(call.reads[0])
        call = program.views.get(above[-1])
    return above[::-1]


def _root(program: Program, name: str) -> str | None:
    """Give what is no view and holds a view's elements, of its type; `None` if some are not so."""
    dtype = program.facts[name].dtype
    while name in program.views:
        call = program.views[name]
        name = call.reads[0]
        if (
            call.target in _BY_BIT
            or name not in program.facts
            or program.facts[name].dtype != dtype
        ):
            return None
    return name if not dtype.is_complex else None


def _is_view(base: TensorFacts, facts: TensorFacts) -> bool:
    """Whether one call of `view` makes a tensor of these facts."""
    if base.dtype != facts.dtype or base.offset != facts.offset:
        return False
    tensor = torch.empty_strided(base.shape, base.stride, dtype=base.dtype, device="meta")
    try:
        return tensor.view(facts.shape).stride() == facts.stride
    except (RuntimeError, ValueError):  # no strides do; under a fake mode that is a ValueError
        return False
