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

__all__ = ["CHECKPOINT", "checkpoints_off", "with_checkpoints_of_eager", "without_checkpoints"]

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_CONTEXTS = "_checkpoint_context_fn"  # what a selective checkpoint was given, on its graph


def without_checkpoints(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, int]:
    """Copy a graph with all checkpointed calls made directly, and say how many there were.

    Without any, it is the graph itself. Parameters and buffers are shared with the copy.
    """

    def directly(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
        body, *inputs = node.args
        return graph.call_module(body.target, tuple(inputs))  # type: ignore[union-attr, arg-type]

    return _replaced(module, directly)


def with_checkpoints_of_eager(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Copy a graph that is to run as it is, with its checkpoints as they are in eager.

    TorchDynamo's are for compilers that see to random numbers themselves: run as they are, they
    draw others when they compute again.
    """

    def in_eager(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
        return graph.call_function(_checkpointed, node.args, node.kwargs)

    return _replaced(module, in_eager)[0]


def _checkpointed(body: torch.fx.GraphModule, *inputs: Any, **options: Any) -> Any:
    """Run a graph in a checkpoint."""
    options["use_reentrant"] = False  # as when it was traced
    if _CONTEXTS in body.meta:
        options["context_fn"] = body.meta[_CONTEXTS]
    return of_torch.checkpoint(body, *inputs, **options)


def _replaced(
    module: torch.fx.GraphModule, call: Callable[[torch.fx.Graph, torch.fx.Node], torch.fx.Node]
) -> tuple[torch.fx.GraphModule, int]:
    """Copy a graph with other calls in place of the checkpointed ones; say how many there were."""
    if not module.graph.find_nodes(op="call_function", target=CHECKPOINT):
        return module, 0
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = torch.fx.GraphModule(module, graph)
    copied.meta.update(module.meta)
    count = 0
    for node in graph.find_nodes(op="call_function", target=CHECKPOINT):
        body = node.args[0]
        inner, within = _replaced(getattr(module, body.target), call)
        setattr(copied, body.target, inner)
        with graph.inserting_before(node):
            called = call(graph, node)
        node.replace_all_uses_with(called)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)
        count += 1 + within
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
