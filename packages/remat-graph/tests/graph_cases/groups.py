"""Programs of which groups are found."""

import torch
from torch import nn

from remat_graph.torch import capture
from remat_graph.torch.fusing.groups import find_groups
from remat_graph.torch.fusing.program import fused


class Gelu(nn.Module):
    """Two layers of two products, with an activation that autograd differentiates step by step."""

    def __init__(self, width=16, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            hidden = first(self.norm(x))
            hidden = 0.5 * hidden * (1.0 + torch.tanh(0.8 * (hidden + 0.04 * hidden**3)))
            x = x + second(hidden)
        return x.square().sum()


def program_of(model, *args):
    return capture(model, args, costs="estimate").program


def in_groups(program, unfused=(), *, give_again=False):
    return fused(program, find_groups(program, unfused, give_again=give_again))


def groups_of(program):
    return [group for group in find_groups(program) if group.body.outputs]
