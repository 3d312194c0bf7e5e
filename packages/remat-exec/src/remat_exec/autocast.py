"""A backward within an autocast that its forward was not in: products in the type of that autocast.

Autograd runs a backward under the autocast in which it is called. What that casts of the operators
in a backward are matrix products; each gradient then gets the type of what it is the gradient of.
The same is done here by casts of its own, so that their memory is known before the backward starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from remat_graph.torch import Call, Program, TensorFacts, Variable, operator_of

__all__ = ["autocast_type", "lowered_bytes", "run_lowered"]

aten = torch.ops.aten
_CAST = frozenset({torch.float32, torch.float16, torch.bfloat16})


def autocast_type(device: torch.device) -> torch.dtype | None:
    """Give the type to which autocast casts on a device now; `None` without autocast."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def lowered_bytes(program: Program, dtype: torch.dtype) -> dict[str, int]:
    """Find the products of a backward that work in another type, and what their casts take."""
    return {
        op: _cast_bytes(program, call, dtype)
        for op, call in program.calls.items()
        if op in program.backward_ops
        and operator_of(call.target).is_product
        and _cast_bytes(program, call, dtype)
    }


def _cast_bytes(program: Program, call: Call, dtype: torch.dtype) -> int:
    names = {item.name for item in call.args if isinstance(item, Variable)}
    names.update(name for name in call.results if name is not None)
    facts = [program.facts[name] for name in names if name in program.facts]
    return sum(_size(item, dtype) for item in facts if item.dtype in _CAST - {dtype})


def _size(facts: TensorFacts, dtype: torch.dtype) -> int:
    return math.prod(facts.shape) * dtype.itemsize


def run_lowered(
    dtype: torch.dtype,
    wanted: torch.dtype,
    operator: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Run a product in one type, and give it in another."""
    product: torch.Tensor = operator(
        *(
            item.to(dtype) if isinstance(item, torch.Tensor) and item.dtype in _CAST else item
            for item in args
        ),
        **kwargs,
    )
    return product.to(wanted)
