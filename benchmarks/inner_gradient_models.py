"""Models whose forward computes gradients by `torch.autograd.grad`, made of equal blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call
from torch.nn.functional import mse_loss, silu

from zoo import Example

__all__ = ["BLOCKS", "MODELS", "build"]

BLOCKS = ("Message", "Layer", "Down")  # what a user would checkpoint


class Layer(nn.Module):
    """A linear layer and its activation."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.linear = nn.Linear(first, last)

    def forward(self, x: Tensor) -> Tensor:
        return silu(self.linear(x))


class Message(nn.Module):
    """Atoms hear of their neighbours, by filters that depend on distances (SchNet)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.filters = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.send, self.update = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, atoms: Tensor, radial: Tensor, near: Tensor, far: Tensor) -> Tensor:
        sent = self.send(atoms)[far] * self.filters(radial)
        heard = self.update(silu(torch.zeros_like(atoms).index_add(0, near, sent)))
        result: Tensor = atoms + heard
        return result


class ForceField(nn.Module):
    """Energies of molecules and forces on atoms, trained on both."""

    def __init__(self, width: int = 128, blocks: int = 6) -> None:
        super().__init__()
        self.kinds = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Message(width) for _ in range(blocks))
        self.energy = nn.Linear(width, 1)
        self.register_buffer("centres", torch.linspace(0, 4, 32))

    def forward(self, kinds: Tensor, positions: Tensor, near: Tensor, far: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        lengths = (positions[far] - positions[near]).norm(dim=1, keepdim=True)
        radial = torch.exp(-4 * (lengths - self.centres).square())
        atoms = self.kinds(kinds)
        for block in self.blocks:
            atoms = block(atoms, radial, near, far)
        energies = self.energy(atoms)
        (slope,) = grad(energies.sum(), positions, create_graph=True)
        return torch.cat([energies, -slope], 1)


class Physics(nn.Module):
    """What is left of Burgers' equation where a network is to solve it (PINN)."""

    def __init__(self, width: int = 256, blocks: int = 6) -> None:
        super().__init__()
        widths = [2, *[width] * blocks]
        self.blocks = nn.ModuleList(map(Layer, widths, widths[1:]))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
        u = torch.cat([x, t], 1)
        for block in self.blocks:
            u = block(u)
        u = self.last(u)
        u_x, u_t = grad(u.sum(), [x, t], create_graph=True)
        (u_xx,) = grad(u_x.sum(), x, create_graph=True)
        residual: Tensor = u_t + u * u_x - 0.01 * u_xx
        return residual


class Down(nn.Module):
    """A convolution that halves the image."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(first, last, 4, 2, 1)
        self.norm = nn.InstanceNorm2d(last, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.norm(self.convolution(x)), 0.2)


class Penalty(nn.Module):
    """A critic of images whose slope is kept near one (WGAN-GP)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width]
        self.blocks = nn.Sequential(*map(Down, widths, widths[1:]))
        self.last = nn.Linear(4 * width * 64, 1)

    def judge(self, images: Tensor) -> Tensor:
        """Give a number for each image."""
        judged: Tensor = self.last(self.blocks(images).flatten(1))
        return judged

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        between = (0.5 * real + 0.5 * fake).detach().requires_grad_()
        (slope,) = grad(self.judge(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss: Tensor = self.judge(fake).mean() - self.judge(real).mean() + 10 * penalty
        return loss


class InnerSteps(nn.Module):
    """Two steps of training within the forward (MAML)."""

    def __init__(self, width: int = 256, blocks: int = 4) -> None:
        super().__init__()
        widths = [8, *[width] * blocks]
        self.layers = nn.Sequential(*map(Layer, widths, widths[1:]), nn.Linear(width, 1))

    def forward(self, x: Tensor, y: Tensor, later: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.layers.named_parameters())
        for _ in range(2):
            loss = mse_loss(functional_call(self.layers, weights, (x,)), y)
            slopes = grad(loss, list(weights.values()), create_graph=True)
            pairs = zip(weights.items(), slopes, strict=True)
            weights = {name: weight - 0.05 * slope for (name, weight), slope in pairs}
        found: Tensor = functional_call(self.layers, weights, (later,))
        return found


def _molecules() -> tuple[Tensor, ...]:
    kinds, positions = torch.randint(10, (384,)), torch.randn(384, 3)
    molecule = torch.arange(384) // 24
    together = (molecule[:, None] == molecule) & ~torch.eye(384, dtype=torch.bool)
    near, far = together.nonzero().unbind(1)
    return kinds, positions, near, far


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "force field": (ForceField, _molecules),
    "physics": (Physics, lambda: (torch.randn(2048, 1), torch.randn(2048, 1))),
    "penalty": (Penalty, lambda: (torch.randn(16, 3, 64, 64), torch.randn(16, 3, 64, 64))),
    "inner steps": (
        InnerSteps,
        lambda: (torch.randn(1024, 8), torch.randn(1024, 1), torch.randn(1024, 8)),
    ),
}


def build(name: str) -> Example:
    """Build a model and a batch; the loss is the mean square of what it returns."""
    torch.manual_seed(0)
    kind, batch = MODELS[name]
    return Example(name, kind(), batch(), {}, lambda found: found.square().mean())
