"""Views, what joins tensors, and what puts a part into one."""

import torch

from graph_cases.samples.drawing import sample

aten = torch.ops.aten


@sample(aten.alias.default, aten.detach.default)
def _same(d, target):
    return [d.tensor(*d.sizes())], {}


@sample(aten.view.default, aten._unsafe_view.default)
def _view(d, target):
    """Join axes, part them, and put in axes of length one."""
    shape = d.sizes(2, 5)
    x = d.tensor(*shape)
    new = list(shape)
    for _ in range(d.int(0, 2)):
        at = d.int(0, len(new) - 2)
        new[at : at + 2] = [new[at] * new[at + 1]]
        if len(new) < 2:
            break
    at = d.int(0, len(new) - 1)
    factor = d.of(*(f for f in range(1, new[at] + 1) if new[at] % f == 0))
    new[at : at + 1] = [factor, new[at] // factor]
    if d.int(0, 1):
        x, new = x.reshape(new), shape
    return [x, list(new)], {}


@sample(aten.permute.default)
def _permute(d, target):
    x = d.tensor(*d.sizes())
    dims = sorted(range(x.dim()), key=lambda _: d.int(0, 99))
    return [x, [dim - d.of(0, x.dim()) for dim in dims]], {}


@sample(aten.t.default)
def _t(d, target):
    return [d.tensor(*d.sizes(1, 2))], {}


@sample(aten.transpose.int)
def _transpose(d, target):
    x = d.tensor(*d.sizes())
    return [x, d.axis(x.dim()), d.axis(x.dim())], {}


@sample(aten.unsqueeze.default)
def _unsqueeze(d, target):
    x = d.tensor(*d.sizes())
    return [x, d.axis(x.dim() + 1)], {}


@sample(aten.squeeze.dim)
def _squeeze(d, target):
    x = d.tensor(*d.sizes(longest=2))
    return [x, d.axis(x.dim())], {}


@sample(aten.squeeze.dims)
def _squeeze_several(d, target):
    x = d.tensor(*d.sizes(2, 4, longest=2))
    return [x, [d.int(0, x.dim() - 2), -1]], {}


@sample(aten.expand.default)
def _expand(d, target):
    shape = d.sizes(longest=3)
    size = [d.int(2, 5) if length == 1 else d.of(length, -1) for length in shape]
    return [d.tensor(*shape), [*d.sizes(0, 2), *size]], {}


@sample(aten.repeat.default)
def _repeat(d, target):
    shape = d.sizes(longest=4)
    return [d.tensor(*shape), [*d.sizes(0, 1), *(d.of(1, 1, 2, 6) for _ in shape)]], {}


@sample(aten.select.int, aten.unbind.int)
def _select(d, target):
    x = d.tensor(*d.sizes(2, 4))
    dim = d.axis(x.dim())
    return [x, dim, *([d.int(0, x.shape[dim] - 1)] if target is aten.select.int else [])], {}


@sample(aten.slice.Tensor)
def _slice(d, target):
    x = d.tensor(*d.sizes())
    return [x, d.axis(x.dim()), d.int(0, 1), d.int(2, 9), d.int(1, 2)], {}


@sample(aten.split.Tensor)
def _split(d, target):
    x = d.tensor(*d.sizes())
    return [x, d.int(1, 3), d.axis(x.dim())], {}


@sample(aten.split_with_sizes.default)
def _split_sizes(d, target):
    x = d.tensor(*d.sizes())
    dim = d.axis(x.dim())
    first = d.int(0, x.shape[dim])
    return [x, [first, x.shape[dim] - first], dim], {}


@sample(aten.unfold.default)
def _unfold(d, target):
    x = d.tensor(*d.sizes(1, 3))
    dim = d.axis(x.dim())
    return [x, dim, d.int(1, x.shape[dim]), d.int(1, 2)], {}


@sample(aten.cat.default)
def _cat(d, target):
    shape = d.sizes()
    dim = d.axis(len(shape))
    parts = []
    for _ in range(d.int(1, 3)):
        own = list(shape)
        own[dim] = d.int(1, 3)
        parts.append(d.tensor(*own))
    return [parts, dim], {}


@sample(aten.stack.default)
def _stack(d, target):
    shape = d.sizes(0, 3)
    return [[d.tensor(*shape) for _ in range(d.int(1, 3))], d.axis(len(shape) + 1)], {}


@sample(aten.constant_pad_nd.default)
def _pad(d, target):
    x = d.tensor(*d.sizes(2, 4))
    return [x, [d.int(0, 1) for _ in range(2 * d.int(1, x.dim()))], d.of(0, 0, 0.5)], {}


@sample(aten.select_backward.default)
def _select_backward(d, target):
    shape = d.sizes(2, 4)
    dim = d.int(0, len(shape) - 1)
    grad = d.tensor(*(size for axis, size in enumerate(shape) if axis != dim))
    return [grad, shape, dim - d.of(0, len(shape)), d.int(0, shape[dim] - 1)], {}


@sample(aten.slice_backward.default)
def _slice_backward(d, target):
    x = d.tensor(*d.sizes())
    where = (d.axis(x.dim()), d.int(0, 1), d.int(2, 9), d.int(1, 2))
    return [aten.slice.Tensor(x, *where).clone(), list(x.shape), *where], {}


@sample(aten.slice_scatter.default)
def _slice_scatter(d, target):
    x = d.tensor(*d.sizes())
    where = (d.axis(x.dim()), d.int(0, 1), d.int(2, 9), d.int(1, 2))
    return [x, d.tensor(*aten.slice.Tensor(x, *where).shape), *where], {}


@sample(aten.select_scatter.default)
def _select_scatter(d, target):
    x = d.tensor(*d.sizes(2, 4))
    dim = d.axis(x.dim())
    where = (dim, d.int(0, x.shape[dim] - 1))
    return [x, d.tensor(*x.select(*where).shape), *where], {}
