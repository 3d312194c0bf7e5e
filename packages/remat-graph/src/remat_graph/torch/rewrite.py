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
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node

from remat_graph.errors import RematError
from remat_graph.torch._aot import (
    Joint,
    fake_constant,
    fake_mode_of,
    is_traced_tensor,
    new_fake,
)
from remat_graph.torch.as_on_cuda import run_as_if_there
from remat_graph.torch.draws import drawn_in_order_of_memory
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.failures import not_planned
from remat_graph.torch.operators import operator_of
from remat_graph.torch.strides import (
    RealStrides,
    in_memory_of_terms,
    placed_as_input,
)

__all__ = [
    "copy_joint",
    "drop_dead",
    "forward_first",
    "is_backward",
    "is_gradient_sum",
    "is_random",
    "merge_items",
    "merge_tied",
    "pin_mutated",
    "propagate",
    "separate_gradients",
    "set_batch_norm_apart",
    "storage_key",
    "view_closure",
]

aten = torch.ops.aten


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
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given))
    return True


def storage_key(tensor: torch.Tensor) -> int:
    """Identify the storage of a fake tensor: views of one another have the same key."""
    return int(tensor.untyped_storage()._cdata)


def propagate(joint: Joint, real: RealStrides | None = None) -> None:
    """Run the graph on fake tensors and leave each result in `meta["fake"]`.

    What the tracer left in `meta["val"]` has the shapes, but not which tensors share a storage.
    With `real`, what comes out in another layout than from real tensors is given that one. What a
    rewrite since the last run had no influence on is not run again.

    Raises:
        CaptureError: if the graph holds a constant that has no data, or an operator that does not
            run on fake tensors, with the line that it comes from.
    """
    mode = fake_mode_of(joint.graph)
    with mode:
        for node in list(joint.graph.nodes):
            if node.op == "call_function":
                for call in (*drawn_in_order_of_memory(node), node):
                    try:
                        _run(call, real)
                    except RematError:
                        raise
                    except Exception as error:
                        raise not_planned(call, error) from error
            elif node.op != "output" and "fake" not in node.meta:
                node.meta["fake"] = _given(joint, node, mode)


def _given(joint: Joint, node: Node, mode: FakeTensorMode) -> Any:
    """Make the fake tensor of an input or a constant, with a storage of its own."""
    if node.op == "get_attr":
        constant = getattr(joint.constants, str(node.target))
        if is_traced_tensor(constant):
            raise CaptureError(
                f"the graph holds the constant {node.name}, whose data exists only while "
                f"tracing; make it in the module's __init__, as a buffer"
            )
        if not isinstance(constant, torch.Tensor):
            return constant
        made = fake_constant(mode, constant)
        return made if joint.device is None else made.to(joint.device)
    value = node.meta["val"]
    if node in joint.tangents:  # dense, as a loss makes it, also for a part of a tensor
        return torch.empty_like(value)
    if isinstance(value, torch.Tensor):
        return new_fake(mode, value.shape, value.stride(), value.dtype, value.device)
    return value


def _run(node: Node, real: RealStrides | None) -> None:
    """Run a call on the fake tensors that it reads, unless it has been run on the same."""
    sources = [source.meta["fake"] for source in node.all_input_nodes]
    call = (node.target, node.args, node.kwargs)
    call_then, sources_then = node.meta.get("made_of", (None, []))
    if call == call_then and all(map(operator.is_, sources, sources_then)):
        return
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["fake"])
    made = _with_seeds_on_the_host(node, run_as_if_there(node, args, kwargs))
    if real is not None:
        made = real.correct(node, args, kwargs, made)
    made = placed_as_input(node, args, in_memory_of_terms(node, args, made))
    made = _with_types_of_statistics(node, args, made)
    then = node.meta.get("fake")
    if then is None or _new_tensors(made, sources) != _new_tensors(then, sources_then):
        node.meta["fake"] = made
    node.meta["made_of"] = call, sources


def _new_tensors(made: Any, sources: list[Any]) -> Any:
    """Say what new tensors an operator made; what is not equal to anything if one is a view."""
    parts = _tensors_of([made])
    storages = {storage_key(part) for part in parts}
    if len(storages) < len(parts) or storages & set(map(storage_key, _tensors_of(sources))):
        return object()
    return [
        (t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t.dtype, t.device)
        for t in parts
    ]


def _tensors_of(items: Sequence[Any]) -> list[torch.Tensor]:
    flat = [
        part for item in items for part in (item if isinstance(item, (tuple, list)) else [item])
    ]
    return [part for part in flat if isinstance(part, torch.Tensor)]


def _with_types_of_statistics(node: Node, args: tuple[Any, ...], made: Any) -> Any:
    """Correct torch's fake tensors: on the CPU they give 16-bit input 16-bit statistics always."""
    at = operator_of(node.target).statistics_like
    if at is None or made[0].device.type != "cpu":
        return made
    weight = args[at]
    if not isinstance(weight, torch.Tensor) or weight.dtype == made[1].dtype:
        return made
    return (made[0], made[1].to(weight.dtype), made[2].to(weight.dtype), *made[3:])


def _with_seeds_on_the_host(node: Node, made: Any) -> Any:
    """Correct torch's fake tensors: CUDA's efficient attention gives seed and offset on the CPU.

    Its backward reads them there: on the device they would end the process. (While a CUDA graph is
    captured, and in ROCm's build, they are on the device.)
    """
    if node.target is not aten._scaled_dot_product_efficient_attention.default:
        return made
    if made[0].device.type != "cuda" or torch.version.hip is not None:
        return made
    return (*made[:2], *(made[0].new_empty((), dtype=s.dtype, device="cpu") for s in made[2:]))


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


def _sum(graph: Graph, a: Node, b: Node) -> Node:
    later = max(a, b)  # nodes of a graph compare by their position
    with graph.inserting_after(later):
        total = graph.call_function(aten.add.Tensor, (a, b))
    total.meta = {"partitioner_tag": "is_backward", "val": later.meta["val"]}
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
