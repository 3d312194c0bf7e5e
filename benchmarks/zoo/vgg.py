"""VGG-16 (Simonyan and Zisserman, 2015): convolutions in a row, and dropout in its head."""

from __future__ import annotations

import torch
from torch import nn

from zoo.example import Example, distance_to

__all__ = ["make"]

_STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))  # convolutions, times the width
_CLASSES = 10


def make(name: str, setting: tuple[int, tuple[int, ...], int, int]) -> Example:
    """Build of this width, widths of the head, batch and side of the image (64 is the width)."""
    width, head, batch, side = setting
    layers: list[nn.Module] = []
    before = 3
    for count, factor in _STAGES:
        for _ in range(count):
            layers += [nn.Conv2d(before, factor * width, 3, padding=1), nn.ReLU()]
            before = factor * width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    before *= (side // 32) ** 2
    for features in head:
        layers += [nn.Linear(before, features), nn.ReLU(), nn.Dropout(0.5)]
        before = features
    layers.append(nn.Linear(before, _CLASSES))
    images, goal = torch.randn(batch, 3, side, side), torch.randn(batch, _CLASSES)
    return Example(name, nn.Sequential(*layers), (images,), {}, distance_to(goal))
