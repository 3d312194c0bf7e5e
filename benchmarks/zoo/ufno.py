"""U-FNO (Wen et al., 2022): Fourier layers in 3D, the last of them with a small U-Net beside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.example import Example, distance_to
from zoo.fno import SpectralConvolution, pointwise

__all__ = ["UFNO", "make"]

_PADDING = 2


class SmallUNet(nn.Module):
    """Three steps down and three up, joined across."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(_down(width, stride=2) for _ in range(3))
        self.stay = nn.ModuleList(_down(width, stride=1) for _ in range(2))
        self.up = nn.ModuleList(_up(entry, width) for entry in (width, 2 * width, 2 * width))
        self.leave = nn.Conv3d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map a field to one of the same shape."""
        first = self.down[0](x)
        second = self.stay[0](self.down[1](first))
        third = self.stay[1](self.down[2](second))
        y = torch.cat([second, self.up[0](third)], dim=1)
        y = torch.cat([first, self.up[1](y)], dim=1)
        y = torch.cat([x, self.up[2](y)], dim=1)
        result: Tensor = self.leave(y)
        return result


def _down(width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(width, width, 3, stride, padding=1, bias=False),
        nn.BatchNorm3d(width),
        nn.LeakyReLU(0.1, inplace=True),
    )


def _up(entry: int, leave: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose3d(entry, leave, 4, stride=2, padding=1), nn.LeakyReLU(0.1, inplace=True)
    )


class UFNO(nn.Module):
    """Lift, Fourier layers, as many with a U-Net, project."""

    def __init__(self, layers: int, width: int, modes: int) -> None:
        super().__init__()
        self.lift = pointwise(1, width, 3)
        self.spectral = nn.ModuleList(
            SpectralConvolution(width, width, modes, 3) for _ in range(2 * layers)
        )
        self.pointwise = nn.ModuleList(pointwise(width, width, 3) for _ in range(2 * layers))
        self.unets = nn.ModuleList(SmallUNet(width) for _ in range(layers))
        self.project = pointwise(width, 1, 3, hidden=4 * width)

    def forward(self, field: Tensor) -> Tensor:
        """Map a field to a field; the last axis, which is time, is padded."""
        x = nn.functional.pad(self.lift(field), (0, _PADDING))
        plain = len(self.spectral) - len(self.unets)
        for i, (spectral, beside) in enumerate(zip(self.spectral, self.pointwise, strict=True)):
            y = spectral(x) + beside(x)
            if i >= plain:
                y = y + self.unets[i - plain](x)
            x = torch.relu(y)
        result: Tensor = self.project(x[..., :-_PADDING])
        return result


def make(name: str, setting: tuple[int, int, int, int, int]) -> Example:
    """Build of these layers of each kind, width, modes, batch and side, a multiple of 8."""
    layers, width, modes, batch, side = setting
    field, goal = (torch.randn(batch, 1, side, side, side - _PADDING) for _ in range(2))
    return Example(name, UFNO(layers, width, modes), (field,), {}, distance_to(goal))
