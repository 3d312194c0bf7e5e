"""Which calls are linear in some of what they read: twice that gives twice the result.

A backward is linear in the gradients that come to it, but for what users write in the backward of
an `autograd.Function`: a clipped gradient is not. So each call is asked, by a list: what is not on
it is taken to be something else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from remat_graph.torch.calls import Call, Variable
from remat_graph.torch.kernels.cross_entropy import cross_entropy_backward

__all__ = ["LINEAR", "is_linear"]

aten = torch.ops.aten

# In what they read of it, as long as it is in one of their arguments alone.
_IN_EACH = frozenset({
    aten._to_copy.default, aten._unsafe_view.default, aten.alias.default, aten.bmm.default,
    aten.clone.default, aten.detach.default, aten.expand.default, aten.mean.default,
    aten.mean.dim, aten.mm.default, aten.mul.Scalar, aten.mul.Tensor, aten.neg.default,
    aten.permute.default, aten.select.int, aten.slice.Tensor, aten.squeeze.dim,
    aten.squeeze.dims, aten.sum.default, aten.sum.dim_IntList, aten.t.default,
    aten.transpose.int, aten.unsqueeze.default, aten.view.default,
})  # fmt: skip
_IN_FIRST = frozenset({aten.div.Scalar, aten.div.Tensor})
_IN_SECOND = frozenset({cross_entropy_backward})
_IN_ALL = frozenset({aten.add.Tensor, aten.cat.default, aten.sub.Tensor})
_FILLING = {aten.masked_fill.Scalar: "value", aten.where.ScalarOther: "other"}
LINEAR = _IN_EACH | _IN_FIRST | _IN_SECOND | _IN_ALL | _FILLING.keys()


def is_linear(call: Call, variables: Collection[str]) -> bool:
    """Whether a call is linear in these variables, at least one of which it reads."""
    target = call.target
    inside = [name in variables for name in call.variables]
    if target in _IN_ALL:
        return all(inside) and _are_tensors(call)
    if sum(inside) != 1 or _rounds(call):
        return False
    if target in _IN_EACH:
        return True
    if target in _IN_SECOND:
        return _is_one_of(call.args[1], variables)
    filling = _FILLING.get(target)
    if filling is not None:
        first = call.args[0] if target is aten.masked_fill.Scalar else call.args[1]
        return _is_one_of(first, variables) and call.argument(filling) == 0
    return (target in _IN_FIRST or _is_backward(target)) and _is_one_of(call.args[0], variables)


def _rounds(call: Call) -> bool:
    """Whether what it makes are integers, or truth values."""
    schema = getattr(call.target, "_schema", None)
    if schema is None or not any(each.name == "dtype" for each in schema.arguments):
        return False
    dtype = call.argument("dtype")
    return dtype is not None and not dtype.is_floating_point


def _are_tensors(call: Call) -> bool:
    """Whether no number is added: `add` takes one in the place of a tensor."""
    return call.target is aten.cat.default or all(
        isinstance(item, Variable) for item in call.args[:2]
    )


def _is_one_of(item: Any, variables: Collection[str]) -> bool:
    return isinstance(item, Variable) and item.name in variables


def _is_backward(target: Any) -> bool:
    """Whether it is torch's own backward of an operator, whose first argument is the gradient."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::") or "_backward" not in schema.name:
        return False
    return bool(schema.arguments) and schema.arguments[0].name.startswith("grad")
