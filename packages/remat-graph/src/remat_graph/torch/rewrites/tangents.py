"""Taking gradients that do not come out of a joint graph, and all that is zero with them.

Autograd passes nothing where no gradient comes; a graph captured for all gradients would multiply
zeros. What depends on missing gradients alone goes, as autograd never calls it; an operator that
reads others, too, is given zeros for them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Graph, Node

from remat_graph.torch.tracing.joint import Joint, returned_nodes

__all__ = ["drop_tangents", "merge_tangents"]

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
    return drop_tangents(joint, gone)


def drop_tangents(joint: Joint, gone: set[Node]) -> Joint:
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
        other, known = (a, b) if b in zero else (b, a)
        exchangeable = node.target is aten.add.Tensor or known is b
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
