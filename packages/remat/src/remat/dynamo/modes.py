"""Modes of torch that a graph sets by calls, such as `torch.set_grad_enabled`.

A plan has the operators of a graph alone, each as it is in its mode. The code behind a break is in
the mode that the graph before it left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Modes"]

_SETTERS = (
    torch._C._set_grad_enabled, torch._C._set_deterministic_algorithms, torch.set_default_dtype,
    torch.set_float32_matmul_precision,
)  # fmt: skip
_OF_AUTOCAST = torch.set_autocast_enabled, torch.set_autocast_dtype
_SETS_AUTOCAST = (
    "it sets autocast by torch.set_autocast_enabled, by which tracing it would change what it "
    "traces; use `with torch.autocast`"
)


class Modes:
    """What a graph leaves set, and why it is to run as it is, if it is."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self._left: dict[Any, Callable[[], Any]] = {}
        self.refusal: str | None = None
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in _SETTERS:
                leave = functools.partial(node.target, *node.args, **node.kwargs)
                self._left[node.target] = leave
            elif node.target in _OF_AUTOCAST:
                self.refusal = _SETS_AUTOCAST

    def leave(self) -> None:
        """Set what the graph leaves set."""
        for leave in self._left.values():
            leave()
