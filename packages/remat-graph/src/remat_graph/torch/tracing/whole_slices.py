"""Taking slices that take all of an axis out of a trace of sizes.

`x[:, :4]` is a slice along each axis for torch. Where sizes are numbers it leaves out those that
take all; where they are symbols it traces them, and their backwards, which copy a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from remat_graph.torch.operators import operator_of
from remat_graph.torch.tracing.joint import Joint
from remat_graph.torch.tracing.symbols import expression_of

__all__ = ["drop_whole_slices"]

aten = torch.ops.aten

# By operator, the argument that is used in place of the result where the slice is all of an axis.
_GIVEN_BACK: Mapping[object, int] = {
    aten.slice.Tensor: 0,
    aten.slice_backward.default: 0,
    aten.slice_scatter.default: 1,
}


def drop_whole_slices(joint: Joint) -> Joint:
    """Use what a slice is taken of in place of one that takes all of it for any size.

    What is returned stays; so does an assignment, unless what it assigns is the result of an inner
    one, which is a tensor of its own. The graph is changed.
    """
    returned = set(joint.graph.output_node().all_input_nodes)
    for node in list(joint.graph.nodes):
        given = _GIVEN_BACK.get(node.target)
        if given is None or node in returned:
            continue
        source = node.args[given]
        if not isinstance(source, Node) or _layout(source) != _layout(node):
            continue
        if operator_of(node.target).assigns and not operator_of(source.target).assigns:
            continue
        node.replace_all_uses_with(source)
        joint.graph.erase_node(node)
    return joint


def _layout(node: Node) -> tuple[object, ...]:
    value = node.meta["val"]
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return (value.dtype, *map(expression_of, numbers))
