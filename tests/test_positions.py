"""Models that read or write at positions that are tensors of one number train with eager's bits."""

import copy

import pytest
import torch
from torch import nn

import remat
from remat_exec import measure_peak

WIDTH = 32


def of_a_table(model, h, position):
    return h * model.scale[position] + model.table[position]


def of_what_it_made(model, h, position):
    return h + h[:, position, None]


def written(model, h, position):
    h = h.clone()
    h[:, position] = model.table[0]
    return h


def added(model, h, position):
    h = h.clone()
    h[:, position, 1:] += model.table[1, 1:]
    return h


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.table = function, nn.Parameter(torch.randn(20, WIDTH))
        self.register_buffer("scale", torch.linspace(0.1, 1, 20))
        layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh()
        self.enter, self.layers = nn.Linear(8, WIDTH), nn.Sequential(*layers, *layers, *layers)

    def forward(self, x, position):
        return self.layers(self.function(self, self.enter(x), position)).square().mean()


def step(model, *batch):
    model.zero_grad()
    with measure_peak() as peak:
        model(*batch).backward()
    return peak.peak_bytes


@pytest.mark.parametrize(
    ("function", "lengths"),
    [
        (of_a_table, [60] * 4),
        *(
            pytest.param(function, lengths, marks=pytest.mark.sweep)
            for function in (of_a_table, of_what_it_made, written, added)
            for lengths in ([60] * 5, range(50, 60))
        ),
    ],
)
def test_a_model_with_positions(function, lengths):
    torch.manual_seed(0)
    plain = Model(function)
    original = copy.deepcopy(plain)
    batches = [(torch.randn(8, n, 8), torch.tensor(at % 7 - 2)) for at, n in enumerate(lengths)]
    budget = int(0.7 * max(step(plain, *batch) for batch in batches))
    model = remat.rematerialize(original, budget=budget, limit_seconds=0.5, costs="estimate")
    for batch in batches:
        step(plain, *batch)
        assert step(model, *batch) <= budget
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert got.grad is expected.grad is None or torch.equal(got.grad, expected.grad)
