"""A joint graph, forward and backward, and what its inputs and outputs mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch.fx import Graph, Node

__all__ = [
    "Joint",
    "Key",
    "Layout",
    "OutputRole",
    "copy_joint",
    "is_backward",
    "is_gradient_sum",
    "is_random",
    "returned_nodes",
]

Key: TypeAlias = "tuple[str, str | int]"  # of an input: its kind, and its name or index
Layout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], int]"


@dataclass(frozen=True, slots=True)
class OutputRole:
    """How a tensor that the user gets comes about.

    `kind` is `fresh`, `input` (the placeholder `base` itself), `input_view` (a view of it) or
    `view` (a view of `base`, another node that the forward graph returns). `layout` is that of a
    view of an input: sizes, strides, and where it begins in the input. `computed_from` are the
    positions of other outputs that in eager autograd its gradient goes on to.
    """

    node: torch.fx.Node
    kind: str
    base: torch.fx.Node | None
    requires_grad: bool
    layout: Layout | None = None
    computed_from: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph and what its placeholders and outputs mean.

    `constants` is the module whose attributes the graph reads. `inputs` maps each primal
    placeholder to `("parameter", name)`, `("buffer", name)` or `("input", index)`. `tangents` maps
    each tangent placeholder to the forward graph output whose gradient it is. `mutations` pairs a
    placeholder with the node of its new data. `gradients` maps placeholders to the node of their
    gradient. `leaves` are the inputs that keep their gradient in `.grad`, besides all parameters.
    `device` is where its tensors are taken to be, if they were traced elsewhere.
    `changed` are inputs that autograd would see changed, which none but leaves may be.
    `merged` says whether what eager computes several times from the same is computed once.
    """

    graph: torch.fx.Graph
    constants: torch.nn.Module
    inputs: dict[torch.fx.Node, Key]
    tangents: dict[torch.fx.Node, torch.fx.Node]
    outputs: tuple[OutputRole, ...]
    mutations: tuple[tuple[torch.fx.Node, torch.fx.Node], ...]
    gradients: dict[torch.fx.Node, torch.fx.Node]
    leaves: frozenset[Key] = frozenset()
    device: torch.device | None = None
    changed: frozenset[Key] = frozenset()
    merged: bool = False


def returned_nodes(joint: Joint) -> list[Node]:
    """List what the forward half returns: outputs, and bases of those that are views."""
    nodes = [output.node if output.base is None else output.base for output in joint.outputs]
    own = [output.kind in ("fresh", "view") for output in joint.outputs]
    return list(dict.fromkeys(node for node, ours in zip(nodes, own, strict=True) if ours))


def is_backward(node: Node) -> bool:
    """Whether the node was traced in the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_gradient_sum(node: Node) -> bool:
    """Whether the node adds gradients of one tensor, which is of no single forward node."""
    return bool(node.meta.get("is_gradient_acc"))


def is_random(node: Node) -> bool:
    """Whether the node draws from the generator of its device."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":  # attention draws nothing without dropout
            dropout = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", dropout))
    return True


def copy_joint(joint: Joint) -> Joint:
    """Copy a joint graph, so that rewriting it leaves the original as it is."""
    copies: dict[Node, Node] = {}
    graph = Graph()
    result = graph.graph_copy(joint.graph, copies)
    graph.output(result)
    graph.output_node().meta = dict(joint.graph.output_node().meta)
    for old, new in copies.items():
        new.meta = dict(old.meta)
    return replace(
        joint,
        graph=graph,
        inputs={copies[node]: role for node, role in joint.inputs.items()},
        tangents={copies[node]: copies[output] for node, output in joint.tangents.items()},
        outputs=tuple(
            replace(
                output,
                node=copies[output.node],
                base=None if output.base is None else copies[output.base],
            )
            for output in joint.outputs
        ),
        mutations=tuple((copies[node], copies[new]) for node, new in joint.mutations),
        gradients={copies[node]: copies[g] for node, g in joint.gradients.items()},
    )
