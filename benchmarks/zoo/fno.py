"""A Fourier neural operator: complex parameters, FFTs, and slices assigned in a spectrum."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from zoo.example import Example, Size, distance_to

__all__ = ["FNO", "SpectralConvolution", "build", "make", "pointwise"]

# layers, width, modes, batch, side of the grid
_SIZES = {"tiny": (4, 6, 3, 2, 16), "medium": (4, 32, 12, 16, 64)}


class SpectralConvolution(nn.Module):
    """Multiply the lowest modes of a field by complex weights, and drop the others.

    `dimensions` are those of the grid. The field that comes out may have another `side`.
    """

    def __init__(
        self, entry: int, leave: int, modes: int, dimensions: int = 2, side: int | None = None
    ) -> None:
        super().__init__()
        self.modes = modes
        self.leave = leave
        self.side = side
        self.axes = tuple(range(2, 2 + dimensions))
        grid = "xyz"[:dimensions]
        self.product = f"bi{grid},io{grid}->bo{grid}"
        corners = (2 ** (dimensions - 1), entry, leave, *(modes for _ in range(dimensions)))
        self.weight = nn.Parameter(torch.randn(corners, dtype=torch.cfloat) / entry)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve a real field of shape (batch, entry, side...)."""
        m = self.modes
        sides = [self.side or x.shape[axis] for axis in self.axes]
        spectrum = torch.fft.rfftn(x, dim=self.axes, norm="ortho")
        out = spectrum.new_zeros(x.shape[0], self.leave, *sides[:-1], sides[-1] // 2 + 1)
        ends = [(slice(m), slice(-m, None))] * (len(sides) - 1)
        for weight, rows in zip(self.weight, product(*ends), strict=True):
            corner = (slice(None), slice(None), *rows, slice(m))
            out[corner] = torch.einsum(self.product, spectrum[corner], weight)
        field: Tensor = torch.fft.irfftn(out, s=sides, dim=self.axes, norm="ortho")
        return field


def pointwise(entry: int, leave: int, dimensions: int, hidden: int | None = None) -> nn.Module:
    """Make a map of each point's channels: linear, or with one hidden layer."""
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    if hidden is None:
        return convolution(entry, leave, 1)
    return nn.Sequential(convolution(entry, hidden, 1), nn.GELU(), convolution(hidden, leave, 1))


class FNO(nn.Module):
    """Lift, several spectral layers with a pointwise path beside each, project."""

    def __init__(
        self, layers: int, width: int, modes: int, dimensions: int = 2, hidden: int | None = None
    ) -> None:
        super().__init__()
        self.lift = pointwise(1, width, dimensions, hidden)
        self.spectral = nn.ModuleList(
            SpectralConvolution(width, width, modes, dimensions) for _ in range(layers)
        )
        self.pointwise = nn.ModuleList(pointwise(width, width, dimensions) for _ in range(layers))
        self.project = pointwise(width, 1, dimensions, hidden)

    def forward(self, field: Tensor) -> Tensor:
        """Map a field to a field."""
        x = self.lift(field)
        for spectral, beside in zip(self.spectral, self.pointwise, strict=True):
            x = nn.functional.gelu(spectral(x) + beside(x))
        result: Tensor = self.project(x)
        return result


def build(size: Size) -> Example:
    """Build an operator on a square grid."""
    return make("fno", _SIZES[size])


def make(
    name: str,
    setting: tuple[int, int, int, int, int],
    dimensions: int = 2,
    hidden: int | None = None,
) -> Example:
    """Build of these layers, width, modes, batch and side; `hidden` is that of lift and project."""
    layers, width, modes, batch, side = setting
    grid = [side] * dimensions
    field, goal = (torch.randn(batch, 1, *grid) for _ in range(2))
    model = FNO(layers, width, modes, dimensions, hidden)
    return Example(name, model, (field,), {}, distance_to(goal))
