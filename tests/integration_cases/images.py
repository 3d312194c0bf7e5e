"""Convolutions, whose ops can run in channels_last, and a choice of those that do."""

from dataclasses import replace

import torch
from torch import nn

from remat_graph.torch.capturing import ways
from remat_graph.torch.cost.costs import costs_of
from remat_graph.torch.ways.layouts import _able


class Images(nn.Module):
    """Convolutions with what there are other ways for, and one output more than is used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x):
        return self.body(x).flatten(1)


IMAGES = torch.randn(8, 3, 24, 24)


def choose_layouts(monkeypatch, *, share=1, cost=1.0):
    """Run every op that can in channels_last, or a share of them, at this much of its time."""

    def costs(program, *given):
        return {
            op: replace(each, time=each.time * cost) if op in program.rounding else each
            for op, each in costs_of(program, *given).items()
        }

    def chosen(program, times_of):
        return frozenset(op for op in _able(program) if len(op) % share == 0)

    monkeypatch.setattr("remat_graph.torch.cost.costs.costs_of", costs)
    monkeypatch.setattr(ways, "choose_layouts", chosen)
