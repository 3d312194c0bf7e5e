"""Gradients that a forward computes itself by `torch.autograd.grad`, as forces or penalties.

In a graph of TorchDynamo such a gradient is one call, which reads all that autograd noted before
it. Traced, it is the operators that compute it, as any others of the forward, and the backward of
the whole differentiates them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.autograd import grad
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from remat_graph.torch.errors import CaptureError

__all__ = ["HooksRefused", "computes_gradients"]


def computes_gradients(module: GraphModule) -> bool:
    """Whether a graph calls `torch.autograd.grad`, or a graph in it does, as that of a hook."""
    return any(
        bool(part.graph.find_nodes(op="call_function", target=grad))
        for part in module.modules()
        if isinstance(part, GraphModule)
    )


class HooksRefused(TorchFunctionMode):
    """Refuses to trace a gradient of tensors that have hooks, named by the ids of what is traced.

    Autograd would call the hooks; no trace has them.
    """

    def __init__(self, hooked: Mapping[int, str]) -> None:
        super().__init__()
        self._hooked = hooked

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function.

        Raises:
            CaptureError: if it is `torch.autograd.grad` of a tensor that has hooks.
        """
        asked = [] if func is not grad else pytree.tree_leaves([args, dict(kwargs or {})])
        names = [self._hooked[id(each)] for each in asked if id(each) in self._hooked]
        if names:
            raise CaptureError(
                f"forward asks torch.autograd.grad for the gradient of {names[0]}, which has a "
                f"hook that a plan would not call"
            )
        return func(*args, **(kwargs or {}))
