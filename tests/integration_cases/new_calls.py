"""A small model, planned; and a step of it."""

import torch
from exec_cases.training import train
from torch import nn

import remat

LIMIT_SECONDS = 0.1


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 24),
        nn.Sigmoid(), nn.Linear(24, 4),
    )  # fmt: skip


def batch(size=32, **options):
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(size), **options)


def planned(model=None, budget=0.8):
    return remat.rematerialize(model or net(), batch(), budget=budget, limit_seconds=LIMIT_SECONDS)


def loss(output):
    return output.square().mean()


def run(model, *calls, change=None):
    """Train once for each batch; `change(model, step)` comes first."""

    def call(m, step):
        if change is not None:
            change(m, step)
        return m(calls[step])

    return train(model, call, loss, steps=len(calls))
