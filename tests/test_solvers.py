"""Every solver's schedules train the same bits within the budget."""

import copy

import pytest
import torch
from exec_cases.models import Scheduled
from exec_cases.training import assert_bitwise_equal, train
from integration_cases.sweeps import swept
from torch import nn

import remat
from remat_graph.torch import capture


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    width = 32
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(7)]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(width, 4))


@pytest.fixture(scope="module")
def stored(layers):
    model = copy.deepcopy(layers)
    captured = capture(model, (batch(),), costs="estimate")
    return run(Scheduled(model, captured))


def batch():
    return torch.randn(512, 32, generator=torch.Generator().manual_seed(1))


def loss(output):
    return output.square().mean()


def run(model):
    return train(model, lambda m, _: m(batch()), loss)


# One of each kind: by programs, by programs over blocks, by a rule, by segments, none again.
KEPT = ("refine", "h-ilp", "chen-sqrt", "rotor", "tw-remat", "store-all")


@pytest.mark.parametrize("solver", swept(remat.list_solvers(), KEPT))
def test_a_step_by_any_solver_has_the_bits_of_storing_everything(layers, stored, solver):
    def planned(limit=5):
        return remat.rematerialize(
            copy.deepcopy(layers), (batch(),), budget=0.8, solver=solver, limit_seconds=limit
        )

    if solver in ("store-all", "gist"):  # which compute nothing again
        with pytest.raises(remat.BudgetTooSmall):
            planned(limit=0.1)
        return
    model = planned()
    assert_bitwise_equal(run(model), stored)
    assert model.plan.solution.solver == solver
    assert model.plan.recomputations
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
