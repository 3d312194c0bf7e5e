"""A RegNet X, as torchvision writes `regnet_x_32gf`: grouped bottlenecks, ReLU in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.example import Example

__all__ = ["RegNet", "make"]

_CLASSES = 10


class RegNetBlock(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions, all of one width, around a shortcut."""

    def __init__(self, entry: int, width: int, group: int, stride: int) -> None:
        super().__init__()
        self.shortcut: nn.Module | None = None
        if stride != 1 or entry != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(entry, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        self.convolutions = nn.Sequential(
            nn.Conv2d(entry, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, groups=width // group, bias=False),
            nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolutions to the shortcut."""
        shortcut = x if self.shortcut is None else self.shortcut(x)
        result: Tensor = self.relu(shortcut + self.convolutions(x))
        return result


class RegNet(nn.Sequential):
    """Four stages of blocks; each halves the sides of the image."""

    def __init__(self, blocks: tuple[int, ...], widths: tuple[int, ...], group: int) -> None:
        entry = 32
        layers: list[nn.Module] = [
            nn.Conv2d(3, entry, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(entry),
            nn.ReLU(inplace=True),
        ]
        for count, width in zip(blocks, widths, strict=True):
            for block in range(count):
                layers.append(RegNetBlock(entry, width, group, stride=1 if block else 2))
                entry = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entry, _CLASSES))


def make(name: str, setting: tuple[tuple[int, ...], tuple[int, ...], int, int, int]) -> Example:
    """Build of these blocks and widths in each stage, width of a group, batch and side."""
    blocks, widths, group, batch, side = setting
    labels = torch.randint(_CLASSES, (batch,))
    return Example(
        name,
        RegNet(blocks, widths, group),
        (torch.randn(batch, 3, side, side),),
        {},
        lambda output: nn.functional.cross_entropy(output, labels.to(output.device)),
    )
