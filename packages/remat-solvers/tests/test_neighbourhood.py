"""Large-neighbourhood search, and the programs with most columns fixed that it solves."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.random_graphs import graphs
from solver_cases.synthetic import gpt2

from remat_graph import simulate
from remat_solvers import store_all
from remat_solvers.core.milp import Outcome, restricted, solve_program
from remat_solvers.core.trace import sequence_time
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.refine.neighbourhood import Neighbourhood
from remat_solvers.refine.relaxation import relax
from remat_solvers.search.evict import evict

FAR = 1e9  # a deadline


@settings(max_examples=12, deadline=None)
@given(graphs(20, 30), st.floats(0.3, 1.0), st.integers(0, 3))
def test_a_step_keeps_what_fits_legal_within_the_budget_and_no_slower(graph, fraction, seed):
    wiring = Wiring.of(graph)
    peak = simulate(graph, store_all(graph)).peak_bytes
    now = evict(wiring, np.arange(wiring.op_count), int(fraction * peak))
    budget = max(1, now.peak_bytes)
    neighbourhood = Neighbourhood(wiring, budget, seed)
    for _ in range(3):
        found = neighbourhood.step(now, FAR)
        timeline = simulate(graph, expand(wiring, found.sequence))
        assert timeline.peak_bytes == found.peak_bytes <= budget
        assert timeline.time <= sequence_time(wiring, now.sequence) * (1 + 1e-12)
        now = found


@pytest.mark.sweep
def test_some_steps_improve_what_eviction_found():
    graph = gpt2(layers=3)
    wiring = Wiring.of(graph)
    budget = int(0.35 * simulate(graph, store_all(graph)).peak_bytes)
    first = now = evict(wiring, np.arange(wiring.op_count), budget)
    assert first.peak_bytes <= budget
    neighbourhood = Neighbourhood(wiring, budget)
    assert neighbourhood.is_of_use
    for _ in range(5):
        now = neighbourhood.step(now, FAR)
    assert sequence_time(wiring, now.sequence) < 0.995 * sequence_time(wiring, first.sequence)


def test_graphs_with_too_many_columns_are_left_alone():
    wiring = Wiring.of(gpt2(layers=2))
    large = dataclasses.replace(wiring, time=np.ones(30_000))
    assert large.op_count == 30_000
    assert not Neighbourhood(large, 1).is_of_use


@pytest.mark.parametrize("seed", range(3))
def test_a_restricted_program_is_the_program_with_its_other_columns_fixed(seed):
    graph = gpt2(layers=2)
    wiring = Wiring.of(graph)
    budget = int(0.5 * simulate(graph, store_all(graph)).peak_bytes)
    program = relax(wiring, budget, [wiring.op_count // 2, wiring.op_count * 3 // 4]).program
    point = solve_program(program, seconds=NO_LIMIT, gap=0.5).point
    free = np.random.default_rng(seed).random(len(point)) < 0.3
    small = solve_program(restricted(program, point, free), seconds=NO_LIMIT)
    fixed = dataclasses.replace(
        program,
        lower=np.where(free, program.lower, point),
        upper=np.where(free, program.upper, point),
    )
    whole = solve_program(fixed, seconds=NO_LIMIT)
    assert small.outcome is whole.outcome is Outcome.SOLVED
    assert small.value + program.cost[~free] @ point[~free] == pytest.approx(whole.value, abs=1e-6)
