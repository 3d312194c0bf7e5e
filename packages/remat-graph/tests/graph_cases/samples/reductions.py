"""Reductions, and what goes along an axis."""

import math

import torch

from graph_cases.samples.drawing import sample

aten = torch.ops.aten


@sample(aten.sum.default, aten.mean.default, aten.any.default, aten.all.default)
def _over_all(d, target):
    x = d.signed(*d.sizes(0, 4))
    return [x > 0 if target in (aten.any.default, aten.all.default) else x], {}


@sample(
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.logsumexp.default,
)  # fmt: skip
def _over_some(d, target):
    x = d.signed(*d.sizes())
    dims = sorted({d.int(0, x.dim() - 1) for _ in range(d.int(1, 3))})
    dims = [dim - d.of(0, x.dim()) for dim in dims]
    return [x, dims if target is aten.logsumexp.default else d.of(dims, []), bool(d.int(0, 1))], {}


@sample(aten.any.dims, aten.all.dims)
def _bools_over_some(d, target):
    x = d.signed(*d.sizes()) > 0
    return [x, [d.axis(x.dim())], bool(d.int(0, 1))], {}


@sample(
    aten.any.dim, aten.all.dim, aten.max.dim, aten.min.dim, aten.prod.dim_int,
    aten.argmax.default, aten.argmin.default,
)  # fmt: skip
def _over_one(d, target):
    x = d.signed(*d.sizes())
    x = x > 0 if target in (aten.any.dim, aten.all.dim) else x
    whole = target in (aten.argmax.default, aten.argmin.default) and not d.int(0, 3)
    return [x, None if whole else d.axis(x.dim()), bool(d.int(0, 1))], {}


@sample(aten.linalg_vector_norm.default)
def _norm(d, target):
    x = d.signed(*d.sizes())
    return [x, d.of(1, 2, math.inf), d.of([d.axis(x.dim())], None), bool(d.int(0, 1))], {}


@sample(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def _variance(d, target):
    x = d.signed(*d.sizes())
    dims = d.of([d.axis(x.dim())], None)
    return [x, dims], {"correction": d.of(0, None), "keepdim": bool(d.int(0, 1))}


@sample(aten._softmax.default, aten._log_softmax.default)
def _softmax(d, target):
    x = d.signed(*d.sizes())
    return [x, d.axis(x.dim()), False], {}


@sample(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(d, target):
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    return [d.signed(*x.shape), x.softmax(dim), dim, x.dtype], {}


@sample(
    aten._safe_softmax.default, aten.cumsum.default, aten.cumprod.default,
    aten.logcumsumexp.default, aten.sort.default,
)  # fmt: skip
def _along(d, target):
    x = d.signed(*d.sizes())
    return [x, d.axis(x.dim())], {}


@sample(aten.sort.stable)
def _stable(d, target):
    x = d.signed(*d.sizes())
    return [x], {"stable": True, "dim": d.axis(x.dim())}


@sample(aten.topk.default)
def _topk(d, target):
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    return [x, d.int(1, x.shape[dim]), dim], {}


@sample(aten.glu.default, aten.glu_backward.default)
def _glu(d, target):
    shape = d.sizes()
    dim = d.axis(len(shape))
    shape[dim] *= 2
    x = d.signed(*shape)
    return [d.signed(*aten.glu(x, dim).shape), x, dim] if "back" in str(target) else [x, dim], {}


@sample(aten.flip.default)
def _flip(d, target):
    x = d.signed(*d.sizes())
    return [x, d.of([d.axis(x.dim())], [])], {}


@sample(aten.roll.default)
def _roll(d, target):
    x = d.signed(*d.sizes())
    return [x, [d.int(-2, 2)], d.of([d.axis(x.dim())], [])], {}


@sample(aten.tril.default, aten.triu.default)
def _triangle(d, target):
    return [d.signed(*d.sizes(2, 4)), d.int(-1, 1)], {}
