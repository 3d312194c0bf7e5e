"""Custom `autograd.Function`s that ask for no zeros: `ctx.set_materialize_grads(False)`.

Their backward gets `None` for an output of which no gradient comes, and may give `None` on: then a
parameter has no gradient, and an optimizer leaves it alone. In a graph each output has a gradient,
of zeros if none comes. So a function of several outputs that asks so runs between graphs.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.lists import BaseListVariable

__all__ = ["break_without_zeros"]

_ASKED = "materialize_grads"


def break_without_zeros(original: Any) -> Any:
    """Have Dynamo break at a function of several outputs that asks for no zeros."""

    def trace_forward_graph(self: Any, tx: Any, ctx: Any, *rest: Any) -> Any:
        traced = original(self, tx, ctx, *rest)
        changed = tx.output.side_effects.store_attr_mutations.get(ctx, {})
        asked = changed.get(_ASKED)
        if asked is not None and _is_false(asked) and _count_tensors(traced[1]) > 1:
            unimplemented(
                gb_type="autograd.Function without zeros for gradients that do not come",
                context="ctx.set_materialize_grads(False)",
                explanation="A custom autograd.Function calls ctx.set_materialize_grads(False), "
                "and in a graph a gradient that does not come is zero.",
                hints=[],
            )
        return traced

    return trace_forward_graph


def _is_false(asked: Any) -> bool:
    return not (asked.is_python_constant() and asked.as_python_constant())


def _count_tensors(output: Any) -> int:
    items = output.items if isinstance(output, BaseListVariable) else [output]
    return sum(item.is_tensor() for item in items)
