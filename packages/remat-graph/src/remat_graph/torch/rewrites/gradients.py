"""Gradients of a joint graph: those that do not come are taken out, others get their own memory.

Autograd passes nothing where no gradient comes; a graph captured for all gradients would multiply
zeros. What depends on missing gradients alone goes, as autograd never calls it; an operator that
reads others, too, is given zeros for them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Graph, Node

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.fakes import storage_key
from remat_graph.torch.tracing.joint import Joint, returned_nodes

__all__ = ["drop_missing", "merge_tangents", "separate_gradients"]

aten = torch.ops.aten


def merge_tangents(joint: Joint) -> Joint:
    """Give an output that is returned several times one tangent; autograd sums its gradients.

    What is written to a parameter and not returned has none: its gradient is the parameter's.
    """
    returned = set(returned_nodes(joint))
    first: dict[Node, Node] = {}
    gone = {
        tangent
        for tangent, output in joint.tangents.items()
        if output not in returned or first.setdefault(output, tangent) is not tangent
    }
    return _drop_tangents(joint, gone)


def drop_missing(joint: Joint, missing: frozenset[int]) -> Joint:
    """Take out the gradients at positions `missing` of what the forward half returns.

    Raises:
        CaptureError: if no gradient is left.
    """
    returned = returned_nodes(joint)
    gone = {t for t, output in joint.tangents.items() if returned.index(output) in missing}
    if len(gone) == len(joint.tangents):
        raise CaptureError("none of the module's outputs gets a gradient; nothing to plan")
    return _drop_tangents(joint, gone)


def _drop_tangents(joint: Joint, gone: set[Node]) -> Joint:
    """Take out the tangents `gone` and all that is zero with them.

    A gradient that is zero because of it is left out, as autograd leaves it `None`.
    """
    zero: set[Node] = set(gone)
    depending: set[Node] = set(joint.tangents)
    equal: dict[Node, Node] = {}
    for node in list(joint.graph.nodes):
        read = depending.intersection(node.all_input_nodes)
        if node.op != "call_function" or not read:
            continue
        depending.add(node)
        if read <= zero:
            zero.add(node)
        elif read & zero:
            _without_zeros(joint.graph, node, zero, equal)
    gradients = {node: equal.get(g, g) for node, g in joint.gradients.items()}
    return dataclasses.replace(
        joint,
        tangents={node: output for node, output in joint.tangents.items() if node not in gone},
        gradients={node: g for node, g in gradients.items() if g not in zero},
    )


def _without_zeros(graph: Graph, node: Node, zero: set[Node], equal: dict[Node, Node]) -> None:
    """Let a node do without what is zero; add one that is another now to `equal`."""
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        a, b = node.args
        other, term = (a, b) if b in zero else (b, a)
        exchangeable = node.target is aten.add.Tensor or term is b
        if isinstance(other, Node) and exchangeable and _same_kind(other, node):
            node.replace_all_uses_with(other)
            equal[node] = other
            return
    for source in node.all_input_nodes:
        if source in zero:
            node.replace_input_with(source, _zeros(graph, source, node))


def _same_kind(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return bool(x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride())


def _zeros(graph: Graph, like: Node, before: Node) -> Node:
    value = like.meta["val"]
    with graph.inserting_before(before):
        zeros = graph.call_function(
            aten.full.default,
            (list(value.shape), 0),
            {"dtype": value.dtype, "device": value.device, "pin_memory": False},
        )
    zeros.meta = {"partitioner_tag": "is_backward", "val": value}
    return zeros


def separate_gradients(joint: Joint) -> Joint:
    """Give each gradient a storage of its own, so that no two `.grad` share their memory.

    And the layout of the leaf that it is of: autograd would copy it into that, and hold both.
    """
    border = (*joint.tangents, *joint.inputs, *(output.node for output in joint.outputs))
    taken = {storage_key(node.meta["fake"]) for node in border}
    gradients = {}
    for node, gradient in joint.gradients.items():
        storage = storage_key(gradient.meta["fake"])
        layout = _other_layout(joint, node, gradient)
        if storage in taken or layout is not None:
            options: dict[str, Any] = {} if layout is None else {"memory_format": layout}
            with joint.graph.inserting_before(joint.graph.output_node()):
                copy = joint.graph.call_function(aten.clone.default, (gradient,), options)
            copy.meta = {"partitioner_tag": "is_backward", "val": gradient.meta["val"]}
            gradients[node] = copy
        else:
            taken.add(storage)
            gradients[node] = gradient
    return dataclasses.replace(joint, gradients=gradients)


def _other_layout(joint: Joint, node: Node, gradient: Node) -> torch.memory_format | None:
    """Find the layout of a leaf, where its gradient comes in another."""
    role = joint.inputs[node]
    leaf, fake = node.meta["fake"], gradient.meta["fake"]
    if (role[0] != "parameter" and role not in joint.leaves) or leaf.stride() == fake.stride():
        return None
    if leaf.is_contiguous():
        return None if fake.is_contiguous() else torch.contiguous_format
    for layout in (torch.channels_last, torch.channels_last_3d):
        rank = 4 if layout is torch.channels_last else 5
        if leaf.ndim == rank and leaf.is_contiguous(memory_format=layout):
            return layout
    return None
