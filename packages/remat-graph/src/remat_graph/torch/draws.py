"""Numbers drawn in place, in the order in which eager draws them.

`x.bernoulli_(p)`, as dropout in place calls it, draws in the order in which `x` lies in memory.
Functionalised it is `bernoulli(x, p)`, which draws in the order of the dimensions: where `x` is
transposed, other elements are dropped. On a view of `x` whose dimensions are in the order of memory
the two are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DrawnInPlace", "draws_out_of_order"]

_FUNCTIONAL = torch.ops.aten.bernoulli.p
_IN_PLACE = torch.ops.aten.bernoulli_.float


def draws_out_of_order(graph: torch.fx.Graph) -> bool:
    """Whether a functionalised graph may draw in another order than eager."""
    nodes = graph.find_nodes(op="call_function", target=_FUNCTIONAL)
    return any(_order(node.args[0].meta["val"]) is not None for node in nodes)


class DrawnInPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets what draws in place do so on a view in the order of memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        order = _order(args[0]) if func is _IN_PLACE else None
        if order is None:
            return func(*args, **(kwargs or {}))
        func(args[0].permute(order), *args[1:], **(kwargs or {}))
        return args[0]


def _order(tensor: torch.Tensor) -> list[int] | None:
    """Give the dimensions as they lie in memory; `None` if they are in this order."""
    dimensions = list(range(tensor.dim()))
    sized = [d for d in dimensions if tensor.shape[d] > 1]
    rest = [d for d in dimensions if tensor.shape[d] <= 1]
    ordered = sorted(sized, key=tensor.stride().__getitem__, reverse=True)
    return None if ordered == sized else [*ordered, *rest]
