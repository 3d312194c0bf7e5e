"""Operators that torch takes apart while it traces, and eager runs as one kernel.

For these, torch has a formula in Python in the place of autograd's: interpolations, two shrinking
activations, two losses. What is traced of them rounds otherwise, keeps a tensor for each corner of
an interpolation, and takes up to five times the memory of the kernel. So while this project traces,
they are what they are in eager: one operator, and one for its backward.

Of some of these backwards torch does not say what they give where sizes are symbols. It is said
here, by meta tensors.

Others that torch takes apart stay so. A dropout, a batch norm and a product of any dimensions come
to the kernels that eager runs. Recurrent layers are traced in steps (`rnns`), but for LSTMs on the
CPU (`lstm_in_layers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._prims_common import suggest_memory_format

from remat_graph.torch.tracing.overriding import overridden

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
    by_autograd = {each.default: _by_autograd(each.default) for each in (*_RESIZING, *_OTHERS)}
    by_size = {each.vec: _by_size(each.default) for each in _RESIZING}
    with contextlib.ExitStack() as stack:
        for operator, function in {**by_autograd, **by_size}.items():
            stack.enter_context(overridden(operator, function, *_TRACED_BY, if_there=True))
        for operator, gradient in _GRADIENTS.items():
            stack.enter_context(overridden(operator, gradient, DispatchKey.Meta))
        yield


def _of_image(of_output: torch.Tensor, _: Any, size: Any, *__: Any) -> torch.Tensor:
    return of_output.new_empty(size)


def _of_image_alike(of_output: torch.Tensor, _: Any, size: Any, *__: Any) -> torch.Tensor:
    layout = suggest_memory_format(of_output)
    return of_output.new_empty(size).to(memory_format=layout)


def _of_scores(_: torch.Tensor, scores: torch.Tensor, *__: Any) -> torch.Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _of_each(of_output: torch.Tensor, each: torch.Tensor, *_: Any) -> torch.Tensor:
    return of_output * each


_GRADIENTS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.upsample_linear1d_backward.default: _of_image,
    aten.upsample_bilinear2d_backward.default: _of_image_alike,
    aten.upsample_trilinear3d_backward.default: _of_image_alike,
    aten.upsample_bicubic2d_backward.default: _of_image,
    aten.hardshrink_backward.default: _of_each,
    aten.softshrink_backward.default: _of_each,
    aten.multi_margin_loss_backward.default: _of_scores,
    aten.multilabel_margin_loss_backward.default: _of_scores,
}


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
