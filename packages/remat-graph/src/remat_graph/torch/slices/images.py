"""Rules of convolutions, poolings and what else works on images: batches are cut.

Poolings and what changes the size of images look at each channel for itself: so are channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from remat_graph.torch.slices.placement import SUMMED, Placement, Reading, Size

__all__ = ["RULES"]

aten = torch.ops.aten


def _convolution(c: Reading) -> Iterator[Placement]:
    if c.shape("input")[0] > 1:
        yield c.placement({"input": 0}, [0])


def _convolution_backward(c: Reading) -> Iterator[Placement]:
    if c.shape("input")[0] > 1:
        yield c.placement({"grad_output": 0, "input": 0}, [0, SUMMED, SUMMED])


def _each_plane(c: Reading) -> Iterator[Placement]:
    """Follow the axes in front of those of an image, in all tensors."""
    shapes = {name: facts.shape for name, facts in c.tensors}
    ranks = set(map(len, shapes.values()))
    dimensions = int(re.search(r"([123])d", c.call.name).group(1))  # type: ignore[union-attr]
    sized = "input_size" in c.call.argument_names
    for axis in range(ranks.pop() - dimensions if len(ranks) == 1 else 0):
        if all(shape[axis] > 1 for shape in shapes.values()):
            sizes = [Size("input_size", axis)] if sized else []
            yield c.placement(
                dict.fromkeys(shapes, axis), [axis] * len(c.call.results), sizes=sizes
            )


def _shuffled(c: Reading) -> Iterator[Placement]:
    for axis, size in enumerate(c.shape("self")[:-3]):
        if size > 1:
            yield c.placement({"self": axis}, [axis])


_PLANES = (
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d",
    "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward",
    "avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices",
    "max_pool3d_with_indices_backward", "reflection_pad1d", "reflection_pad1d_backward",
    "reflection_pad2d", "reflection_pad2d_backward", "replication_pad2d",
    "replication_pad2d_backward", "upsample_bicubic2d", "upsample_bicubic2d_backward",
    "upsample_bilinear2d", "upsample_bilinear2d_backward", "upsample_linear1d",
    "upsample_linear1d_backward", "upsample_nearest1d", "upsample_nearest1d_backward",
    "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_nearest3d",
    "upsample_nearest3d_backward", "upsample_trilinear3d", "upsample_trilinear3d_backward",
)  # fmt: skip

RULES = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    **{getattr(aten, name).default: _each_plane for name in _PLANES},
    **dict.fromkeys((aten.pixel_shuffle.default, aten.pixel_unshuffle.default), _shuffled),
}
