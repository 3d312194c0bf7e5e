"""Numbers drawn in place, in the order in which eager draws them, and none where it draws none.

`x.bernoulli_(p)`, as dropout in place calls it, draws in the order in which `x` lies in memory.
Functionalised it is `bernoulli(x, p)`, which draws in the order of the dimensions: where `x` is
transposed, other elements are dropped. On a view of `x` whose dimensions are in the order of memory
the two are the same. How `x` really lies is known only after tracing (`strides.py`): each such node
of a graph is one drawn in place, and given its view then.

A dropout with a probability of 1 draws nothing in eager. Traced, it would be an operator that does.
One that drops nothing gives its input, not a copy: what is written to the one is to the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch._C import DispatchKey
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from remat_graph.torch.tracing.overriding import overridden

__all__ = [
    "DrawnAnew",
    "drawn_in_order_of_memory",
    "dropouts_of_all",
    "may_draw_in_order_of_dimensions",
]

aten = torch.ops.aten

_DRAW = aten.bernoulli.p
# What functionalising turns `dropout` in place into, no fact about these operators.
_MADE_TO_BE_DRAWN = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}


def dropouts_of_all() -> contextlib.AbstractContextManager[None]:
    """Let dropouts of this thread's traces that drop all or nothing be what they are in eager."""
    dropout = aten.dropout.default
    traced = dropout.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def drop(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not (train and p):
            return x
        if p == 1:
            return x * torch.zeros((), dtype=x.dtype, device=x.device)
        result: torch.Tensor = traced(x, p, train)
        return result

    return overridden(dropout, drop, DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def may_draw_in_order_of_dimensions(graph: Graph) -> bool:
    """Whether a functionalised graph may have a node that eager would not draw in place.

    What is drawn in place has just been made for it, as a rule.
    """
    draws = graph.find_nodes(op="call_function", target=_DRAW)
    drawn = [node.all_input_nodes[0] for node in draws]
    return any(
        node.target not in _MADE_TO_BE_DRAWN or _order(node.meta["val"]) is not None
        for node in drawn
    )


class DrawnAnew(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets what draws in the order of dimensions do so in place, on a new tensor in that order."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        if func is not _DRAW:
            return func(*args, **(kwargs or {}))
        new = args[0].new_empty(args[0].shape)
        return new.bernoulli_(*args[1:], **(kwargs or {}))


def drawn_in_order_of_memory(node: Node) -> list[Node]:
    """Make a node that draws one that reads what is drawn in the order of memory, where it must.

    Given are the new nodes before it. What it draws on must have been run on fake tensors.
    """
    order = _order(node.all_input_nodes[0].meta["fake"]) if node.target is _DRAW else None
    if order is None:
        return []
    with node.graph.inserting_before(node):
        view = node.graph.call_function(aten.permute.default, (node.args[0], order))
        draw = node.graph.call_function(_DRAW, (view, *node.args[1:]), node.kwargs)
    view.meta, draw.meta = dict(node.meta), dict(node.meta)
    node.target, node.kwargs = aten.permute.default, {}
    node.args = (draw, [order.index(dimension) for dimension in range(len(order))])
    return [view, draw]


def _order(tensor: torch.Tensor) -> list[int] | None:
    """Give the dimensions as they lie in memory; `None` if they are in this order."""
    dimensions = list(range(tensor.dim()))
    sized = [d for d in dimensions if tensor.shape[d] > 1]
    rest = [d for d in dimensions if tensor.shape[d] <= 1]
    ordered = sorted(sized, key=tensor.stride().__getitem__, reverse=True)
    return None if ordered == sized else [*ordered, *rest]
