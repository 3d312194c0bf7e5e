"""Inputs of a joint graph: those that are one tensor, and those whose old data is still read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.rewrites.propagate import view_closure
from remat_graph.torch.tracing.joint import Joint, Key, is_backward

__all__ = ["merge_tied", "pin_mutated"]

aten = torch.ops.aten


def merge_tied(joint: Joint, tensors: Mapping[Key, torch.Tensor]) -> Joint:
    """Make inputs that are the same tensor one input, whose gradient is the sum of theirs.

    They are summed in the order in which they are made, as autograd does.

    Raises:
        CaptureError: if such an input is changed in place.
    """
    inputs, gradients = dict(joint.inputs), dict(joint.gradients)
    mutated = {node for node, _ in joint.mutations}
    first: dict[int, Node] = {}
    summed: dict[Node, list[Node]] = {}
    for node, role in joint.inputs.items():
        keep = first.setdefault(id(tensors[role]), node)
        if keep is node:
            continue
        if node in mutated or keep in mutated:
            raise CaptureError(
                f"{role[0]} {role[1]!r} is the same tensor as {joint.inputs[keep][1]!r} and is "
                f"changed in place; clone one of them"
            )
        node.replace_all_uses_with(keep)
        del inputs[node]
        if node in gradients:
            own = [gradients[keep]] if keep in gradients else []
            summed.setdefault(keep, own).append(gradients.pop(node))
        joint.graph.erase_node(node)
    for keep, parts in summed.items():
        gradients[keep] = _sum(joint.graph, parts)
    return dataclasses.replace(joint, inputs=inputs, gradients=gradients)


def _sum(graph: Graph, parts: Sequence[Node]) -> Node:
    total, *later = sorted(parts)  # nodes of a graph compare by their position
    for node in later:
        with graph.inserting_after(max(total, node)):
            total = graph.call_function(aten.add.Tensor, (total, node))
        total.meta = {"partitioner_tag": "is_backward", "val": node.meta["val"]}
    return total


def pin_mutated(joint: Joint) -> Joint:
    """Copy, before it is changed, each mutated input whose old data the backward pass reads."""
    for node, _ in joint.mutations:
        views = view_closure(node)
        readers = {user for view in views for user in view.users}
        if not any(is_backward(user) for user in readers):
            continue
        with joint.graph.inserting_before(_first_call(joint.graph)):
            pin = joint.graph.call_function(
                aten.clone.default, (node,), {"memory_format": torch.preserve_format}
            )
        pin.meta = {"val": node.meta["val"]}
        for user in [user for user in node.users if user is not pin]:
            user.replace_input_with(node, pin)
    return joint


def _first_call(graph: Graph) -> Node:
    first: Node = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    return first
