"""UNO (Rahman et al., 2022): operator blocks on coarser and then finer grids, joined across."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.example import Example, distance_to
from zoo.fno import SpectralConvolution, pointwise

__all__ = ["UNO", "make"]


class OperatorBlock(nn.Module):
    """A spectral convolution and a resampled pointwise map, normed; from one grid to another."""

    def __init__(self, entry: int, leave: int, modes: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.spectral = SpectralConvolution(entry, leave, modes, side=side)
        self.pointwise = pointwise(entry, leave, 2)
        self.norm = nn.InstanceNorm2d(leave, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map a field to one with other channels and sides."""
        beside = nn.functional.interpolate(
            self.pointwise(x), size=(self.side, self.side), mode="bilinear", align_corners=True
        )
        return nn.functional.gelu(self.norm(self.spectral(x) + beside))


class UNO(nn.Module):
    """Lift, blocks down to a quarter of the side, a few there, blocks up, project."""

    def __init__(self, middle: int, width: int, modes: int, side: int) -> None:
        super().__init__()
        half, quarter = side // 2, side // 4
        self.lift = pointwise(1, width, 2, hidden=width // 2)
        self.down = nn.ModuleList(
            [
                OperatorBlock(width, width, modes, side),
                OperatorBlock(width, 2 * width, modes, half),
                OperatorBlock(2 * width, 4 * width, modes, quarter),
            ]
        )
        self.middle = nn.Sequential(
            *(OperatorBlock(4 * width, 4 * width, modes, quarter) for _ in range(middle))
        )
        self.up = nn.ModuleList(
            [
                OperatorBlock(4 * width, 2 * width, modes, half),
                OperatorBlock(4 * width, width, modes, side),
                OperatorBlock(2 * width, width, modes, side),
            ]
        )
        self.project = pointwise(2 * width, 1, 2, hidden=2 * width)

    def forward(self, field: Tensor) -> Tensor:
        """Map a field to a field."""
        lifted = self.lift(field)
        full = self.down[0](lifted)
        half = self.down[1](full)
        x = self.middle(self.down[2](half))
        x = torch.cat([self.up[0](x), half], dim=1)
        x = torch.cat([self.up[1](x), full], dim=1)
        result: Tensor = self.project(torch.cat([self.up[2](x), lifted], dim=1))
        return result


def make(name: str, setting: tuple[int, int, int, int, int]) -> Example:
    """Build of these blocks in the middle, width, modes, batch and side, a multiple of 4."""
    middle, width, modes, batch, side = setting
    field, goal = (torch.randn(batch, 1, side, side) for _ in range(2))
    return Example(name, UNO(middle, width, modes, side), (field,), {}, distance_to(goal))
