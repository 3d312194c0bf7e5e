"""Backwards of autograd: where one begins, and whether one is under way in this thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat_graph.torch import flatten

__all__ = ["before_backward", "within_backward"]


def before_backward(tensors: Any, call: Callable[[], None]) -> None:
    """Call what is to be called where a backward comes to one of these tensors."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begins(_: Any) -> None:
        call()

    for tensor in flatten(tensors)[0]:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(begins)


def within_backward() -> bool:
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1
