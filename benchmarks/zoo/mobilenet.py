"""MobileNet-v2 (Sandler et al., 2018): inverted residuals, depthwise convolutions, ReLU6."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.example import Example, distance_to

__all__ = ["make"]

_CLASSES = 10
_STAGES = (  # expansion, channels, blocks, stride
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _convolution(
    entry: int, leave: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    convolution = nn.Conv2d(entry, leave, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(leave), nn.ReLU6(inplace=True)]


class InvertedResidual(nn.Module):
    """Widen, convolve each channel by itself, narrow; add the input where the shapes agree."""

    def __init__(self, entry: int, leave: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = entry * expansion
        layers = _convolution(entry, hidden) if expansion > 1 else []
        layers += _convolution(hidden, hidden, 3, stride, groups=hidden)
        layers += [nn.Conv2d(hidden, leave, 1, bias=False), nn.BatchNorm2d(leave)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and entry == leave

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut if there is one."""
        made: Tensor = self.layers(x)
        return x + made if self.adds else made


def make(name: str, setting: tuple[int, int, int]) -> Example:
    """Build of this width (32 is MobileNet-v2's), batch and side of the image."""
    width, batch, side = setting
    layers = _convolution(3, width, 3, 2)
    entry = width
    for expansion, published, blocks, stride in _STAGES:
        leave = published * width // 32
        for block in range(blocks):
            layers.append(InvertedResidual(entry, leave, 1 if block else stride, expansion))
            entry = leave
    layers += _convolution(entry, 40 * width)
    head = [nn.Dropout(0.2), nn.Linear(40 * width, _CLASSES)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head]
    images, goal = torch.randn(batch, 3, side, side), torch.randn(batch, _CLASSES)
    return Example(name, nn.Sequential(*layers), (images,), {}, distance_to(goal))
