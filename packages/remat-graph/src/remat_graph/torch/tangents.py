"""Taking gradients that do not come out of a joint graph, and all that is zero with them.

Autograd passes nothing where no gradient comes; a graph captured for all gradients would multiply
zeros. What is known to be linear in a missing gradient goes; an operator that is not known to be is
given zeros, so one missing from the tables costs time and never correctness.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from remat_graph.torch._aot import Joint

__all__ = ["drop_tangents", "merge_tangents"]

aten = torch.ops.aten


def merge_tangents(joint: Joint) -> Joint:
    """Give an output that is returned several times one tangent; autograd sums its gradients."""
    first: dict[Node, Node] = {}
    again = {t for t, output in joint.tangents.items() if first.setdefault(output, t) is not t}
    return drop_tangents(joint, again)


# Operators that give zero if an argument at one of these positions is zero.
_ZERO_IF_ANY: dict[Any, tuple[int, ...]] = {
    aten.mul.Tensor: (0, 1),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
}
_LINEAR_IN_FIRST = {
    "alias", "as_strided", "clone", "conj", "_conj", "convolution_backward",
    "detach", "diagonal", "diagonal_backward", "div", "embedding_dense_backward", "expand", "flip",
    "gather_backward", "gelu_backward", "leaky_relu_backward", "mul", "native_batch_norm_backward",
    "native_dropout_backward", "native_group_norm_backward", "native_layer_norm_backward", "neg",
    "permute", "repeat", "reshape", "roll", "select", "select_backward", "sigmoid_backward",
    "silu_backward", "slice", "slice_backward", "split", "squeeze", "sum", "t", "tanh_backward",
    "threshold_backward", "_to_copy", "transpose", "unsqueeze", "view", "_unsafe_view", "unbind",
    "constant_pad_nd", "max_pool2d_with_indices_backward", "avg_pool2d_backward", "real", "imag",
    "_log_softmax_backward_data", "_softmax_backward_data", "nll_loss_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "view_as_real", "view_as_complex",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "unsafe_split", "split_with_sizes",
    "mean", "upsample_nearest2d_backward", "upsample_bilinear2d_backward",
}  # fmt: skip


def drop_tangents(joint: Joint, gone: set[Node]) -> Joint:
    """Take out the tangents `gone` and all that is zero with them.

    A gradient that is zero because of it is left out, as autograd leaves it `None`.
    """
    zero: set[Node] = set(gone)
    equal: dict[Node, Node] = {}
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and zero.intersection(node.all_input_nodes):
            _without_zeros(joint.graph, node, zero, equal)
    gradients = {node: equal.get(g, g) for node, g in joint.gradients.items()}
    return dataclasses.replace(
        joint,
        tangents={node: output for node, output in joint.tangents.items() if node not in gone},
        gradients={node: g for node, g in gradients.items() if g not in zero},
    )


def _without_zeros(graph: Graph, node: Node, zero: set[Node], equal: dict[Node, Node]) -> None:
    """Add a node that is zero to `zero`, and one that is another now to `equal`."""
    args = node.args
    if node.target is operator.getitem:
        zero.add(node)
        return
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
        a, b = args
        if a in zero and b in zero:
            zero.add(node)
            return
        other, known = (a, b) if b in zero else (b, a)
        exchangeable = node.target is aten.add.Tensor or known is b
        if isinstance(other, Node) and exchangeable and _same_kind(other, node):
            node.replace_all_uses_with(other)
            equal[node] = other
            return
    positions = _ZERO_IF_ANY.get(node.target)
    if positions is None and _name(node.target) in _LINEAR_IN_FIRST:
        positions = (0,)
    if positions is not None and any(args[position] in zero for position in positions):
        zero.add(node)
        return
    if node.target is aten.cat.default and _all_in(args[0], zero):
        zero.add(node)
        return
    for source in node.all_input_nodes:
        if source in zero:
            node.replace_input_with(source, _zeros(graph, source, node))


def _all_in(nodes: Any, zero: set[Node]) -> bool:
    return isinstance(nodes, Iterable) and all(node in zero for node in nodes)


def _name(target: Any) -> str:
    return (
        str(getattr(target, "_schema", target)).split("(")[0].split(".")[0].removeprefix("aten::")
    )


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
