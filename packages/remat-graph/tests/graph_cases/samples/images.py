"""Convolutions, pools, borders and other sizes of images."""

import torch

from graph_cases.samples.drawing import sample

aten = torch.ops.aten


@sample(aten.convolution.default, aten.convolution_backward.default)
def _convolution(d, target):
    axes, groups, transposed = d.int(1, 2), d.int(1, 2), bool(d.int(0, 1))
    ins, outs = 2 * groups, groups
    x = d.signed(d.int(1, 5), ins, *([6] * axes))
    weight = d.signed(
        *((ins, outs // groups) if transposed else (outs, ins // groups)), *([3] * axes)
    )
    bias = d.of(None, d.signed(outs))
    rest = [[d.int(1, 2)] * axes, [1] * axes, [1] * axes, transposed, [0] * axes, groups]
    if target is aten.convolution.default:
        return [x, weight, bias, *rest], {}
    grad = d.signed(*aten.convolution(x, weight, None, *rest).shape)
    return [grad, x, weight, [outs], *rest, [True, True, True]], {}


def image(d, axes=2):
    return d.signed(
        *([d.int(1, 4)] if d.int(0, 3) or axes == 1 else []), d.int(1, 4), *([6] * axes)
    )


@sample(
    aten.avg_pool2d.default, aten.avg_pool3d.default, aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default, aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default, aten.adaptive_max_pool2d.default,
)  # fmt: skip
def _pool(d, target):
    axes = 3 if "3d" in str(target) else 2
    return [image(d, axes), [d.int(2, 3)] * axes], {}


@sample(
    aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default,
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default,
    aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool2d_backward.default,
)  # fmt: skip
def _pool_backward(d, target):
    axes = 3 if "3d" in str(target) else 2
    forward = getattr(aten, str(target).split(".")[1].removesuffix("_backward"))
    x, size = image(d, axes), [2] * axes
    made = forward(x, size)
    if "adaptive" in str(target):
        pooled, *indices = made if isinstance(made, tuple) else (made,)
        return [d.signed(*pooled.shape), x, *indices], {}
    window = [size, size, [0] * axes]
    if "max" in str(target):
        grad = d.signed(*made[0].shape)
        return [grad, x, *window, [1] * axes, False, made[1]], {}
    return [d.signed(*made.shape), x, *window, False, True, None], {}


PADS = ("reflection_pad1d", "reflection_pad2d", "replication_pad2d")


@sample(*(getattr(aten, name).default for name in PADS))
def _border(d, target):
    axes = 1 if "1d" in str(target) else 2
    return [image(d, axes), [1, 2] * axes], {}


@sample(*(getattr(aten, f"{name}_backward").default for name in PADS))
def _border_backward(d, target):
    forward = getattr(aten, str(target).split(".")[1].removesuffix("_backward"))
    (x, pad), _ = _border(d, target)
    return [d.signed(*forward(x, pad).shape), x, pad], {}


UPSAMPLES = {
    "upsample_nearest1d": [], "upsample_nearest2d": [], "upsample_nearest3d": [],
    "upsample_linear1d": [False], "upsample_bilinear2d": [True], "upsample_bicubic2d": [False],
    "upsample_trilinear3d": [False],
}  # fmt: skip


@sample(*(getattr(aten, name).default for name in UPSAMPLES))
def _upsample(d, target):
    axes = int(str(target).split("d.")[0][-1])
    x = d.signed(d.int(1, 4), d.int(1, 4), *([4] * axes))
    return [x, [d.int(3, 8)] * axes, *UPSAMPLES[str(target).split(".")[1]]], {}


@sample(*(getattr(aten, f"{name}_backward").default for name in UPSAMPLES))
def _upsample_backward(d, target):
    name = str(target).split(".")[1].removesuffix("_backward")
    (x, size, *rest), _ = _upsample(d, getattr(aten, name).default)
    return [d.signed(*x.shape[:2], *size), size, list(x.shape), *rest], {}


@sample(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def _shuffle(d, target):
    return [d.signed(*d.sizes(0, 2), 4, 4, 4), 2], {}
