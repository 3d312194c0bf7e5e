"""GoogLeNet (Szegedy et al., 2015) with batch norm and without side heads, as in torchvision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.example import Example, distance_to

__all__ = ["make"]

_CLASSES = 10
_POOL = (0, 0, 0, 0, 0, 0)  # between inceptions
_INCEPTIONS = (  # channels of 1x1; of 3x3 before and after; of 5x5 before and after; of the pooling
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    _POOL,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    _POOL,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def _convolution(entry: int, leave: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(entry, leave, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(leave, eps=0.001),
        nn.ReLU(inplace=True),
    )


class Inception(nn.Module):
    """Four branches, concatenated."""

    def __init__(self, entry: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        one, three_in, three, five_in, five, pooled = channels
        self.branches = nn.ModuleList(
            [
                _convolution(entry, one, 1),
                nn.Sequential(_convolution(entry, three_in, 1), _convolution(three_in, three, 3)),
                nn.Sequential(_convolution(entry, five_in, 1), _convolution(five_in, five, 3)),
                nn.Sequential(
                    nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True),
                    _convolution(entry, pooled, 1),
                ),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Join the branches along the channels."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def make(name: str, setting: tuple[int, int, int]) -> Example:
    """Build of this width (64 is GoogLeNet's), batch and side of the image."""
    width, batch, side = setting
    layers: list[nn.Module] = [
        _convolution(3, width, 7, 2),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        _convolution(width, width, 1),
        _convolution(width, 3 * width, 3),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
    ]
    entry = 3 * width
    for published in _INCEPTIONS:
        if published == _POOL:
            layers.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
            continue
        channels = tuple(max(1, count * width // 64) for count in published)
        layers.append(Inception(entry, channels))
        entry = channels[0] + channels[2] + channels[4] + channels[5]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(entry, _CLASSES)]
    images, goal = torch.randn(batch, 3, side, side), torch.randn(batch, _CLASSES)
    return Example(name, nn.Sequential(*layers), (images,), {}, distance_to(goal))
