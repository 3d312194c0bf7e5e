"""Fake tensors that lie as real ones do.

What an operator makes of inputs that are not contiguous lies otherwise in torch's fake tensors than
in real ones: of batch norms, and of the backwards of some norms, losses, activations and dropouts.
What is traced asks how tensors lie: whether `contiguous()` is a copy, which attention runs, which
way a determinant was factored. Some of these kernels then read memory as the trace says it lies,
without a look: the backward of a group norm gives other numbers.

So such an operator is run on a few real numbers, whose sizes are one or two and lie in the same
order, and the fake tensor is laid out as what comes of it. Limits: on a device that is there, and
of operators that run on any sizes; of contiguous inputs none was found whose fake results differ.
Paddings, unpooling and norms over given sizes lie otherwise, too: they are contiguous where fakes
are not, or in `channels_last` with all that reads them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remat_graph.torch.tracing.fakes import new_fake

__all__ = ["as_real", "lying_as_real"]

aten = torch.ops.aten

# Beside those that torch tags as pointwise: what gives as many numbers as it reads, or one for each
# channel, and so runs on any sizes. Others read beyond their inputs on sizes that they do not know.
_BESIDE = frozenset({
    aten._batch_norm_with_update, aten._batch_norm_with_update_functional,
    aten._log_softmax, aten._log_softmax_backward_data, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training,
    aten._prelu_kernel_backward, aten._softmax, aten._softmax_backward_data,
    aten.batch_norm_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
    aten.elu_backward, aten.floor_divide, aten.hardshrink_backward, aten.hardsigmoid_backward,
    aten.hardswish, aten.hardswish_backward, aten.hardtanh_backward, aten.huber_loss,
    aten.huber_loss_backward, aten.leaky_relu_backward, aten.log_sigmoid_backward,
    aten.log_sigmoid_forward, aten.mish_backward, aten.mse_loss, aten.mse_loss_backward,
    aten.native_batch_norm, aten.native_batch_norm_backward, aten.rrelu_with_noise_backward,
    aten.smooth_l1_loss, aten.smooth_l1_loss_backward, aten.soft_margin_loss_backward,
    aten.softplus_backward, aten.softshrink_backward,
})  # fmt: skip

_Orders = tuple[tuple[int, ...] | None, ...]

_orders: dict[Any, _Orders] = {}  # by operator and layouts of what it reads


@contextlib.contextmanager
def lying_as_real() -> Iterator[None]:
    """Let what this thread traces see fake tensors that lie as real ones."""
    thread, dispatch = threading.get_ident(), FakeTensorMode.dispatch

    def corrected(
        mode: FakeTensorMode,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = dispatch(mode, func, types, args, kwargs or {})
        return as_real(func, args, kwargs or {}, result) if _is_own(thread) else result

    FakeTensorMode.dispatch = corrected  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]


def _is_own(thread: int) -> bool:
    return threading.get_ident() == thread


def as_real(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Give what an operator makes of fake tensors as it lies if they are real."""
    with contextlib.suppress(_Unclear):
        if _may_run(func) and any(map(_lies_in_another_order, _flat(args))):
            return _laid_out(func, tuple(args), dict(kwargs), result)
    return result


def _laid_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    small_args, small_kwargs = pytree.tree_map(_small, (args, kwargs))
    key = repr((str(func), small_args, small_kwargs))
    if key not in _orders:
        _orders[key] = _orders_of(func, small_args, small_kwargs)
    parts, structure = pytree.tree_flatten(result)
    if len(_orders[key]) != len(parts):
        return result
    laid = [
        part if order is None or not isinstance(part, FakeTensor) else _in_order(part, order)
        for part, order in zip(parts, _orders[key], strict=True)
    ]
    return pytree.tree_unflatten(laid, structure)


class _Unclear(Exception):
    """Nothing small stands for this."""


def _flat(args: Sequence[Any]) -> Iterator[Any]:
    for item in args:
        if isinstance(item, (tuple, list)):
            yield from item
        else:
            yield item


def _lies_in_another_order(item: Any) -> bool:
    if not isinstance(item, FakeTensor) or not _is_strided(item):
        return False
    if not item._has_symbolic_sizes_strides:
        return not item.is_contiguous()
    expected = 1
    for size, step in reversed(list(zip(item.shape, item.stride(), strict=True))):
        if _number(size) != 1:
            if _number(step) != expected:
                return True
            expected *= _number(size)
    return False


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether it has strides, and is on a device on which something can be run."""
    device = tensor.device.type
    is_there = device == "cpu" or (device == "cuda" and torch.cuda.is_available())
    return is_there and tensor.layout is torch.strided


def _may_run(func: Any) -> bool:
    """Whether it is an operator that may lie, changes nothing, views nothing and draws nothing."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    if func.overloadpacket not in _BESIDE and torch.Tag.pointwise not in func.tags:
        return False
    parts = (*func._schema.arguments, *func._schema.returns)
    return torch.Tag.nondeterministic_seeded not in func.tags and all(
        part.alias_info is None for part in parts
    )


def _small(item: Any) -> Any:
    """Describe a tensor of sizes of one and two in the place of one; a symbol is any number."""
    if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return 2
    if not isinstance(item, torch.Tensor):
        return item
    if is_traceable_wrapper_subclass(item) or not _is_strided(item):
        raise _Unclear
    shape, stride = tuple(map(_number, item.shape)), tuple(map(_number, item.stride()))
    small = tuple(min(size, 2) for size in shape)
    return _Small(small, _in_same_order(shape, stride, small), item.dtype, item.device)


@dataclass(frozen=True, slots=True)
class _Small:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def real(self) -> torch.Tensor:
        like = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return like.fill_(0.5 if self.dtype.is_floating_point or self.dtype.is_complex else 0)


def _in_same_order(
    shape: tuple[int, ...], stride: tuple[int, ...], small: tuple[int, ...]
) -> tuple[int, ...]:
    """Give strides by which smaller sizes lie in the same order, with room where there is some."""
    strides = [0] * len(shape)
    expected = step = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (stride[axis], shape[axis])):
        if not stride[axis]:
            continue
        if stride[axis] != expected and shape[axis] > 1:
            step *= 2
        strides[axis] = step
        if shape[axis] > 1:
            expected, step = stride[axis] * shape[axis], step * small[axis]
    return tuple(strides)


def _orders_of(func: Any, args: Any, kwargs: Any) -> _Orders:
    """Find the order of axes in which each result lies, where it is dense; nothing if it fails."""
    try:
        with torch._C._DisableTorchDispatch(), torch._C._DisablePythonDispatcher(), torch.no_grad():
            result = func(*pytree.tree_map(_real, args), **pytree.tree_map(_real, kwargs))
    except Exception:
        return ()
    return tuple(map(_order, pytree.tree_leaves(result)))


def _real(item: Any) -> Any:
    return item.real() if isinstance(item, _Small) else item


def _order(result: Any) -> tuple[int, ...] | None:
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return None
    axes = [axis for axis, size in enumerate(result.shape) if size > 1]
    ordered = sorted(axes, key=lambda axis: (result.stride(axis), -axis))
    dense = [math.prod(result.shape[axis] for axis in ordered[:at]) for at in range(len(ordered))]
    return tuple(ordered) if [result.stride(axis) for axis in ordered] == dense else None


def _in_order(fake: FakeTensor, order: tuple[int, ...]) -> FakeTensor:
    """Lay a fake tensor out with its axes in this order, from the one that lies closest."""
    shape, stride = tuple(map(_number, fake.shape)), tuple(map(_number, fake.stride()))
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if 0 in shape or sorted(axes) != sorted(order):
        return fake
    if sorted(axes, key=lambda axis: (stride[axis], -axis)) == list(order):
        return fake
    strides: list[Any] = [1] * len(shape)
    step: Any = 1
    for axis in (*order, *(axis for axis in range(len(shape)) if axis not in order)):
        strides[axis] = step
        step = step * fake.shape[axis]
    return new_fake(fake.fake_mode, fake.shape, strides, fake.dtype, fake.device)


def _number(size: Any) -> int:
    """Give a size as a number, without a condition that it be this one."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        if hint is None:
            raise _Unclear
        return max(2, int(hint))
    return int(size)
