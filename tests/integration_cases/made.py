"""Modules of a given forward and parts, with small layers, losses and inputs for them."""

import torch
from torch import nn


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


class Doubled(torch.autograd.Function):
    """A function whose backward is not its derivative, so that it cannot be mistaken."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.clamp(min=0) * factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * (x > 0) * ctx.factor, None


def linear(enter=16, leave=16):
    return nn.Linear(enter, leave)


def squares(output):
    return output.float().square().mean()


def weighted(outputs):
    return sum((i + 1) * squares(output) for i, output in enumerate(outputs))


def rows(*shape):
    return torch.randn(*(shape or (8, 16)), generator=torch.Generator().manual_seed(7))


def tokens(*shape):
    return torch.randint(20, shape, generator=torch.Generator().manual_seed(7))


def with_a_frozen_layer(forward):
    return Made(forward, frozen=linear().requires_grad_(False), leave=linear())
