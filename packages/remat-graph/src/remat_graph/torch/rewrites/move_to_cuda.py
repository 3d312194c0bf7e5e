"""A joint graph that was traced on the host (`as_on_cuda`), taken to be on a CUDA device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from remat_graph.torch.cost.strides import view_or_copy
from remat_graph.torch.tracing.fakes import fake_mode_of, new_fake
from remat_graph.torch.tracing.joint import Joint

__all__ = ["move_to_cuda", "run_as_if_there"]

_DEVICE, _HOST = torch.device("cuda", 0), torch.device("cpu")


def move_to_cuda(joint: Joint) -> Joint:
    """Take a joint graph that was traced on the host to be on a CUDA device; it is changed."""

    def moved(item: Any) -> Any:
        return _DEVICE if isinstance(item, torch.device) and item.type == "cpu" else item

    mode = fake_mode_of(joint.graph)
    for node in joint.graph.nodes:
        node.args = map_aggregate(node.args, moved)
        node.kwargs = map_aggregate(node.kwargs, moved)
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            node.meta["val"] = new_fake(mode, value.shape, value.stride(), value.dtype, _DEVICE)
    return dataclasses.replace(joint, device=_DEVICE)


def run_as_if_there(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operator of a node on fake tensors, on the host's where CUDA's want a device.

    Some of torch's rules for fake tensors index them, or ask for the device: `grid_sampler_2d`.
    """
    try:
        return view_or_copy(node, args, kwargs)
    except (RuntimeError, AssertionError):
        read = pytree.tree_leaves((args, kwargs))
        is_there = torch.cuda.is_available() or not any(map(_is_on_cuda, read))
        if is_there or not _makes_anew(node.target):
            raise
    args, kwargs = pytree.tree_map_only(torch.Tensor, functools.partial(_on, _HOST), (args, kwargs))
    target: Any = node.target
    result = target(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, functools.partial(_on, _DEVICE), result)


def _is_on_cuda(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.device.type == "cuda"


def _makes_anew(target: Any) -> bool:
    """Whether it is an operator that changes nothing, and whose results are no views."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    parts = (*target._schema.arguments, *target._schema.returns)
    return all(part.alias_info is None for part in parts)


def _on(device: torch.device, fake: Any) -> torch.Tensor:
    return new_fake(fake.fake_mode, fake.shape, fake.stride(), fake.dtype, device)
