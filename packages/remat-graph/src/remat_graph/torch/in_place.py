"""Which ops of a program can make results in the buffers of what they read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from remat_graph.torch.calls import Body, Call, TensorFacts, Variable
from remat_graph.torch.operators import operator_of

__all__ = ["overwrites_of"]

_BY_BIT = frozenset({torch.ops.aten._conj.default, torch.ops.aten._neg_view.default})


def overwrites_of(
    calls: Mapping[str, Call],
    storage: Mapping[str, str],
    facts: Mapping[str, TensorFacts],
    *,
    views: Mapping[str, Call],
    outside: Collection[str],
) -> dict[str, tuple[tuple[str, str], ...]]:
    """Find the ops that can, each with the variables that it reads and makes in their buffers.

    `storage` is the value that holds a variable; `outside` are the values that no op makes. A
    gradient that came from outside is not written to: others may hold it. Nor is a view that is
    conjugate or negative by a bit, which the result would have, too.
    """
    overwrites = dict[str, tuple[tuple[str, str], ...]]()
    for op, call in calls.items():
        if call.body is not None and call.body.overwrites:
            overwrites[op] = _of_body(call, call.body)
        if not operator_of(call.target).may_overwrite or not isinstance(call.args[0], Variable):
            continue
        (result,) = call.results
        target = call.args[0].name
        value = storage[target]
        others = call.variables[1:]
        if (
            result is not None
            and value not in outside
            and value not in {storage[name] for name in others}
            and facts[target] == facts[result]
            and (target not in views or facts[target].is_whole)
            and not _has_a_bit(target, views)
        ):
            overwrites[op] = ((target, result),)
    return overwrites


def _has_a_bit(name: str, views: Mapping[str, Call]) -> bool:
    while name in views:
        if views[name].target in _BY_BIT:
            return True
        (name,) = views[name].reads
    return False


def _of_body(call: Call, body: Body) -> tuple[tuple[str, str], ...]:
    names = dict(zip(body.inputs, call.variables, strict=True))
    names |= {new: str(name) for new, name in zip(body.outputs, call.results, strict=True)}
    return tuple((names[read], names[new]) for read, new in body.overwrites)
