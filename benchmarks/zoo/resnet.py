"""A bottleneck ResNet, as torchvision writes it: batch norm, and ReLU in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.example import Example, Size

__all__ = ["Bottleneck", "build", "make"]

# blocks per stage, width, batch, side of the image; (3, 4, 6, 3) is ResNet-50
_SIZES = {"tiny": ((1, 2), 8, 2, 32), "medium": ((3, 4, 6, 3), 24, 12, 128)}
_CLASSES = 10


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, entry: int, width: int, stride: int) -> None:
        super().__init__()
        leave = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(entry, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, leave, 1, bias=False), nn.BatchNorm2d(leave)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or entry != leave:
            self.shortcut = nn.Sequential(
                nn.Conv2d(entry, leave, 1, stride, bias=False), nn.BatchNorm2d(leave)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolutions to the shortcut, in place."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.shortcut is None else self.shortcut(x)
        result: Tensor = self.relu(out)
        return result


def build(size: Size) -> Example:
    """Build a classifier of small images."""
    return make("resnet", _SIZES[size])


def make(name: str, setting: tuple[tuple[int, ...], int, int, int]) -> Example:
    """Build of these blocks in each stage, width, batch and side of the image."""
    stages, width, batch, side = setting
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    entry = width
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(entry, width << stage, stride))
            entry = 4 * (width << stage)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entry, _CLASSES)]
    labels = torch.randint(_CLASSES, (batch,))
    return Example(
        name,
        nn.Sequential(*layers),
        (torch.randn(batch, 3, side, side),),
        {},
        lambda output: nn.functional.cross_entropy(output, labels.to(output.device)),
    )
