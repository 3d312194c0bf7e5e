"""Operators that torch takes apart while it traces, and eager runs as one kernel.

For these, torch has a formula in Python in the place of autograd's: interpolations, two shrinking
activations, two losses. What is traced of them rounds otherwise, keeps a tensor for each corner of
an interpolation, and takes up to five times the memory of the kernel. So while this project traces,
they are what they are in eager: one operator, and one for its backward.

Others that torch takes apart stay so. Recurrent layers have no one operator to trace. A dropout, a
batch norm and a product of any dimensions come to the kernels that eager runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size

__all__ = ["operators_kept_whole"]

aten = torch.ops.aten

_RESIZING = (
    aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d,
    aten.upsample_bicubic2d, aten.upsample_nearest1d, aten.upsample_nearest2d,
    aten.upsample_nearest3d, aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
)  # fmt: skip
_OTHERS = (
    aten.hardshrink, aten.softshrink, aten.multi_margin_loss, aten.multilabel_margin_loss_forward,
)  # fmt: skip
_TRACED_BY = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def operators_kept_whole() -> Iterator[None]:
    """Let what this thread traces call operators that torch would take apart."""
    thread = threading.get_ident()
    with contextlib.ExitStack() as stack:
        for operator in (*_RESIZING, *_OTHERS):
            stack.enter_context(_runs_as(operator.default, _by_autograd(operator.default), thread))
        for operator in _RESIZING:
            stack.enter_context(_runs_as(operator.vec, _by_size(operator.default), thread))
        yield


def _by_autograd(operator: Any) -> Callable[..., Any]:
    def whole(*args: Any, **kwargs: Any) -> Any:
        return operator._op_dk(DispatchKey.Autograd, *args, **kwargs)

    return whole


def _by_size(operator: Any) -> Callable[..., Any]:
    """Give what an interpolation to a size or by factors is, as of the operator that it calls."""

    def resized(image: Any, size: Any, *args: Any) -> Any:
        *others, factors = args
        sizes = upsample_compute_output_size(image.size(), size, factors)  # type: ignore[no-untyped-call]
        return operator(image, sizes, *others, *(factors or [None] * len(sizes)))

    return resized


@contextlib.contextmanager
def _runs_as(operator: Any, function: Callable[..., Any], thread: int) -> Iterator[None]:
    """Let calls of this thread, under autograd of what is traced, come to a function."""
    kernels = operator.py_kernels
    before = {key: kernels[key] for key in _TRACED_BY if key in kernels}

    def chosen(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def choose(*args: Any, **kwargs: Any) -> Any:
            own = threading.get_ident() == thread
            return (function if own else theirs)(*args, **kwargs)

        return choose

    kernels.update({key: chosen(theirs) for key, theirs in before.items()})
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        kernels.update(before)
        operator._dispatch_cache.clear()
