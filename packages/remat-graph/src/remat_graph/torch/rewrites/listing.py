"""A joint graph as text to read and to compare, a line for each node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from remat_graph.torch.tracing.joint import Joint
from remat_graph.torch.tracing.provenance import noted

__all__ = ["listing"]


def listing(joint: Joint) -> str:
    """Write a joint graph as lines of Python, with the module and source line that each is from."""
    return "\n".join(_lines(joint))


def _lines(joint: Joint) -> Iterator[str]:
    for node in joint.graph.nodes:
        if node in joint.inputs:
            yield f"{_typed(node)} = {_key(joint, node)}"
        elif node in joint.tangents:
            yield f"{_typed(node)} = gradient of {joint.tangents[node]}"
        elif node.op == "get_attr":
            yield f"{_typed(node)} = constant {node.target}"
        elif node.op == "call_function":
            yield f"{_typed(node)} = {_call(node)}{_place(node)}"
    for node, new in joint.mutations:
        yield f"write {_key(joint, node)} = {new}"
    for output in joint.outputs:
        of = "" if output.base is None else f", {output.kind} of {output.base}"
        yield f"return {output.node}{of}"
    for node, gradient in joint.gradients.items():
        yield f"gradient of {_key(joint, node)} = {gradient}"


def _key(joint: Joint, node: Node) -> str:
    kind, key = joint.inputs[node]
    return f"{kind} {key}"


def _typed(node: Node) -> str:
    value = node.meta.get("fake", node.meta.get("val"))
    if not isinstance(value, torch.Tensor):
        return node.name
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{node.name}: {dtype}{list(value.shape)}"


def _call(node: Node) -> str:
    parts = [*map(_text, node.args), *(f"{key}={_text(v)}" for key, v in node.kwargs.items())]
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    name = str(node.target) if is_operator else getattr(node.target, "__name__", repr(node.target))
    return f"{name}({', '.join(parts)})"


def _place(node: Node) -> str:
    provenance = noted(node)
    words = (
        () if provenance is None else tuple(filter(None, (provenance.module, provenance.source)))
    )
    return f"  # {' '.join(words)}" if words else ""


def _text(argument: Any) -> str:
    return str(argument) if isinstance(argument, Node) else repr(argument)
