"""Rewrites of a joint graph, before it becomes a program. Each keeps what the graph computes.

Order matters: tied inputs become one, then what reads a mutated input late gets a copy of it, then
tangents that no one gives are taken out.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from remat_graph.torch._aot import Joint, fake_mode_of, is_traced_tensor
from remat_graph.torch.errors import CaptureError

__all__ = [
    "copy_joint",
    "drop_copies",
    "drop_dead",
    "drop_tangents",
    "forward_first",
    "is_backward",
    "is_random",
    "merge_items",
    "merge_tangents",
    "merge_tied",
    "pin_mutated",
    "propagate",
    "separate_gradients",
    "set_batch_norm_apart",
    "storage_key",
]

aten = torch.ops.aten


def is_backward(node: Node) -> bool:
    """Whether the node was traced in the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_random(node: Node) -> bool:
    """Whether the node draws from the generator of its device."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and node.op == "call_function"


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the storage of a fake tensor: views of one another have the same key."""
    return int(tensor.untyped_storage()._cdata)


def propagate(joint: Joint) -> None:
    """Run the graph on fake tensors and leave each result in `meta["fake"]`.

    What the tracer left in `meta["val"]` has the shapes, but not which tensors share a storage.

    Raises:
        CaptureError: if the graph holds a constant that has no data.
    """
    mode = fake_mode_of(joint.graph)
    with mode:
        for node in joint.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                if isinstance(value, torch.Tensor):
                    value = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=value.device
                    )
                node.meta["fake"] = value
            elif node.op == "get_attr":
                constant = getattr(joint.module, str(node.target))
                if is_traced_tensor(constant):
                    raise CaptureError(
                        f"the graph holds the constant {node.name}, whose data exists only while "
                        f"tracing; make it in the module's __init__, as a buffer"
                    )
                is_tensor = isinstance(constant, torch.Tensor)
                node.meta["fake"] = mode.from_tensor(constant) if is_tensor else constant
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["fake"])
                node.meta["fake"] = node.target(*args, **kwargs)


def copy_joint(joint: Joint) -> Joint:
    """Copy a joint graph, so that rewriting it leaves the original as it is."""
    copies: dict[Node, Node] = {}
    graph = Graph()
    result = graph.graph_copy(joint.graph, copies)
    graph.output(result)
    graph.output_node().meta = dict(joint.graph.output_node().meta)
    for old, new in copies.items():
        new.meta = dict(old.meta)
    module = torch.fx.GraphModule(joint.module, graph)
    return dataclasses.replace(
        joint,
        module=module,
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

    Raises:
        CaptureError: if such an input is changed in place.
    """
    inputs, gradients = dict(joint.inputs), dict(joint.gradients)
    mutated = {node for node, _ in joint.mutations}
    first: dict[int, Node] = {}
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
        own = gradients.pop(node, None)
        if own is not None:
            gradients[keep] = _sum(joint.graph, gradients[keep], own) if keep in gradients else own
        joint.graph.erase_node(node)
    return dataclasses.replace(joint, inputs=inputs, gradients=gradients)


def merge_tangents(joint: Joint) -> Joint:
    """Give an output that is returned several times one tangent; autograd sums its gradients."""
    first: dict[Node, Node] = {}
    again = {t for t, output in joint.tangents.items() if first.setdefault(output, t) is not t}
    return drop_tangents(joint, again)


def _sum(graph: Graph, a: Node, b: Node) -> Node:
    later = max(a, b)  # nodes of a graph compare by their position
    with graph.inserting_after(later):
        total = graph.call_function(aten.add.Tensor, (a, b))
    total.meta = {"partitioner_tag": "is_backward", "val": later.meta["val"]}
    return total


def merge_items(joint: Joint) -> None:
    """Take each item of an operator's tuple once."""
    first: dict[Any, Node] = {}
    roots = _roots(joint)
    for node in joint.graph.find_nodes(op="call_function", target=operator.getitem):
        keep = first.setdefault(node.args, node)
        if keep is not node and node not in roots:
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
        views = _view_closure(node)
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


def _view_closure(node: Node) -> set[Node]:
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
    """Move any forward node that was traced after a backward one in front of the backward half."""
    first: Node | None = None
    for node in list(joint.graph.nodes):
        if node.op != "call_function":
            continue
        if is_backward(node):
            first = first or node
        elif first is not None:
            if any(is_backward(source) for source in node.all_input_nodes):
                node.meta["partitioner_tag"] = "is_backward"
            else:
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


def drop_copies(joint: Joint) -> bool:
    """Use the source of a copy that only feeds assignments to slices, in place of the copy.

    Functionalisation turns `a[i] = b` into a copy of `b`, laid out as `a[i]`, scattered into a copy
    of `a`. Returns whether any copy went.
    """
    dropped = False
    for node in joint.graph.find_nodes(op="call_function", target=aten.copy.default):
        target, source = node.args[:2]
        if not (isinstance(target, Node) and isinstance(source, Node)):
            continue
        a, b = source.meta["fake"], node.meta["fake"]
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            continue
        closure = _view_closure(node)
        if closure & _roots(joint):
            continue
        readers = {user for view in closure for user in view.users} - closure
        if not all(user.target in _ASSIGNMENTS for user in readers):
            continue
        if a.stride() == b.stride() or (len(closure) == 1 and _only_source(node, readers)):
            node.replace_all_uses_with(source)
            dropped = True
    return dropped


def _only_source(node: Node, readers: set[Node]) -> bool:
    """Whether a node is only what is assigned, never what is assigned to: then strides are free."""
    return all(user.args[0] is not node for user in readers)


def _roots(joint: Joint) -> set[Node]:
    return set(joint.graph.output_node().all_input_nodes)


def separate_gradients(joint: Joint) -> tuple[Joint, bool]:
    """Give each gradient a storage of its own, so that no two `.grad` share their memory.

    The second result says whether there was anything to separate.
    """
    given = (*joint.tangents, *joint.inputs, *(output.node for output in joint.outputs))
    taken = {storage_key(node.meta["fake"]) for node in given}
    gradients = {}
    for node, gradient in joint.gradients.items():
        storage = storage_key(gradient.meta["fake"])
        if storage in taken:
            with joint.graph.inserting_before(joint.graph.output_node()):
                copy = joint.graph.call_function(aten.clone.default, (gradient,))
            copy.meta = {"partitioner_tag": "is_backward", "val": gradient.meta["val"]}
            gradients[node] = copy
        else:
            taken.add(storage)
            gradients[node] = gradient
    separate = dataclasses.replace(joint, gradients=gradients)
    return separate, gradients != joint.gradients


# Assignments to a part of a tensor, as functionalisation writes them: (target, source, where...).
_ASSIGNMENTS = {
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
    aten.copy.default,
}

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
