"""Taking out of a joint graph what eager would not compute, or compute once.

Tracing turns an assignment to a slice into copies, a dropout of probability 0 into a clone, and
converts one attention mask anew in each layer. None of this changes what the graph computes; what
the user is handed keeps a storage of its own.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.fx import Node

from remat_graph.torch.operators import operator_of
from remat_graph.torch.recomputing import may_run_again
from remat_graph.torch.rewrites.propagate import view_closure
from remat_graph.torch.tracing.fakes import storage_key
from remat_graph.torch.tracing.joint import Joint, is_backward, is_random

__all__ = ["drop_copies", "drop_statistics", "merge_equal", "merge_items"]

aten = torch.ops.aten


def merge_items(joint: Joint) -> Joint:
    """Take each item of an operator's tuple once."""
    first: dict[Any, Node] = {}
    returned = set(joint.graph.output_node().all_input_nodes)
    for node in joint.graph.find_nodes(op="call_function", target=operator.getitem):
        keep = first.setdefault(node.args, node)
        if keep is not node and node not in returned:
            node.replace_all_uses_with(keep)
    return joint


def drop_statistics(joint: Joint) -> Joint:
    """Drop the running statistics from training batch-norm backwards, which do not use them."""
    for node in joint.graph.find_nodes(
        op="call_function", target=aten.native_batch_norm_backward.default
    ):
        grad, x, weight, _, _, mean, invstd, train, *rest = node.args
        if train is True:
            node.args = (grad, x, weight, None, None, mean, invstd, train, *rest)
    return joint


def drop_copies(joint: Joint) -> Joint:
    """Use the source of a copy in place of the copy, where nobody can tell.

    That is a clone of the same layout, and a copy that only feeds assignments to slices.
    """
    handed = _handed_storages(joint)
    inputs = {key for node in joint.inputs for key in _storages(node)}
    for node in list(joint.graph.nodes):
        source = _copied(node)
        if source is None or _storages(node) & handed or _storages(source) & (handed | inputs):
            continue
        if _is_same_buffer(source, node) or _only_assigned(node, source):
            node.replace_all_uses_with(source)
    return joint


def _copied(node: Node) -> Node | None:
    if node.target is aten.clone.default:
        source = node.args[0]
    elif node.target is aten.copy.default:
        source = node.args[1]
    else:
        return None
    return source if isinstance(source, Node) else None


def _is_same_buffer(source: Node, copy: Node) -> bool:
    a, b = source.meta["fake"], copy.meta["fake"]
    return bool(
        copy.target is aten.clone.default
        and (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())
        and a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
    )


def _only_assigned(copy: Node, source: Node) -> bool:
    a, b = source.meta["fake"], copy.meta["fake"]
    if copy.target is not aten.copy.default:
        return False
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    closure = view_closure(copy)
    readers = {user for view in closure for user in view.users} - closure
    if not all(
        operator_of(user.target).assigns or user.target is aten.copy.default for user in readers
    ):
        return False
    never_target = len(closure) == 1 and all(user.args[0] is not copy for user in readers)
    return never_target or a.stride() == b.stride()


def merge_equal(joint: Joint) -> Joint:
    """Compute once what the forward computes several times from the same."""
    handed = _handed_storages(joint)
    first: dict[Any, Node] = {}
    merged = False
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or is_backward(node) or is_random(node):
            continue
        if not may_run_again(node.target):
            continue
        if "empty" in str(node.target) or _storages(node) & handed:
            continue
        keep = first.setdefault((node.target, _frozen(node.args), _frozen(node.kwargs)), node)
        if keep is not node:
            node.replace_all_uses_with(keep)
            merged_numbers = [node.meta["seq_nr"]] if "seq_nr" in node.meta else []
            keep.meta["merged_seq_nrs"] = [*keep.meta.get("merged_seq_nrs", ()), *merged_numbers]
            merged = True
    return dataclasses.replace(joint, merged=True) if merged else joint


def _frozen(item: Any) -> Any:
    if isinstance(item, Node):
        return item
    if isinstance(item, (list, tuple)):
        return tuple(_frozen(part) for part in item)
    if isinstance(item, dict):
        return tuple((key, _frozen(part)) for key, part in item.items())
    return type(item), repr(item)  # 1, 1.0 and True are equal, and not the same argument


def _handed_storages(joint: Joint) -> set[int]:
    """Find the storages that the user is handed, which must stay the user's alone."""
    nodes = joint.graph.output_node().all_input_nodes
    return {key for node in nodes for key in _storages(node)}


def _storages(node: Node) -> set[int]:
    fake = node.meta["fake"]
    parts = fake if isinstance(fake, (tuple, list)) else (fake,)
    return {storage_key(part) for part in parts if isinstance(part, torch.Tensor)}
