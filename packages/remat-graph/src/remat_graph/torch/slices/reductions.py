"""Rules of what goes along some axes: sums, means, maxima, softmax, scans, sorts.

Other axes are followed. Along the own ones a sum is summed, and a mean is a sum of means, each
multiplied by the share of its slice; nothing else may be cut there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from remat_graph.torch.slices.placement import SUMMED, Placement, Reading

__all__ = ["RULES"]

aten = torch.ops.aten


def _own_axes(c: Reading) -> set[int]:
    """Find the axes that are reduced: all if none is named."""
    rank = c.rank("self")
    named = c["dim"] if c.has_axes else None
    dims = [named] if isinstance(named, int) else named or range(rank)
    return {dim % rank for dim in dims} if rank else set()


def _reduced(c: Reading) -> Iterator[Placement]:
    """Follow the axes that are left."""
    own, shape = _own_axes(c), c.shape("self")
    for axis, size in enumerate(shape):
        if axis not in own and size > 1:
            target = axis if c.keeps_axes else axis - sum(each < axis for each in own)
            yield c.placement({"self": axis}, [target] * len(c.call.results))


def _sum(c: Reading) -> Iterator[Placement]:
    yield from _reduced(c)
    for axis in sorted(_own_axes(c)):
        if c.shape("self")[axis] > 1:
            yield c.placement({"self": axis}, [SUMMED])
    yield c.placement({"self": SUMMED}, [SUMMED])


def _mean(c: Reading) -> Iterator[Placement]:
    yield from _reduced(c)
    for axis in sorted(_own_axes(c)):
        if c.shape("self")[axis] > 1:
            yield c.placement({"self": axis}, [SUMMED], by_share=[0])
    yield c.placement({"self": SUMMED}, [SUMMED])


def _along(c: Reading) -> Iterator[Placement]:
    """Follow, in all tensors and results, all axes but the one that it goes along."""
    tensors = dict(c.tensors)
    shape = next(iter(tensors.values())).shape
    dim = c.axis("dim", len(shape))
    for axis, size in enumerate(shape):
        if axis != dim and size > 1:
            yield c.placement(dict.fromkeys(tensors, axis), [axis] * len(c.call.results))


def _reordered(c: Reading) -> Iterator[Placement]:
    """Follow all axes that are not turned round; without names all are, as one."""
    shape, dims = c.shape("self"), c["dims"]
    turned = {dim % len(shape) for dim in dims}
    for axis, size in enumerate(shape):
        if dims and axis not in turned and size > 1:
            yield c.placement({"self": axis}, [axis])


def _triangle(c: Reading) -> Iterator[Placement]:
    """Follow batches of matrices."""
    for axis, size in enumerate(c.shape("self")[:-2]):
        if size > 1:
            yield c.placement({"self": axis}, [axis])
    yield c.placement({"self": SUMMED}, [SUMMED])


RULES = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _sum),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean),
    **dict.fromkeys(
        (
            aten.all.default, aten.all.dim, aten.all.dims, aten.amax.default, aten.amin.default,
            aten.any.default, aten.any.dim, aten.any.dims, aten.argmax.default,
            aten.argmin.default, aten.linalg_vector_norm.default, aten.logsumexp.default,
            aten.max.dim, aten.min.dim, aten.prod.dim_int, aten.std.correction,
            aten.var.correction, aten.var_mean.correction,
        ),
        _reduced,
    ),
    **dict.fromkeys(
        (
            aten._log_softmax.default, aten._log_softmax_backward_data.default,
            aten._safe_softmax.default, aten._softmax.default,
            aten._softmax_backward_data.default, aten.cumprod.default, aten.cumsum.default,
            aten.glu.default, aten.glu_backward.default, aten.logcumsumexp.default,
            aten.sort.default, aten.sort.stable, aten.topk.default,
        ),
        _along,
    ),
    **dict.fromkeys((aten.flip.default, aten.roll.default), _reordered),
    **dict.fromkeys((aten.tril.default, aten.triu.default), _triangle),
}  # fmt: skip
