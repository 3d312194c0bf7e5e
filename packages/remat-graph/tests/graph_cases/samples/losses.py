"""Losses."""

import torch

from graph_cases.samples.drawing import sample
from remat_graph.torch.kernels.cross_entropy import cross_entropy, cross_entropy_backward

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


@sample(aten.nll_loss_forward.default, aten.nll_loss_backward.default)
def _nll(d, target):
    return nll(d, target, aten.nll_loss_forward, [])


@sample(aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default)
def _nll2d(d, target):
    return nll(d, target, aten.nll_loss2d_forward, [d.int(1, 4), d.int(1, 4)])


@sample(cross_entropy, cross_entropy_backward)
def _cross_entropy(d, target):
    rows, classes = d.int(1, 7), d.int(2, 5)
    scores, wanted = d.signed(rows, classes), d.indices(classes, rows)
    weight, reduction = d.of(None, d.tensor(classes)), d.of(_NONE, _MEAN, _SUM)
    given = [wanted, weight, reduction, d.of(-100, 1)]
    how = scores.dtype, d.int(1, 4)
    if target is cross_entropy:
        return [scores, *given, *how], {}
    made, total = cross_entropy(scores, *given, *how)
    return [scores, d.signed(*made.shape), *given, total, *how], {}


def nll(d, target, forward, space):
    rows, classes = d.int(1, 7), d.int(2, 5)
    scores = d.signed(rows, classes, *space).log_softmax(1)
    wanted = d.indices(classes, rows, *space)
    ignored = d.of(-100, 1)
    if ignored == -100 and rows > 1:
        wanted[0] = -100
    weight = d.of(None, d.tensor(classes))
    reduction = d.of(_NONE, _MEAN, _SUM)
    given = [scores, wanted, weight, reduction, ignored]
    if target is forward.default:
        return given, {}
    made, total = forward(*given)
    return [d.signed(*made.shape), *given, total], {}


@sample(
    aten.mse_loss.default, aten.huber_loss.default, aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default, aten.binary_cross_entropy.default,
)  # fmt: skip
def _loss(d, target):
    shape = d.sizes(1, 3)
    entropy = target is aten.binary_cross_entropy.default
    weight = [d.of(None, d.tensor(*shape))] if entropy else []
    given = [d.tensor(*shape), d.tensor(*shape), *weight, d.of(_NONE, _MEAN, _SUM)]
    return given + ([0.3] if has_limit(target) else []), {}


@sample(aten.binary_cross_entropy_with_logits.default)
def _with_logits(d, target):
    shape = d.sizes(1, 3)

    def weight():
        first = d.int(0, len(shape))  # the dimensions in front are left out
        return d.of(None, d.tensor(*(d.of(1, size) for size in shape[first:])))

    return [d.signed(*shape), d.tensor(*shape), weight(), weight(), d.of(_NONE, _MEAN, _SUM)], {}


@sample(
    aten.mse_loss_backward.default, aten.huber_loss_backward.default,
    aten.smooth_l1_loss_backward.default, aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)  # fmt: skip
def _loss_backward(d, target):
    shape, reduction = d.sizes(1, 3), d.of(_NONE, _MEAN, _SUM)
    grad = d.signed(*(shape if reduction == _NONE else ()))
    entropy = target is aten.binary_cross_entropy_backward.default
    weight = [d.of(None, d.tensor(*shape))] if entropy else []
    given = [grad, d.tensor(*shape), d.tensor(*shape), *weight, reduction]
    return given + ([0.3] if has_limit(target) else []), {}


def has_limit(target):
    return target._schema.arguments[-1].name in ("delta", "beta")
