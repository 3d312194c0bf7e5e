"""A U-Net: batch norm, and long skips that are concatenated."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from zoo.example import Example, Size, distance_to

__all__ = ["Convolutions", "UNet", "build", "make"]

# depth, width, batch, side of the image
_SIZES = {"tiny": (2, 4, 2, 16), "peers": (3, 16, 4, 64), "medium": (4, 16, 6, 128)}


class Convolutions(nn.Sequential):
    """Two 3x3 convolutions, each with batch norm and a ReLU in place."""

    def __init__(self, entry: int, leave: int) -> None:
        layers: list[nn.Module] = []
        for channels in (entry, leave):
            layers += [
                nn.Conv2d(channels, leave, 3, padding=1, bias=False),
                nn.BatchNorm2d(leave),
                nn.ReLU(inplace=True),
            ]
        super().__init__(*layers)


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, each level joined across."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        pairs = list(pairwise(widths))
        self.entry = Convolutions(3, width)
        self.down = nn.ModuleList(Convolutions(a, b) for a, b in pairs)
        self.rise = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs[::-1])
        self.up = nn.ModuleList(Convolutions(2 * a, a) for a, _ in pairs[::-1])
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images of the same size."""
        x = self.entry(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(nn.functional.max_pool2d(x, 2))
        for rise, up in zip(self.rise, self.up, strict=True):
            x = up(torch.cat([skips.pop(), rise(x)], dim=1))
        result: Tensor = self.leave(x)
        return result


def build(size: Size) -> Example:
    """Build an image-to-image model."""
    return make("unet", _SIZES[size])


def make(name: str, setting: tuple[int, int, int, int | tuple[int, int]]) -> Example:
    """Build of this depth, width, batch and side, or sides, of the image."""
    depth, width, batch, side = setting
    sides = side if isinstance(side, tuple) else (side, side)
    image, goal = (torch.randn(batch, 3, *sides) for _ in range(2))
    return Example(name, UNet(depth, width), (image,), {}, distance_to(goal))
