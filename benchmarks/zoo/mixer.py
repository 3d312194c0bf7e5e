"""MLP-Mixer: layers over the patches of an image, then over the channels of each patch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.example import Example

__all__ = ["MLPMixer", "make"]

_CLASSES = 10


class MixerBlock(nn.Module):
    """Two MLPs with a residual each, the first over the patches."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches, self.over_channels = _mlp(patches, width // 2), _mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, patches, width) to the same shape."""
        x = x + self.over_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.over_channels(self.norm2(x))
        return result


class MLPMixer(nn.Module):
    """Cut images into patches, mix, average, classify."""

    def __init__(self, layers: int, width: int, side: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(
            *(MixerBlock((side // patch) ** 2, width) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Give the logits of each image."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        result: Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return result


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def make(name: str, setting: tuple[int, int, int, int, int]) -> Example:
    """Build of these layers, width, batch, side of the image and side of a patch."""
    layers, width, batch, side, patch = setting
    labels = torch.randint(_CLASSES, (batch,))
    return Example(
        name,
        MLPMixer(layers, width, side, patch),
        (torch.randn(batch, 3, side, side),),
        {},
        lambda output: nn.functional.cross_entropy(output, labels.to(output.device)),
    )
