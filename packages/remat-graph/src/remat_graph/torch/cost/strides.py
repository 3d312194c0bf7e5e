"""The layouts that operators really give, where torch's fake tensors say others.

On the CPU fake batch norms of permuted inputs, and the backwards of some losses and activations,
come out in other strides than real ones. What reads them would then be planned as a view that does
not exist. On CUDA a library decides: what `_cudnn_rnn` keeps for its backward has no bytes if fake.
Operators are run once on made-up inputs, and the fake is given the layout, the type, the device and
the size in memory that are real. On the CPU only those are looked at that read a tensor which is
not contiguous: from contiguous ones both agree but for some losses, which give a number in the
memory that all their terms took. These are corrected everywhere, without running anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from remat_graph.torch.calls import TensorFacts
from remat_graph.torch.operators import operator_of
from remat_graph.torch.process import generators_restored
from remat_graph.torch.recomputing import is_collective

__all__ = ["RealStrides", "in_memory_of_terms", "placed_as_input", "view_or_copy"]

aten = torch.ops.aten


def _lying_so(fake: torch.Tensor, facts: TensorFacts) -> torch.Tensor:
    """Give a fake tensor that lies as another does: the same one, if it does already."""
    said = TensorFacts.of(fake)
    seen = (facts.shape, facts.stride, facts.dtype, facts.device)
    same = seen == (said.shape, said.stride, said.dtype, said.device)
    if same and facts.storage_bytes <= said.storage_bytes:
        return fake
    count = facts.storage_bytes // facts.dtype.itemsize
    buffer = fake.new_empty(count, dtype=facts.dtype, device=facts.device)
    return buffer.as_strided(facts.shape, facts.stride, facts.offset)


Layouts = tuple[TensorFacts | None, ...]


class RealStrides:
    """What was found, by operator and inputs; shared by the captures of one model."""

    def __init__(self) -> None:
        self._known: dict[str, Layouts | None] = {}

    def correct(
        self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Give what an operator makes of fake tensors, in the layout that it really has."""
        if not isinstance(node.target, torch._ops.OpOverload) or not _may_differ(node.target):
            return result
        tensors = [item for item in pytree.tree_leaves((args, kwargs)) if _is_tensor(item)]
        if not _worth_running(tensors):
            return result
        parts = list(result) if isinstance(result, (tuple, list)) else [result]
        key = repr((str(node.target), pytree.tree_map(_describe, (args, kwargs))))
        if key not in self._known:
            self._known[key] = _layouts_of(node.target, args, kwargs)
        real = self._known[key]
        if real is None:
            return result
        corrected = [
            part if layout is None or not _is_tensor(part) else _lying_so(part, layout)
            for part, layout in zip(parts, real, strict=True)
        ]
        return type(result)(corrected) if isinstance(result, (tuple, list)) else corrected[0]


def view_or_copy(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the operator of a node; a view that the real layout does not allow becomes a copy.

    Fake and real views may differ in the stride of a size of one, by which operators choose
    between layouts: the traced graph is right for the fake one.
    """
    target: Any = node.target
    if target not in (aten.view.default, aten._unsafe_view.default):
        return target(*args, **kwargs)
    strides = _strides_of_view(*args[:2])
    if strides is not None:
        result = target(*args, **kwargs)
        if result.stride() != strides:
            node.target = aten.as_strided.default
            node.args = (node.args[0], list(result.shape), list(result.stride()))
        return result
    with node.graph.inserting_before(node):
        dense = node.graph.call_function(
            aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format}
        )
    result = args[0].clone(memory_format=torch.contiguous_format)
    dense.meta = {**node.meta, "fake": result}
    node.args = (dense, *node.args[1:])
    return target(result, *args[1:], **kwargs)


def placed_as_input(node: Node, args: tuple[Any, ...], result: Any) -> Any:
    """Give what a scatter makes with the room before it that its input has in its buffer.

    Torch keeps what operators make of fake tensors, and loses that room: the same graph would take
    fewer bytes when it is captured again.
    """
    if (
        not operator_of(node.target).assigns
        or result.stride() != args[0].stride()
        or 0 in result.shape
    ):
        return result
    offset = args[0].storage_offset()
    reach = sum((size - 1) * step for size, step in zip(result.shape, result.stride(), strict=True))
    buffer = result.new_empty(offset + reach + 1)
    return buffer.as_strided(result.shape, result.stride(), offset)


def in_memory_of_terms(node: Node, args: tuple[Any, ...], result: Any) -> Any:
    """Give what a loss makes in the memory that it takes: that of all terms, even of their sum."""
    if not operator_of(node.target).sum_in_terms or result.dim():
        return result
    shape: torch.Size = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return result.new_empty(max(1, shape.numel())).as_strided((), ())


def _strides_of_view(tensor: torch.Tensor, size: list[int]) -> tuple[int, ...] | None:
    """Ask torch itself: its fake views allow what real ones do not."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        try:
            return like.view(size).stride()
        except RuntimeError:
            return None


def _may_differ(target: torch._ops.OpOverload) -> bool:
    return not is_collective(target) and not any(
        argument.alias_info is not None for argument in target._schema.arguments
    )


def _worth_running(tensors: list[torch.Tensor]) -> bool:
    kinds = {tensor.device.type for tensor in tensors}
    if kinds <= {"cpu"}:
        return not all(map(_is_plain, tensors))
    return kinds <= {"cpu", "cuda"}


def _layouts_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layouts | None:
    """Run an operator on made-up inputs; `None` if it cannot be run so."""
    try:
        real_args, real_kwargs = pytree.tree_map(_made_up, (args, kwargs))
        with (
            torch._subclasses.fake_tensor.unset_fake_temporarily(),
            torch.no_grad(),
            generators_restored(),  # some draw random numbers
        ):
            real_args, real_kwargs = pytree.tree_map(_fill, (real_args, real_kwargs))
            result = target(*real_args, **real_kwargs)
    except Exception:
        return None
    parts = result if isinstance(result, (tuple, list)) else [result]
    return tuple(TensorFacts.of(part) if _is_tensor(part) else None for part in parts)


def _made_up(item: Any) -> Any:
    return TensorFacts.of(item) if _is_tensor(item) else item


def _fill(item: Any) -> Any:
    if not isinstance(item, TensorFacts):
        return item
    tensor = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device=item.device)
    return tensor.fill_(0.5 if item.dtype.is_floating_point or item.dtype.is_complex else 0)


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous()


def _describe(item: Any) -> Any:
    if not _is_tensor(item):
        return item
    return (tuple(item.shape), tuple(item.stride()), str(item.dtype), str(item.device))
