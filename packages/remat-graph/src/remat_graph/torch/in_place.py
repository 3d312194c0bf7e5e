"""Operators that can make the same bits in the buffer of their first argument."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["IN_PLACE", "PARTS", "may_overwrite"]

aten = torch.ops.aten
IN_PLACE = {
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
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Scalar: aten.div_.Scalar,
}
PARTS = {  # what gives the part of a tensor that one of these assigns to
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}


def may_overwrite(target: Any) -> bool:
    """Whether there is an operator that does the same in place."""
    return target in IN_PLACE or target in PARTS
