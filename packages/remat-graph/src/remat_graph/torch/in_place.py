"""Operators that can make the same bits in the buffer of their first argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat_graph.torch.packing import backward_of_kept, keep_in_place

__all__ = ["IN_PLACE", "PARTS", "may_overwrite"]

aten = torch.ops.aten


def _over_gradient(operator: Any) -> Callable[..., Any]:
    """Let the backward of a pointwise function write over the gradient that it reads.

    It is for operators whose kernel writes into `grad_input` itself, and so needs nothing beside.
    """

    def over_gradient(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = operator.grad_input(grad, *args, **kwargs, grad_input=grad)
        return made

    over_gradient.__name__ = f"{operator.__name__}_"
    return over_gradient


_POINTWISE_BACKWARDS = (
    aten.elu_backward,
    aten.gelu_backward,
    aten.hardshrink_backward,
    aten.hardsigmoid_backward,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.sigmoid_backward,
    aten.silu_backward,
    aten.softplus_backward,
    aten.softshrink_backward,
    aten.tanh_backward,
    aten.threshold_backward,
)
IN_PLACE: dict[Any, Callable[..., Any]] = {
    aten.relu.default: aten.relu_.default,
    aten.hardtanh.default: aten.hardtanh_.default,
    aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.neg.default: aten.neg_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.mul.Scalar: aten.mul_.Tensor,  # `mul_.Scalar` rounds the number to 16 bits
    aten.div.Scalar: aten.div_.Scalar,
    backward_of_kept: keep_in_place,
    **{operator.default: _over_gradient(operator) for operator in _POINTWISE_BACKWARDS},
}
PARTS = {  # what gives the part of a tensor that one of these assigns to
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


def may_overwrite(target: Any) -> bool:
    """Whether there is an operator that does the same in place."""
    return target in IN_PLACE or target in PARTS
