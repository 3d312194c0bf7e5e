"""What torch takes apart while it traces is one operator at any size, and traced once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from integration_cases.sized import gradients, model_of
from torch import nn
from torch.nn import functional

import remat

Call = Callable[[torch.Tensor], torch.Tensor]


def resized(mode: str, dims: int, **options: object) -> tuple[Call, int]:
    options = options or {"scale_factor": 1.7}
    return lambda x: functional.interpolate(x, mode=mode, **options), dims


CALLS: dict[str, tuple[Call, int]] = {
    "linear": resized("linear", 1),
    "bilinear": resized("bilinear", 2),
    "bilinear, corners": resized("bilinear", 2, scale_factor=2, align_corners=True),
    "bilinear, to a size": resized("bilinear", 2, size=(9, 11)),
    "bicubic": resized("bicubic", 2),
    "trilinear": resized("trilinear", 3),
    "nearest": resized("nearest", 2),
    "nearest-exact": resized("nearest-exact", 2),
    "hardshrink": (functional.hardshrink, 1),
    "softshrink": (functional.softshrink, 1),
    "a margin loss of labels": (
        lambda x: functional.multilabel_margin_loss(x.mean(2), x.new_zeros(x.shape[0], 4).long()),
        1,
    ),
    "hardshrink of images": (functional.hardshrink, 2),
    "a margin loss": (
        lambda x: functional.multi_margin_loss(
            x.mean(2), x.new_zeros(x.shape[0], dtype=torch.long)
        ),
        1,
    ),
}


KEPT = {
    ("bilinear", False), ("hardshrink of images", True), ("a margin loss", False),
}  # fmt: skip


class Around(nn.Module):
    def __init__(self, call: Call, dims: int) -> None:
        super().__init__()
        self.layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](3, 4, 3)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer(x)).square().mean()


@pytest.mark.parametrize(
    ("name", "channels_last"),
    [
        pytest.param(name, last, marks=() if (name, last) in KEPT else pytest.mark.sweep)
        for name, last in itertools.product(CALLS, (False, True))
    ],
)
def test_one_trace_serves_all_sizes(name: str, channels_last: bool, traces: list[str]) -> None:
    call, dims = CALLS[name]
    if channels_last and dims == 1:
        pytest.skip("there is one layout")
    torch.manual_seed(0)
    plain = Around(call, dims)
    layout = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)[
        dims - 1 if channels_last else 0
    ]
    plain = plain.to(memory_format=layout)
    run = remat.rematerialize(copy.deepcopy(plain), budget=2**22, limit_seconds=0.1)
    for rows, length in ((2, 8), (3, 11), (4, 9), (2, 12), (5, 10)):
        inputs = (torch.randn(rows, 3, *[length] * dims).to(memory_format=layout),)
        expected = gradients(plain, model_of(plain), inputs)
        assert all(map(torch.equal, gradients(run, run, inputs), expected)), length
    assert traces == ["as it comes", "as it comes", "with symbols"]
