"""Running a joint graph on fake tensors, for which results share their memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Node

from remat_graph.errors import RematError
from remat_graph.torch.cost.strides import RealStrides, in_memory_of_terms, placed_as_input
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.operators import operator_of
from remat_graph.torch.rewrites.move_to_cuda import run_as_if_there
from remat_graph.torch.tracing.draws import drawn_in_order_of_memory
from remat_graph.torch.tracing.failures import not_planned
from remat_graph.torch.tracing.fakes import (
    fake_constant,
    fake_mode_of,
    is_traced_tensor,
    new_fake,
    storage_key,
)
from remat_graph.torch.tracing.joint import Joint
from remat_graph.torch.tracing.layouts import as_real

__all__ = ["propagate", "view_closure"]

aten = torch.ops.aten


def propagate(joint: Joint, real: RealStrides | None = None) -> Joint:
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
                node.meta["fake"] = _input(joint, node, mode)
    return joint


def _input(joint: Joint, node: Node, mode: FakeTensorMode) -> Any:
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
        fake = fake_constant(mode, constant)
        return fake if joint.device is None else fake.to(joint.device)
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
    call_then, sources_then = node.meta.get("ran_on", (None, []))
    if call == call_then and all(map(operator.is_, sources, sources_then)):
        return
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["fake"])
    result = _with_seeds_on_the_host(node, run_as_if_there(node, args, kwargs))
    result = as_real(node.target, args, kwargs, result)
    if real is not None:
        result = real.correct(node, args, kwargs, result)
    result = placed_as_input(node, args, in_memory_of_terms(node, args, result))
    result = _with_types_of_statistics(node, args, result)
    then = node.meta.get("fake")
    if then is None or _new_tensors(result, sources) != _new_tensors(then, sources_then):
        node.meta["fake"] = result
    node.meta["ran_on"] = call, sources


def _new_tensors(result: Any, sources: list[Any]) -> Any:
    """Say what new tensors an operator made; what is not equal to anything if one is a view."""
    parts = _tensors_of([result])
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


def _with_types_of_statistics(node: Node, args: tuple[Any, ...], result: Any) -> Any:
    """Correct torch's fake tensors: on the CPU they give 16-bit input 16-bit statistics always."""
    at = operator_of(node.target).statistics_like
    if at is None or result[0].device.type != "cpu":
        return result
    weight = args[at]
    if not isinstance(weight, torch.Tensor) or weight.dtype == result[1].dtype:
        return result
    return (result[0], result[1].to(weight.dtype), result[2].to(weight.dtype), *result[3:])


def _with_seeds_on_the_host(node: Node, result: Any) -> Any:
    """Correct torch's fake tensors: CUDA's efficient attention gives seed and offset on the CPU.

    Its backward reads them there: on the device they would end the process. (While a CUDA graph is
    captured, and in ROCm's build, they are on the device.)
    """
    if node.target is not aten._scaled_dot_product_efficient_attention.default:
        return result
    if result[0].device.type != "cuda" or torch.version.hip is not None:
        return result
    return (
        *result[:2],
        *(result[0].new_empty((), dtype=s.dtype, device="cpu") for s in result[2:]),
    )


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
