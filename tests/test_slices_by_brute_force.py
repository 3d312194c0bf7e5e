"""Plans in slices of small models, held against all schedules of all numbers of slices."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from remat.planning.solving import solved_in_best_program
from remat_graph import Numerics, Status, simulate
from remat_graph.torch import capture
from remat_solvers import BudgetTooSmall, solve
from remat_solvers.bounds.exhaustive import exhaust
from remat_solvers.toolkit import Wiring, expand, sequence_time

WORDS, WIDTH, ROWS = 512, 4, 6


class Head(nn.Module):
    """A linear layer and a cross-entropy."""

    def __init__(self):
        super().__init__()
        self.out = nn.Parameter(torch.randn(WIDTH, WORDS))

    def forward(self, x, y):
        return functional.cross_entropy(x @ self.out, y)


class Gated(nn.Module):
    """A wide layer between narrow ones."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, WORDS))
        self.down = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, x, y):
        return (functional.silu(x @ self.up) @ self.down).square().sum() + y.sum()


@pytest.fixture(scope="module", params=[Head, pytest.param(Gated, marks=pytest.mark.sweep)])
def able_and_optima(request):
    """A capture, and the least time of any program of it, by budget."""
    torch.manual_seed(0)
    args = torch.randn(ROWS, WIDTH), torch.randint(WORDS, (ROWS,))
    captured = capture(request.param(), args, {}, costs="estimate")
    able = captured.with_alternatives(Numerics.ROUNDING, laid_out=())
    graphs = [each.graph for each in every_program(able)]
    top = solve(graphs[0], 10**9).peak_bytes  # of the whole, which is the fastest then
    return able, {
        budget: min(fastest(graph, budget) for graph in graphs)
        for budget in range(top // 10, top + top // 10, top // 10)
    }


def fastest(graph, budget):
    """Find by a search of all states the least time within a budget; infinite if nothing fits."""
    wiring = Wiring.of(graph)
    answer = exhaust(wiring, budget, math.inf)
    assert answer is not None
    if answer.sequence is None:
        return math.inf
    schedule = expand(wiring, answer.sequence)
    assert simulate(graph, schedule).peak_bytes <= budget
    return sequence_time(wiring, answer.sequence)


def every_program(able):
    """List the program with each kind of cut whole, or in each number of slices.

    One that can make its gradients in the forward is a kind twice: it is one of both.
    """
    numbers = [range(kind[0].units + 1) for kind in able.cuts]
    for chosen in itertools.product(*numbers):
        sliced = [(kind, n) for kind, n in enumerate(chosen) if n]
        ops = [op for kind, _ in sliced for op in able.cuts[kind][0].ops]
        if len(ops) == len(set(ops)):
            yield able.in_slices(sliced)


@pytest.mark.parametrize("briefly", [True, False])
def test_no_bound_is_above_the_fastest_schedule_in_any_number_of_slices(able_and_optima, briefly):
    able, optima = able_and_optima
    planned = refused = 0
    for budget, optimum in optima.items():

        def solved(graph):
            return solve(graph, budget)  # noqa: B023

        try:
            captured, solution = solved_in_best_program(
                able, budget, solved, solved if briefly else None
            )
        except BudgetTooSmall:
            refused += 1
            assert optimum == math.inf
        else:
            planned += 1
            assert simulate(captured.graph, solution.schedule).peak_bytes <= budget
            assert solution.lower_bound <= optimum * (1 + 1e-9)
            assert solution.time >= optimum * (1 - 1e-9)
            if solution.status is Status.OPTIMAL:
                assert solution.time <= optimum * (1 + 1e-9)
    assert planned
    assert refused
