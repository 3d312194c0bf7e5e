"""A model with graph breaks: blocks, each a region, some of which are left out by chance."""

import copy

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Broken(nn.Module):
    """Blocks, some of which are left out by chance, as LayerDrop does."""

    def __init__(self, blocks=6, width=32, left_out=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)
        self.left_out = left_out

    def forward(self, x):
        for block in self.blocks:
            if torch.rand([]) >= self.left_out:
                x = block(x)
        return self.head(x)


def assert_same(model, plain):
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (expected.grad is None)
        assert got.grad is None or torch.equal(got.grad, expected.grad)


def pair(**options):
    torch.manual_seed(0)
    plain = Broken(**options)
    return copy.deepcopy(plain), plain, torch.randn(256, 32), torch.randint(0, 5, (256,))
