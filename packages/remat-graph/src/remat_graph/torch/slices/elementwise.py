"""Rules of what works element by element, of what makes tensors of numbers, and of copies.

An axis of the result is followed to each tensor that has it, after broadcasting; what does not have
it is whole. Linear ones take sums as well: what they make of addends is added up to what they make
of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from remat_graph.torch.slices.placement import SUMMED, WHOLE, Place, Placement, Reading, Size

__all__ = ["RULES", "is_pointwise", "pointwise"]

aten = torch.ops.aten

# Pointwise operators that torch does not tag as such.
_MORE = (
    aten._to_copy.default, aten.elu_backward.default, aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default, aten.hardswish.default, aten.hardswish_backward.default,
    aten.hardtanh_backward.default, aten.leaky_relu_backward.default,
    aten.log_sigmoid_backward.default, aten.log_sigmoid_forward.default,
    aten.floor_divide.default, aten.lift_fresh_copy.default,
    aten.masked_fill.Tensor, aten.mish_backward.default, aten.softplus_backward.default,
    aten.softshrink_backward.default, aten.where.ScalarOther, aten.where.ScalarSelf,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
)  # fmt: skip
_SIZED = (
    aten.full.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default,
    aten.ones.default, aten.zeros.default,
)  # fmt: skip


def pointwise(c: Reading) -> Iterator[Placement]:
    """Follow each axis of the result."""
    tensors = dict(c.tensors)
    rank = max((len(facts.shape) for facts in tensors.values()), default=0)
    for axis in range(-rank, 0):
        having = {
            name: axis + len(facts.shape)
            for name, facts in tensors.items()
            if len(facts.shape) >= -axis and facts.shape[axis] > 1
        }
        if having:
            yield c.placement(having, [axis + rank] * _count(c, rank))


def _count(c: Reading, rank: int) -> int:
    """Count the results, but the buffer of CUDA's `log_sigmoid`, which is empty."""
    results = [c.result(result) for result in range(len(c.call.results))]
    return sum(facts is None or len(facts.shape) == rank for facts in results)


def _linear(c: Reading) -> Iterator[Placement]:
    yield from pointwise(c)
    yield c.placement({name: SUMMED for name, _ in c.tensors}, [SUMMED])


def _sum_or_difference(c: Reading) -> Iterator[Placement]:
    """Add sums to sums; a number would be added once for each slice."""
    yield from pointwise(c)
    if c.facts("other") is not None:
        yield c.placement({"self": SUMMED, "other": SUMMED}, [SUMMED])


def _product(c: Reading) -> Iterator[Placement]:
    yield from pointwise(c)
    yield c.placement({"self": SUMMED, "other": WHOLE}, [SUMMED])
    if c.facts("other") is not None:
        yield c.placement({"self": WHOLE, "other": SUMMED}, [SUMMED])


def _quotient(c: Reading) -> Iterator[Placement]:
    yield from pointwise(c)
    yield c.placement({"self": SUMMED, "other": WHOLE}, [SUMMED])


def _cast(c: Reading) -> Iterator[Placement]:
    """Cast addends where no bit of them is lost: else the sum is rounded once, they often."""
    yield from pointwise(c)
    source, result = c.facts("self"), c.result()
    if source is None or result is None or source.dtype.is_complex != result.dtype.is_complex:
        return
    if torch.promote_types(source.dtype, result.dtype) == result.dtype:
        yield c.placement({"self": SUMMED}, [SUMMED])


def _sized(c: Reading) -> Iterator[Placement]:
    """Make as many rows as the slice has, of what is the same in each.

    Of a tensor that is given, the type alone is read: it may stand anywhere.
    """
    given = "self" in c.call.argument_names
    standing: list[int | Place] = [WHOLE]
    if given:
        standing += [at for at, length in enumerate(c.shape("self")) if length > 1]
    for axis, size in enumerate(c["size"]):
        if size > 1:
            for place in standing:
                places = {"self": place} if given else {}
                yield c.placement(places, [axis], sizes=[Size("size", axis)])


def is_pointwise(target: Any) -> bool:
    """Whether torch says that an operator makes tensors of tensors element by element."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
        and all(str(item.type) == "Tensor" for item in target._schema.returns)
    )


RULES = {
    **dict.fromkeys(_MORE, pointwise),
    **dict.fromkeys((aten.neg.default, aten.clone.default), _linear),
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), _sum_or_difference),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _product),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _quotient),
    **dict.fromkeys(_SIZED, _sized),
    aten._to_copy.default: _cast,
}
