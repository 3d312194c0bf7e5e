"""Causal attention by its name: a mask that is always the causal one becomes `is_causal=True`.

A library that decides from data whether a mask is needed cannot decide while it is traced, and
makes one: Hugging Face, of batch x sequence x sequence numbers held for the whole step. Where no
input has a part in it, it is computed here, once, on the CPU, and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from remat_graph.torch.tracing.fakes import is_traced_tensor, own_modes
from remat_graph.torch.tracing.joint import Joint, is_random
from remat_graph.torch.tracing.joint_of_sizes import JointOfSizes, filled

__all__ = ["MasksOfSizes", "name_causal_masks", "named_causally"]

aten = torch.ops.aten

# What computes attention, and its backward; both take a mask, or `is_causal`. It pairs operators,
# and so is in the record of neither.
_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ),
    aten._scaled_dot_product_efficient_attention.default: (
        aten._scaled_dot_product_efficient_attention_backward.default
    ),
    aten._scaled_dot_product_cudnn_attention.default: (
        aten._scaled_dot_product_cudnn_attention_backward.default
    ),
}
_MASKS = ("attn_mask", "attn_bias")
_MOST_ELEMENTS = 1 << 27  # of a mask that is computed to be looked at
_MOST_KNOWN = 1024  # sizes of which it is known whether masks are causal


def name_causal_masks(joint: Joint) -> Joint:
    """Replace the masks that are the causal one, in attention and its backward."""
    causal: dict[Node, bool] = {}
    for node in list(joint.graph.nodes):
        if node.target not in _BACKWARD:
            continue
        readers = {user for item in node.users for user in item.users}
        backward = [user for user in readers if user.target is _BACKWARD[node.target]]
        calls = [node, *backward]
        if all(_masks_causally(joint, call, causal) for call in calls):
            for call in calls:
                named = named_causally(call.target, call.args, call.kwargs)
                assert named is not None
                (call.args, call.kwargs), _ = named
    return joint


def _masks_causally(joint: Joint, call: Node, causal: dict[Node, bool]) -> bool:
    mask = _get(call, _mask_name(call))
    if not isinstance(mask, Node) or _get(call, "is_causal"):
        return False
    if mask not in causal:
        causal[mask] = _is_causal(joint, mask)
    return causal[mask]


def _is_causal(joint: Joint, mask: Node) -> bool:
    if mask.meta["fake"].device.type == "meta":
        return False
    computed = _Computed(lambda node: (node.args, node.kwargs), joint.constants)
    return _computes_causal(mask, mask.meta["fake"].shape, computed)


class MasksOfSizes:
    """Which masks of a trace with symbols are the causal one, by sizes; what was asked is kept."""

    def __init__(self, joint: JointOfSizes) -> None:
        self._joint = joint
        self._causal: dict[tuple[Any, ...], dict[Node, bool]] = {}

    def are_causal(self, masks: Collection[Node], symbols: Mapping[str, Any]) -> bool:
        """Whether all of these are, for these numbers."""
        key = tuple(symbols.values())
        if key not in self._causal:
            if len(self._causal) == _MOST_KNOWN:
                self._causal.clear()
            self._causal[key] = {}
        known = self._causal[key]
        new = [mask for mask in masks if mask not in known]
        if new:
            joint, numbers = self._joint, self._joint.numbers(symbols)
            computed = _Computed(
                lambda node: filled(joint.arguments[node], numbers), joint.joint.constants
            )
            for mask in new:
                shape = filled(joint.traced(mask).shape, numbers)
                known[mask] = _computes_causal(mask, shape, computed)
        return all(known[mask] for mask in masks)


def _computes_causal(mask: Node, shape: Sequence[int], computed: _Computed) -> bool:
    if shape[-2] != shape[-1] or math.prod(shape) > _MOST_ELEMENTS:
        return False
    with own_modes(), torch.no_grad():
        data = computed.tensor(mask)
        return data is not None and _hides_what_comes_later(data)


def _hides_what_comes_later(data: torch.Tensor) -> bool:
    if not data.is_floating_point():
        return False
    causal = torch.full(data.shape[-2:], -torch.inf, dtype=data.dtype).triu_(1)
    return torch.equal(data, causal.expand_as(data))


def named_causally(target: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, Any], Node] | None:
    """Give the arguments of attention, or its backward, without its mask, and the mask.

    `None` of another operator, or without a mask.
    """
    if target not in {*_BACKWARD, *_BACKWARD.values()}:
        return None
    named, mask = (list(args), dict(kwargs)), None
    for position, argument in enumerate(target._schema.arguments):
        is_mask = argument.name in _MASKS
        if not (is_mask or argument.name == "is_causal"):
            continue
        is_positional = position < len(args) and not argument.kwarg_only
        place: Any = named[0] if is_positional else named[1]
        key: Any = position if is_positional else argument.name
        if is_mask:
            mask = place[key] if is_positional or key in place else None
        place[key] = None if is_mask else True
    return ((tuple(named[0]), named[1]), mask) if isinstance(mask, Node) else None


class _Computed:
    """Nodes of a graph computed for real, on the CPU, each once.

    `arguments` gives those of a node. The device of the model may have no memory left, or not be
    there.
    """

    def __init__(self, arguments: Callable[[Node], Any], constants: Any) -> None:
        self._arguments, self._constants = arguments, constants
        self._values: dict[Node, Any] = {}

    def tensor(self, wanted: Node) -> torch.Tensor | None:
        """Compute a node; `None` if an input or a draw has a part in it."""
        waiting, needed = [wanted], set[Node]()
        while waiting:
            node = waiting.pop()
            if node in needed or node in self._values:
                continue
            if node.op not in ("call_function", "get_attr") or is_random(node):
                return None
            needed.add(node)
            torch.fx.map_arg(self._arguments(node), waiting.append)
        for node in sorted(needed):
            if node.op == "get_attr":
                constant = getattr(self._constants, str(node.target))
                if not isinstance(constant, torch.Tensor) or is_traced_tensor(constant):
                    return None
                self._values[node] = constant.cpu()
            else:
                args, kwargs = torch.fx.map_arg(self._arguments(node), self._values.__getitem__)
                args, kwargs = pytree.tree_map_only(torch.device, _on_cpu, (args, kwargs))
                self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        result: torch.Tensor = self._values[wanted]
        return result


def _on_cpu(_: torch.device) -> torch.device:
    return torch.device("cpu")


def _mask_name(call: Node) -> str:
    names = {argument.name for argument in _arguments(call)}
    return next(name for name in _MASKS if name in names)


def _arguments(call: Node) -> Any:
    return call.target._schema.arguments  # type: ignore[union-attr]


def _get(call: Node, name: str) -> Any:
    for position, argument in enumerate(_arguments(call)):
        if argument.name == name:
            if position < len(call.args) and not argument.kwarg_only:
                return call.args[position]
            return call.kwargs.get(name, argument.default_value)
    return None
