"""Small modules, and what is captured of them."""

import torch
from torch import nn

from remat_graph.torch import capture


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.layer(self.norm(x)))


class Made(nn.Module):
    """A module with the given forward and parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.made = forward

    def forward(self, *args, **kwargs):
        return self.made(self, *args, **kwargs)


def captured(forward, *args, costs="estimate", kwargs=None, **parts):
    parts.setdefault("layer", nn.Linear(4, 4))
    return capture(Made(forward, **parts), args, kwargs, costs=costs)


def batch():
    return torch.rand(3, 4)


def targets(captured):
    return [str(call.target) for call in captured.program.calls.values()]
