"""Models whose forward computes gradients by `torch.autograd.grad`, and is trained through them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss

Batch = tuple[Tensor, ...]


def layers(first: int, last: int, between: int = 3, width: int = 64) -> nn.Sequential:
    widths = [first, *[width] * between, last]
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.SiLU()) for a, b in pairs))


class Forces(nn.Module):
    """An energy, and how it changes with positions."""

    def __init__(self, between: int = 3) -> None:
        super().__init__()
        self.layers = layers(3, 1, between)

    def batch(self, draw: torch.Generator) -> Batch:
        return (torch.randn(400, 3, generator=draw),)

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        energy = self.layers(positions).sum()
        (slope,) = grad(energy, positions, create_graph=True)
        return energy + slope.square().sum()


class ForcesGiven(Forces):
    """Positions that the caller has the gradient of, and two results."""

    def batch(self, draw: torch.Generator) -> Batch:
        return (torch.randn(400, 3, generator=draw).requires_grad_(),)

    def forward(self, positions: Tensor) -> Tensor:
        energy = self.layers(positions).sum()
        (slope,) = grad([energy], [positions], [torch.ones_like(energy)], create_graph=True)
        return energy - 2 * slope.mean()


class Physics(nn.Module):
    """What is left of Burgers' equation: a second derivative, and a third for training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2, 1)

    def batch(self, draw: torch.Generator) -> Batch:
        return torch.randn(300, 1, generator=draw), torch.randn(300, 1, generator=draw)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
        u = self.layers(torch.cat([x, t], 1))
        u_x, u_t = grad(u, [x, t], torch.ones_like(u), create_graph=True)
        (u_xx,) = grad(u_x.sum(), x, create_graph=True)
        residual: Tensor = (u_t + u * u_x - 0.01 * u_xx).square().mean()
        return residual


class Penalty(nn.Module):
    """A critic whose slope between two batches is kept near one; draws, convolutions, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 16, 1),
        )  # fmt: skip

    def batch(self, draw: torch.Generator) -> Batch:
        return torch.randn(6, 3, 16, 16, generator=draw), torch.randn(6, 3, 16, 16, generator=draw)

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        share = torch.rand(real.shape[0], 1, 1, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        scores = self.critic(between)
        (slope,) = grad(scores, between, torch.ones_like(scores), create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        result: Tensor = self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty
        return result


class InnerSteps(nn.Module):
    """Two steps of training within the forward, through which the loss is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4, 1)

    def batch(self, draw: torch.Generator) -> Batch:
        return tuple(torch.randn(200, width, generator=draw) for width in (4, 1, 4, 1))

    def forward(self, x: Tensor, y: Tensor, later_x: Tensor, later_y: Tensor) -> Tensor:
        weights = dict(self.layers.named_parameters())
        for _ in range(2):
            loss = mse_loss(functional_call(self.layers, weights, (x,)), y)
            slopes = grad(loss, list(weights.values()), create_graph=True)
            pairs = zip(weights.items(), slopes, strict=True)
            weights = {name: weight - 0.05 * slope for (name, weight), slope in pairs}
        return mse_loss(functional_call(self.layers, weights, (later_x,)), later_y)


class Balanced(nn.Module):
    """Two losses, the second weighed by the gradients of the last layer, as of a VQGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last, self.judge = layers(16, 32), nn.Linear(32, 16), layers(16, 1)

    def batch(self, draw: torch.Generator) -> Batch:
        return (torch.randn(300, 16, generator=draw),)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.layers(x))
        likeness, judged = (y - x).abs().mean(), self.judge(y).mean()
        slopes = [grad(loss, self.last.weight, retain_graph=True)[0] for loss in (likeness, judged)]
        weight = (slopes[0].norm() / (slopes[1].norm() + 1e-4)).clamp(0, 10).detach()
        total: Tensor = likeness + weight * judged
        return total


class Equilibrium(nn.Module):
    """A layer at a fixed point, whose gradient a hook solves for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(16, 16)

    def batch(self, draw: torch.Generator) -> Batch:
        return (torch.randn(300, 16, generator=draw),)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                z = torch.tanh(self.layers(z)) * 0.5 + x
        z = torch.tanh(self.layers(z)) * 0.5 + x
        start = z.detach().requires_grad_()
        again = torch.tanh(self.layers(start)) * 0.5 + x

        def solve(slope: Tensor) -> Tensor:
            found = slope
            for _ in range(4):
                found = grad(again, start, found, retain_graph=True)[0] + slope
            return found

        z.register_hook(solve)
        return z.square().mean()


class Swish(torch.autograd.Function):
    """A function with a backward of its own, which can be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(x)
        return slope * (share + x * share * (1 - share))


class Switching(Swish):
    """A function whose backward keeps a part of itself out of autograd."""

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            share = torch.sigmoid(x)
        return slope * (share + x * share * (1 - share))


class Custom(nn.Module):
    """Forces of an energy with a custom function; `is_broken` has the gradient between graphs."""

    def __init__(self, is_broken: bool = False, function: type = Swish) -> None:
        super().__init__()
        self.enter, self.leave, self.is_broken = nn.Linear(3, 64), nn.Linear(64, 1), is_broken
        self.function = function

    def batch(self, draw: torch.Generator) -> Batch:
        return (torch.randn(400, 3, generator=draw),)

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        energy = self.leave(self.function.apply(self.enter(positions))).sum()
        if self.is_broken:
            torch._dynamo.graph_break()
        (slope,) = grad(energy, positions, create_graph=True)
        return energy + slope.square().sum()


class Backward(nn.Module):
    """A gradient that is found by `backward()`, and is an input like another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.inner = layers(8, 8), layers(8, 1)

    def batch(self, draw: torch.Generator) -> Batch:
        return (torch.randn(400, 8, generator=draw),)

    def forward(self, x: Tensor) -> Tensor:
        point = x.detach().requires_grad_()
        self.inner(point).sum().backward()
        return self.inner(self.layers(x) + point.grad).square().mean()


class Saliency(nn.Module):
    """A classifier whose loss is to change little with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.GELU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
        )  # fmt: skip

    def batch(self, draw: torch.Generator) -> Batch:
        return torch.randn(6, 3, 16, 16, generator=draw), torch.randint(5, (6,), generator=draw)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        loss = cross_entropy(self.layers(x), kinds)
        (slope,) = grad(loss, x, create_graph=True)
        return loss + slope.square().sum()
