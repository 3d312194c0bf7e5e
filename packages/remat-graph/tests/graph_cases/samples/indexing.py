"""Indexing: looking up, gathering, scattering."""

import torch

from graph_cases.samples.drawing import sample

aten = torch.ops.aten


@sample(aten.embedding.default)
def _embedding(d, target):
    return [d.signed(7, d.int(1, 5)), d.indices(7, *d.sizes(0, 3))], {}


@sample(aten.embedding_dense_backward.default)
def _embedding_backward(d, target):
    indices = d.indices(7, *d.sizes(1, 3))
    grad = d.signed(*indices.shape, d.int(1, 5))
    return [grad, indices, 7, d.of(-1, 2), bool(d.int(0, 1))], {}


@sample(aten.index_select.default, aten.index_add.default)
def _along_indices(d, target):
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    index = d.indices(x.shape[dim], d.int(1, 5))
    if target is aten.index_select.default:
        return [x, dim, index], {}
    return [x, dim, index, d.signed(*x.index_select(dim, index).shape)], {"alpha": 2}


@sample(aten.gather.default)
def _gather(d, target):
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    shape = [d.of(size, d.int(1, size)) for size in x.shape]
    shape[dim] = d.int(1, 6)
    return [x, dim, d.indices(x.shape[dim], *shape)], {}


@sample(
    aten.scatter.value, aten.scatter.src, aten.scatter.reduce, aten.scatter.value_reduce,
    aten.scatter_add.default,
)  # fmt: skip
def _scatter(d, target):
    """The indices along an axis differ, or which is written last would be left open."""
    x = d.signed(*d.sizes())
    dim = d.axis(x.dim())
    shape = [d.of(size, size, d.int(1, size)) for size in x.shape]
    index = torch.argsort(d.signed(*x.shape), dim)[tuple(map(slice, shape))]
    source = 0.5 if "value" in str(target) else d.signed(*index.shape)
    return [x, dim, index, source], {"reduce": "add"} if "reduce" in str(target) else {}


def several_indices(d):
    x = d.signed(*d.sizes(2, 4))
    shape = d.sizes(1, 2, longest=4)
    places = [bool(d.int(0, 1)) for _ in x.shape]
    places[d.int(0, x.dim() - 1)] = True
    own = [[size if d.int(0, 3) else 1 for size in shape] for _ in x.shape]
    indices = [
        d.indices(size, *sizes) if there else None
        for size, sizes, there in zip(x.shape, own, places, strict=True)
    ]
    while indices[-1] is None:
        indices.pop()
    return x, indices


@sample(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(d, target):
    return list(several_indices(d)), {}


@sample(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(d, target):
    x, indices = several_indices(d)
    shape = aten.index(x, indices).shape
    values = d.of(d.signed(*shape), d.signed(*shape[1:]), d.signed(1))
    return [x, indices, values, True], {}
