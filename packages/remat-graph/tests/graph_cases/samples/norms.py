"""Norms and attention."""

import math

import torch

from graph_cases.samples.drawing import sample

aten = torch.ops.aten


@sample(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _layer_norm(d, target):
    shape, own = d.sizes(1, 3), d.sizes(1, 2)
    weights = [d.of(d.tensor(*own), None) for _ in range(1 + ("layer" in str(target)))]
    return [d.signed(*shape, *own), own, *weights, 1e-5], {}


@sample(aten.native_layer_norm_backward.default)
def _layer_norm_backward(d, target):
    x, own, weight, bias, eps = _layer_norm(d, aten.native_layer_norm.default)[0]
    _, mean, rstd = aten.native_layer_norm(x, own, weight, bias, eps)
    mask = [True, weight is not None, bias is not None]
    return [d.signed(*x.shape), x, own, mean, rstd, weight, bias, mask], {}


@sample(aten.native_group_norm.default, aten.native_group_norm_backward.default)
def _group_norm(d, target):
    batch, group, per, space = d.int(1, 6), d.int(1, 3), d.int(1, 3), d.sizes(1, 2)
    channels, area = group * per, math.prod(space)
    x, weight = d.signed(batch, channels, *space), d.of(d.tensor(channels), None)
    sizes = [batch, channels, area, group]
    forward = [x, weight, None if weight is None else d.tensor(channels), *sizes, 1e-5]
    if target is aten.native_group_norm.default:
        return forward, {}
    _, mean, rstd = aten.native_group_norm(*forward)
    mask = [True, weight is not None, weight is not None]
    return [d.signed(*x.shape), x, mean, rstd, weight, *sizes, mask], {}


@sample(
    aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm_backward.default,
)  # fmt: skip
def _batch_norm(d, target):
    channels = d.int(1, 4)
    x = d.signed(d.int(1, 6), channels, *d.sizes(0, 2))
    statistics = [d.tensor(channels), d.tensor(channels)]
    weights = [d.tensor(channels), d.tensor(channels)]
    if target is aten.native_batch_norm.default:
        return [x, *weights, *statistics, False, 0.1, 1e-5], {}
    if target is aten._native_batch_norm_legit_no_training.default:
        return [x, *weights, *statistics, 0.1, 1e-5], {}
    saved = [x.new_empty(0), x.new_empty(0)]
    grad = d.signed(*x.shape)
    return [grad, x, weights[0], *statistics, *saved, False, 1e-5, [True, True, True]], {}


@sample(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
def _attention(d, target):
    batch, heads, rows, columns, width = d.int(1, 5), d.int(1, 5), d.int(1, 5), d.int(1, 5), 8
    q = d.signed(batch, heads, rows, width)
    k, v = (d.signed(batch, heads, columns, width) for _ in range(2))
    masks = [None, d.signed(batch, heads, rows, columns), d.signed(1, heads, rows, columns),
             d.signed(batch, 1, rows, columns), d.signed(rows, columns)]  # fmt: skip
    causal = bool(d.int(0, 1)) and rows == columns
    more = {} if causal else {"attn_mask": d.of(*masks)}
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    if target is forward.default:
        return [q, k, v, 0.0, causal], more
    made, sums = forward(q, k, v, 0.0, causal, **more)
    return [d.signed(*q.shape), q, k, v, made, sums, 0.0, causal], more
