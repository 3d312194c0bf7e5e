"""What is told to be proved of a budget is contradicted by no step that runs."""

import warnings

import pytest
import torch
from test_fractions import Codes, Many, X
from torch import nn

import remat
from remat_exec import measure_peak


class Tables(nn.Module):
    """Two regions, between which a table is made when the model first runs."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.table = None

    def forward(self, x):
        x = self.enter(x)
        self.feasibility_rounds()
        return self.leave(x).square().mean()

    @torch.compiler.disable
    def feasibility_rounds(self):
        if self.table is None:
            self.table = torch.zeros(256, 256)


def step(model):
    model.zero_grad()
    with measure_peak() as peak, warnings.catch_warnings():
        warnings.simplefilter("ignore", remat.BudgetWarning)
        returned = model(X)
        (returned[-1] if isinstance(returned, list) else returned).square().mean().backward()
    return peak.peak_bytes


def told_of(model, budget):
    """Give what is told to be proved where a budget is refused, and what is to be enough."""
    planned = remat.rematerialize(model, budget=budget, limit_seconds=0.2)
    try:
        for _ in range(4):
            step(planned)
    except remat.BudgetTooSmall as error:
        return error.least_bytes, error.smallest_bytes
    raise AssertionError("nothing was refused")


class Draws(nn.Sequential):
    """Draws what no plan that has room makes again: then no state of a generator is saved."""

    def __init__(self):
        super().__init__(nn.Linear(32, 8), nn.Dropout(0.2), nn.Linear(8, 1))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(Codes, marks=pytest.mark.sweep),
        pytest.param(Tables, marks=pytest.mark.sweep),
        pytest.param(Many, marks=pytest.mark.sweep),
        Draws,
    ],
)
def test_no_step_goes_below_what_is_told_to_be_proved(kind):
    torch.manual_seed(0)
    model = kind()
    least, smallest = told_of(model, 1000)
    assert least <= step(model)  # plain, too
    planned = remat.rematerialize(model, budget=2 * smallest, limit_seconds=0.2)
    for _ in range(3):
        taken = step(planned)
    if kind is Many:  # what does not get a gradient was not known
        assert smallest > taken
    planned = remat.rematerialize(model, budget=smallest * 5 // 4, limit_seconds=0.2)
    for _ in range(5):
        assert least <= step(planned)
    plan = planned.plan
    assert 0 <= plan.bound_overhead <= plan.predicted_overhead + 1e-9
