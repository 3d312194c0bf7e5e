"""Checkpoints of the model's own, taken out of what is planned and of what a fraction is of.

A call of `torch.utils.checkpoint`, by the user or by a library's switch for gradient checkpointing,
is one node of a graph that TorchDynamo found, which holds the graph of what is checkpointed. It is
planned as any other code: what is kept and what is computed again is the plan's to say. The model,
and a call that runs as it is, keep their checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as of_torch

__all__ = ["checkpoints_off", "without_checkpoints"]

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def without_checkpoints(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, int]:
    """Copy a graph with all checkpointed calls made directly, and say how many there were.

    Without any, it is the graph itself. Parameters and buffers are shared with the copy.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = torch.fx.GraphModule(module, graph)
    count = 0
    for node in graph.find_nodes(op="call_function", target=_CHECKPOINT):
        body, *inputs = node.args
        inner, within = without_checkpoints(getattr(module, body.target))
        setattr(copied, body.target, inner)
        with graph.inserting_before(node):
            called = graph.call_module(body.target, tuple(inputs))
        node.replace_all_uses_with(called)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)
        count += 1 + within
    if not count:
        return module, 0
    copied.recompile()
    return copied, count


@contextlib.contextmanager
def checkpoints_off() -> Iterator[None]:
    """Let checkpoints of this thread keep what they would compute again.

    For one who holds `process_lock`: what is set is torch's, and put back.
    """
    here = threading.get_ident()
    hooked, function = of_torch._checkpoint_without_reentrant_generator, of_torch.CheckpointFunction

    def direct(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() == here:
            yield
        else:
            yield from hooked(*args, **kwargs)

    class Direct:
        """Stands in for the function of reentrant checkpoints."""

        @staticmethod
        def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            """Run what is checkpointed."""
            if threading.get_ident() == here:
                return run(*args)
            return function.apply(run, preserve, *args)  # type: ignore[no-untyped-call]

    of_torch._checkpoint_without_reentrant_generator = direct
    of_torch.CheckpointFunction = Direct  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        of_torch._checkpoint_without_reentrant_generator = hooked
        of_torch.CheckpointFunction = function  # type: ignore[misc]
