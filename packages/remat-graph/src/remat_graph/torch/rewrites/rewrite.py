"""Rewrites of a joint graph, before it becomes a program. Each keeps what the graph computes.

Order matters: tied inputs become one, then what reads a mutated input late gets a copy of it, then
tangents that no one gives are taken out.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.fakes import storage_key
from remat_graph.torch.tracing.joint import Joint, is_backward, is_random

__all__ = [
    "copy_joint",
    "drop_dead",
    "forward_first",
    "merge_items",
    "merge_tied",
    "pin_mutated",
    "separate_gradients",
    "set_batch_norm_apart",
    "view_closure",
]

aten = torch.ops.aten


def copy_joint(joint: Joint) -> Joint:
    """Copy a joint graph, so that rewriting it leaves the original as it is."""
    copies: dict[Node, Node] = {}
    graph = Graph()
    result = graph.graph_copy(joint.graph, copies)
    graph.output(result)
    graph.output_node().meta = dict(joint.graph.output_node().meta)
    for old, new in copies.items():
        new.meta = dict(old.meta)
    return dataclasses.replace(
        joint,
        graph=graph,
        inputs={copies[node]: role for node, role in joint.inputs.items()},
        tangents={copies[node]: copies[output] for node, output in joint.tangents.items()},
        outputs=tuple(
            dataclasses.replace(
                output,
                node=copies[output.node],
                base=None if output.base is None else copies[output.base],
            )
            for output in joint.outputs
        ),
        mutations=tuple((copies[node], copies[new]) for node, new in joint.mutations),
        gradients={copies[node]: copies[g] for node, g in joint.gradients.items()},
    )


def merge_tied(joint: Joint, tensor_of: Callable[[str, str | int], torch.Tensor]) -> Joint:
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
        keep = first.setdefault(id(tensor_of(*role)), node)
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
            known = [gradients[keep]] if keep in gradients else []
            summed.setdefault(keep, known).append(gradients.pop(node))
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


def merge_items(joint: Joint) -> None:
    """Take each item of an operator's tuple once."""
    first: dict[Any, Node] = {}
    returned = set(joint.graph.output_node().all_input_nodes)
    for node in joint.graph.find_nodes(op="call_function", target=operator.getitem):
        keep = first.setdefault(node.args, node)
        if keep is not node and node not in returned:
            node.replace_all_uses_with(keep)


def set_batch_norm_apart(joint: Joint) -> None:
    """Drop the running statistics from training batch-norm backwards, which do not use them."""
    for node in joint.graph.find_nodes(
        op="call_function", target=aten.native_batch_norm_backward.default
    ):
        grad, x, weight, _, _, mean, invstd, train, *rest = node.args
        if train is True:
            node.args = (grad, x, weight, None, None, mean, invstd, train, *rest)


def pin_mutated(joint: Joint) -> bool:
    """Copy, before it is changed, each mutated input whose old data the backward pass reads.

    Returns whether there was any.
    """
    pinned = False
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
        pinned = True
    return pinned


def _first_call(graph: Graph) -> Node:
    first: Node = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    return first


def view_closure(node: Node) -> set[Node]:
    """Find a node with all views of it."""
    storage = storage_key(node.meta["fake"])
    closure, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            value = user.meta.get("fake")
            parts = value if isinstance(value, (tuple, list)) else (value,)
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            if user not in closure and any(storage_key(part) == storage for part in tensors):
                closure.add(user)
                pending.append(user)
    return closure


def forward_first(joint: Joint) -> None:
    """Move any forward node that was traced after a backward one in front of the backward half.

    What reads a gradient is backward, also where torch does not say so, and so is what it does not
    tag and stands behind: the backward of an `autograd.Function` that TorchDynamo traced is of its
    graph. What is moved may read a constant, which goes along.
    """
    first: Node | None = None
    for node in list(joint.graph.nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        sources = node.all_input_nodes
        untold = first is not None and "partitioner_tag" not in node.meta
        if untold or any(is_backward(source) or source in joint.tangents for source in sources):
            node.meta["partitioner_tag"] = "is_backward"
        if is_backward(node):
            first = first or node
        elif first is not None:
            first.prepend(node)


def drop_dead(joint: Joint) -> None:
    """Remove what nothing needs; what draws random numbers stays, and the stream with it."""
    needed = set(joint.gradients.values())
    needed.update(output.node for output in joint.outputs)
    needed.update(output.base for output in joint.outputs if output.base is not None)
    needed.update(joint.tangents.values())
    needed.update(new for _, new in joint.mutations)
    joint.graph.output_node().args = (tuple(sorted(needed)),)
    for node in reversed(list(joint.graph.nodes)):
        if node.op == "call_function" and not node.users and not is_random(node):
            joint.graph.erase_node(node)


def separate_gradients(joint: Joint) -> tuple[Joint, bool]:
    """Give each gradient a storage of its own, so that no two `.grad` share their memory.

    And the layout of the leaf that it is of: autograd would copy it into that, and hold both. The
    second result says whether there was anything to copy.
    """
    given = (*joint.tangents, *joint.inputs, *(output.node for output in joint.outputs))
    taken = {storage_key(node.meta["fake"]) for node in given}
    gradients = {}
    for node, gradient in joint.gradients.items():
        storage = storage_key(gradient.meta["fake"])
        layout = _other_layout(joint, node, gradient)
        if storage in taken or layout is not None:
            kept: dict[str, Any] = {} if layout is None else {"memory_format": layout}
            with joint.graph.inserting_before(joint.graph.output_node()):
                copy = joint.graph.call_function(aten.clone.default, (gradient,), kept)
            copy.meta = {"partitioner_tag": "is_backward", "val": gradient.meta["val"]}
            gradients[node] = copy
        else:
            taken.add(storage)
            gradients[node] = gradient
    separate = dataclasses.replace(joint, gradients=gradients)
    return separate, gradients != joint.gradients


def _other_layout(joint: Joint, node: Node, gradient: Node) -> torch.memory_format | None:
    """Find the layout of a leaf, where its gradient comes in another."""
    role = joint.inputs[node]
    leaf, made = node.meta["fake"], gradient.meta["fake"]
    if (role[0] != "parameter" and role not in joint.leaves) or leaf.stride() == made.stride():
        return None
    if leaf.is_contiguous():
        return None if made.is_contiguous() else torch.contiguous_format
    for layout in (torch.channels_last, torch.channels_last_3d):
        rank = 4 if layout is torch.channels_last else 5
        if leaf.ndim == rank and leaf.is_contiguous(memory_format=layout):
            return layout
    return None
