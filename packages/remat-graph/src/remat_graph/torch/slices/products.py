"""Rules of matrix products: rows, columns and batches are cut; along what is summed over, summed.

A product is linear in each of its factors. What is added to it is added once, so a product with a
bias is not cut along what is summed over.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from remat_graph.torch.slices.placement import SUMMED, WHOLE, Placement, Reading

__all__ = ["RULES"]

aten = torch.ops.aten


def _product(c: Reading) -> Iterator[Placement]:
    one, other = c.call.argument_names[:2]
    rows, inner = c.rank(one) - 2, c.rank(one) - 1
    for batch in range(rows):
        yield c.placement({one: batch, other: batch}, [batch])
    yield c.placement({one: rows}, [rows])
    yield c.placement({other: inner}, [inner])
    yield c.placement({one: inner, other: rows}, [SUMMED])
    yield from _linear_in_each(c, one, other)


def _linear_in_each(c: Reading, one: str, other: str) -> Iterator[Placement]:
    yield c.placement({one: SUMMED, other: WHOLE}, [SUMMED])
    yield c.placement({one: WHOLE, other: SUMMED}, [SUMMED])


def _product_and_sum(c: Reading) -> Iterator[Placement]:
    """Follow axes as in a product, and in what is added to it if that has them."""
    added, one, other = c.call.argument_names[:3]
    rank = c.rank(one)
    cuts: list[tuple[int, dict[str, int]]] = [
        *((batch, {one: batch, other: batch}) for batch in range(rank - 2)),
        (rank - 2, {one: rank - 2}),
        (rank - 1, {other: rank - 1}),
    ]
    shape = c.shape(added)
    for target, places in cuts:
        own = target - rank + len(shape)
        if own >= 0 and shape[own] > 1:
            places[added] = own
        yield c.placement(places, [target])


def _vector(c: Reading) -> Iterator[Placement]:
    """Follow axes of a matrix times a vector, and of two vectors."""
    one, other = c.call.argument_names[:2]
    if c.rank(one) == 2:
        yield c.placement({one: 0}, [0])
    yield c.placement({one: c.rank(one) - 1, other: 0}, [SUMMED])
    yield from _linear_in_each(c, one, other)


RULES = {
    **dict.fromkeys((aten.mm.default, aten.mm.dtype, aten.bmm.default, aten.bmm.dtype), _product),
    **dict.fromkeys(
        (aten.addmm.default, aten.addmm.dtype, aten.baddbmm.default),
        _product_and_sum,
    ),
    **dict.fromkeys((aten.mv.default, aten.dot.default), _vector),
}
