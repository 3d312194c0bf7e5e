"""A small model and its batch, for tests of what stands in for it."""

import torch
from exec_cases.training import train
from torch import nn

import remat

LIMIT_SECONDS = 0.1


class Net(nn.Module):
    """Two layers tied to one another, a buffer, dropout, and arguments of every kind."""

    def __init__(self, width=24):
        super().__init__()
        self.config = {"width": width}
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 8)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.again = nn.Linear(8, width)
        self.again.weight = self.enter.weight

    def forward(self, x, /, scale=1.0, *, shift=None, deep=False):
        h = self.drop(torch.tanh(self.norm(self.enter(x)))) * scale
        if shift is not None:
            h = h + shift
        if deep:
            h = torch.tanh(self.again(self.leave(h)))
        return self.leave(torch.exp(torch.sin(h)))

    def describe(self):
        """A method that is no forward."""
        return f"{type(self).__name__} {self.config['width']}"


def net():
    torch.manual_seed(0)
    return Net()


def batch(size=64, seed=1):
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))


def loss(output):
    return output.square().mean()


def planned(model=None, args=(), **kwargs):
    kwargs.setdefault("budget", 0.7)
    return remat.rematerialize(
        model or net(), args or (batch(),), limit_seconds=LIMIT_SECONDS, **kwargs
    )


def step(model, x=None, **kwargs):
    return train(model, lambda m, _: m(batch() if x is None else x, **kwargs), loss)
