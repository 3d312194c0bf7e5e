"""Gradients of embeddings, added to another gradient of the table without a table of their own."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from remat_graph.torch.kernels.embedding import add_embedding_gradient
from remat_graph.torch.tracing.joint import Joint, is_backward

__all__ = ["add_rows"]

aten = torch.ops.aten

_GRADIENT = aten.embedding_dense_backward.default


def add_rows(joint: Joint) -> Joint:
    """Add the rows of an embedding's gradient to the other gradient that it is summed with.

    Of two embeddings' gradients the first one is made whole.
    """
    returned, renamed = set(joint.graph.output_node().all_input_nodes), dict[Node, Node]()
    for node in joint.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        terms = _terms(node)
        if terms is None or len(terms[1].users) > 1 or terms[1] in returned:
            continue
        total, own = terms
        grad, indices, _, padding, by_frequency = own.args
        with joint.graph.inserting_before(node):
            arguments = total, grad, indices, padding, by_frequency
            added = joint.graph.create_node(
                "call_function", add_embedding_gradient, arguments, name="add_rows"
            )
        kept = ("val", "fake", "partitioner_tag")
        added.meta = {key: node.meta[key] for key in kept if key in node.meta}
        node.replace_all_uses_with(added)
        renamed[node] = added
        joint.graph.erase_node(node)
        joint.graph.erase_node(own)
    gradients = {node: renamed.get(g, g) for node, g in joint.gradients.items()}
    return dataclasses.replace(joint, gradients=gradients)


def _terms(node: Node) -> tuple[Node, Node] | None:
    """Give the terms of a sum of gradients, that of an embedding last; `None` if none is.

    It is made as eager makes it, dense, and the other one lies as it does.
    """
    if node.kwargs or not is_backward(node) or len(node.all_input_nodes) != 2:
        return None
    total, own = sorted(node.all_input_nodes)  # nodes of a graph compare by their position
    if own.target is not _GRADIENT:
        total, own = own, total
    one, other = total.meta["fake"], own.meta["fake"]
    is_alike = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return (total, own) if own.target is _GRADIENT and is_alike else None
