"""A Fourier neural operator: complex parameters, FFTs, and slices assigned in a spectrum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.example import Example, Size, distance_to

__all__ = ["FNO", "SpectralConvolution", "build"]

# layers, width, modes, batch, side of the grid
_SIZES = {"tiny": (4, 6, 3, 2, 16), "medium": (4, 32, 12, 16, 64)}


class SpectralConvolution(nn.Module):
    """Multiply the lowest modes of a field by complex weights, and drop the others."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = (2, width, width, modes, modes)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / width)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve a real field of shape (batch, width, side, side)."""
        m = self.modes
        spectrum = torch.fft.rfft2(x, norm="ortho")
        out = torch.zeros_like(spectrum)
        for weight, rows in zip(self.weight, (slice(m), slice(-m, None)), strict=True):
            out[:, :, rows, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, rows, :m], weight)
        field: Tensor = torch.fft.irfft2(out, s=x.shape[-2:], norm="ortho")
        return field


class FNO(nn.Module):
    """Lift, several spectral layers with a pointwise path beside each, project."""

    def __init__(self, layers: int, width: int, modes: int) -> None:
        super().__init__()
        self.lift = nn.Conv2d(1, width, 1)
        self.spectral = nn.ModuleList(SpectralConvolution(width, modes) for _ in range(layers))
        self.pointwise = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.project = nn.Conv2d(width, 1, 1)

    def forward(self, field: Tensor) -> Tensor:
        """Map a field to a field."""
        x = self.lift(field)
        for spectral, pointwise in zip(self.spectral, self.pointwise, strict=True):
            x = nn.functional.gelu(spectral(x) + pointwise(x))
        result: Tensor = self.project(x)
        return result


def build(size: Size) -> Example:
    """Build an operator on a square grid."""
    layers, width, modes, batch, side = _SIZES[size]
    field, goal = (torch.randn(batch, 1, side, side) for _ in range(2))
    return Example("fno", FNO(layers, width, modes), (field,), {}, distance_to(goal))
