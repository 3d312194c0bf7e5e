"""Hierarchical solvers on what the partitioner makes, and training by what they find."""

import copy

import pytest
import torch
from exec_cases.models import Scheduled
from exec_cases.training import assert_bitwise_equal, train
from torch import nn

from remat_graph import Status, simulate
from remat_graph.torch import capture
from remat_partition import partition
from remat_solvers import Limit, Problem, store_all
from remat_solvers.published.hierarchical.h_tw_remat import HTWRemat
from remat_solvers.published.hierarchical.hilp import HILP

SECONDS = {HILP: 3.0, HTWRemat: 3600.0}  # the second ends by itself


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(3 * width, width),
        )

    def forward(self, x):
        return x + self.layers(x)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(16) for _ in range(5)), nn.Linear(16, 4))


@pytest.fixture(scope="module")
def captured(model):
    return capture(model, (batch(),), costs="estimate")


def batch():
    return torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


def run(model):
    return train(model, lambda m, _: m(batch()), lambda output: output.square().mean())


def solved(solver, graph, share, hierarchy):
    budget = int(share * simulate(graph, store_all(graph)).peak_bytes)
    problem = Problem(graph, budget, hierarchy)
    solution = solver.solve(
        problem, Limit.starting_now(SECONDS[type(solver)]), lambda progress: None
    )
    timeline = simulate(graph, solution.schedule)
    assert timeline.peak_bytes == solution.peak_bytes <= budget
    assert timeline.time == solution.time
    assert solution.status is Status.FEASIBLE
    return solution


def depth_of(block):
    inside = [member for member in block.members if not isinstance(member, str)]
    return 1 + max(map(depth_of, inside), default=-1)


@pytest.mark.sweep
@pytest.mark.parametrize(("make", "most", "depth"), [(HILP, 4, 2), (HTWRemat, 2, 3)])
def test_blocks_may_hold_blocks(captured, make, most, depth):
    graph = captured.graph
    hierarchy = partition(graph, max_top_ops=most, max_block_ops=most)
    assert depth_of(hierarchy.root) >= depth
    assert solved(make(), graph, 0.7, hierarchy).time < 1.25 * graph.time


@pytest.mark.sweep
@pytest.mark.parametrize("make", [HILP, HTWRemat])
def test_a_step_has_the_bits_of_storing_everything(model, captured, make):
    graph = captured.graph
    hierarchy = partition(graph, max_top_ops=8, max_block_ops=8)
    schedule = solved(make(), graph, 0.7, hierarchy).schedule
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    stored = run(Scheduled(plain, capture(plain, (batch(),), costs="estimate")))
    again = Scheduled(planned, capture(planned, (batch(),), costs="estimate"), schedule)
    assert_bitwise_equal(run(again), stored)
