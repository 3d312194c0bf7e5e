"""Slices that take all of an axis, which torch traces where sizes are symbols."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from integration_cases.sized import captures_of, gradients, model_of
from torch import nn

import remat
from remat_graph.torch import Program, capture

aten = torch.ops.aten
ROWS = (40, 30, 51, 64)


class Parts(nn.Module):
    """Reads and writes parts along the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(64, 16)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        first = x[:, :4].tanh() * x[:, 4:8].cos()
        y = x.clone()
        y[:, 8:12] = first
        return (y.sin() * x).square().mean() + first.exp().sum()


class OfTable(Parts):
    """Reads as many rows of a table as there are: all of them in one call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table[: x.shape[0]])


def calls() -> list[tuple[torch.Tensor]]:
    return [(torch.randn(rows, 16),) for rows in ROWS]


def operators(program: Program) -> Counter[str]:
    calls = (*program.calls.values(), *program.views.values())
    return Counter(str(call.target) for call in calls)


def test_they_are_left_out_of_the_trace_as_where_sizes_are_numbers() -> None:
    torch.manual_seed(0)
    model, inputs = Parts(), calls()
    of_sizes = captures_of(model, *inputs)[0].program
    of_numbers = capture(model, inputs[1], costs="estimate").program
    assert operators(of_sizes) == operators(of_numbers)
    assert operators(of_sizes)[str(aten.slice_backward.default)] == 2


def test_one_that_takes_all_for_one_size_alone_stays() -> None:
    torch.manual_seed(0)
    *_, near, whole = captures_of(OfTable(), *calls())
    assert operators(near.program) == operators(whole.program)
    assert operators(whole.program)[str(aten.slice_backward.default)] == 3
    assert whole.is_of_trace(near)


@pytest.mark.parametrize("make", [Parts, OfTable])
def test_steps_of_such_sizes_have_the_bits_of_eager(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    inputs = calls()
    run = remat.rematerialize(model, inputs[0], budget=0.8)
    for each in (*inputs, *inputs):
        expected = gradients(model, model_of(model), each)
        assert all(map(torch.equal, gradients(model, run, each), expected))


class Snapshot(nn.Module):
    """Returns a view of what was assigned to all of a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.slice_scatter(torch.zeros_like(x), x, 0, 0, x.shape[0])
        return self.layer(x).square().sum(), whole.view(-1)


def test_an_output_is_no_view_of_what_was_assigned_to_it() -> None:
    torch.manual_seed(0)
    run = remat.rematerialize(Snapshot(), budget=2**22)
    for (x,) in (*calls(), *calls()):
        loss, snapshot = run(x)
        loss.backward()
        assert snapshot.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
