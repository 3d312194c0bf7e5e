"""The forward half of a joint graph before the backward one, and nothing that nobody needs."""

from __future__ import annotations

from torch.fx import Node

from remat_graph.torch.tracing.joint import Joint, is_backward, is_random

__all__ = ["drop_dead", "forward_first"]


def forward_first(joint: Joint) -> Joint:
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
        no_tag = first is not None and "partitioner_tag" not in node.meta
        if no_tag or any(is_backward(source) or source in joint.tangents for source in sources):
            node.meta["partitioner_tag"] = "is_backward"
        if is_backward(node):
            first = first or node
        elif first is not None:
            first.prepend(node)
    return joint


def drop_dead(joint: Joint) -> Joint:
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
    return joint
