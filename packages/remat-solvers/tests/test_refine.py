"""The solver refine: against brute force, certified, from a given schedule, without time."""

import math
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.random_graphs import graphs, trainings
from solver_cases.relaxations import first_schedule, refine, until
from solver_cases.smallest_budgets import smallest
from solver_cases.synthetic import gpt2

from remat_graph import Compute, Free, Graph, Op, Schedule, Status, Value, simulate
from remat_graph.testing import unit_chain
from remat_solvers import Limit, Problem, smallest_budget, store_all
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.milp import solve_program
from remat_solvers.core.problem import silent
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring, in_order, sequence_of
from remat_solvers.published.checkmate import Checkmate
from remat_solvers.published.rotor import Rotor
from remat_solvers.refine import Refine, solver
from remat_solvers.refine.relaxation import COST_OF_ONCE
from remat_solvers.refine.state import State
from remat_solvers.search.descent import minimal_peak_trace
from remat_solvers.testing.brute_force import fastest

thorough = settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_against_brute_force(graph: Graph, budget: int) -> None:
    solution = refine(graph, budget)
    best = fastest(graph, budget)
    if best is None:
        assert solution.schedule is None
        return
    assert solution.status is not Status.INFEASIBLE
    if solution.lower_bound is not None:
        assert solution.lower_bound <= best * (1 + 1e-9)
    if solution.schedule is not None:
        timeline = simulate(graph, solution.schedule)
        assert timeline.peak_bytes == solution.peak_bytes <= budget
        assert timeline.time == solution.time >= best * (1 - 1e-9)
    if solution.status is Status.OPTIMAL:
        assert solution.time == pytest.approx(best, rel=2e-6)


@thorough
@given(graphs(), st.floats(0.3, 1.0))
def test_random_graphs_against_brute_force(graph, fraction):
    peak = simulate(graph, store_all(graph)).peak_bytes
    check_against_brute_force(graph, max(1, int(peak * fraction)))


@thorough
@given(trainings(), st.floats(0.4, 1.0))
def test_training_chains_against_brute_force(graph, fraction):
    peak = simulate(graph, store_all(graph)).peak_bytes
    check_against_brute_force(graph, max(1, int(peak * fraction)))


@pytest.mark.sweep
@settings(thorough, max_examples=8)
@given(st.one_of(graphs(), trainings()), st.floats(0.4, 1.0))
def test_the_ways_of_large_programs_against_brute_force(graph, fraction):
    peak = simulate(graph, store_all(graph)).peak_bytes
    sizes = {"_SMALL_COLUMNS": 2, "_LARGE_COLUMNS": 4}
    with mock.patch.multiple("remat_solvers.refine.programs", **sizes):
        check_against_brute_force(graph, max(1, int(peak * fraction)))


@settings(thorough, max_examples=6)
@given(st.one_of(graphs(30, 40), trainings(8)), st.floats(0.4, 1.0))
def test_graphs_beyond_brute_force_against_checkmate(graph, fraction):
    """Its program over all moments is another one, and bounds every schedule in the order too."""
    budget = max(1, int(simulate(graph, store_all(graph)).peak_bytes * fraction))
    found = refine(graph, budget)
    other = Checkmate().solve(Problem(graph, budget), Limit.starting_now(10.0), lambda _: None)
    for one, two in ((found, other), (other, found)):
        if one.schedule is not None:
            assert two.status is not Status.INFEASIBLE
            assert (two.lower_bound or 0.0) <= one.time * (1 + 1e-6)
    if found.status is other.status is Status.OPTIMAL:
        assert found.time == pytest.approx(other.time, rel=2e-6)


@thorough
@given(graphs())
def test_least_bytes_is_below_what_brute_force_needs(graph):
    needed = smallest(graph)
    assert peak_bound(Wiring.of(graph)).peak_bytes <= needed
    found = smallest_budget(graph, limit_seconds=1)
    assert found.least_bytes <= needed <= found.peak_bytes
    assert simulate(graph, found.schedule).peak_bytes == found.peak_bytes


def test_a_program_solved_as_far_as_the_gap_was_worth_is_solved_to_its_end():
    """A back end that stops as soon as it may: what it leaves open is closed by the next solve."""
    asked = []

    def lazy(program, *, gap=0.0, **options):
        answer = solve_program(program, **options)
        asked.append(gap)
        return replace(answer, bound=answer.bound - gap * abs(answer.value))

    graph, budget = unit_chain(7), 4
    with mock.patch("remat_solvers.refine.programs.solve_program", lazy):
        found = refine(graph, budget, NO_LIMIT)
    assert asked[0] > 0 == asked[-1]
    assert (found.status, found.time) == (Status.OPTIMAL, fastest(graph, budget))


@pytest.mark.parametrize("fraction", [0.5, 0.3])
def test_transformer_gap_is_certified_and_small(fraction):
    graph = gpt2(layers=4)
    peak = simulate(graph, store_all(graph)).peak_bytes
    reports = []

    def enough(progress):
        reports.append(progress)
        if progress.incumbent is None or progress.lower_bound is None:
            return False
        return (progress.incumbent_time - progress.lower_bound) / graph.time < 0.015

    last = until(graph, int(peak * fraction), enough)
    timeline = simulate(graph, last.incumbent())
    assert timeline.peak_bytes <= peak * fraction
    assert last.lower_bound <= last.incumbent_time == timeline.time
    bounds = [r.lower_bound for r in reports]
    assert bounds == sorted(bounds)
    times = [r.incumbent_time for r in reports if r.incumbent_time is not None]
    assert times == sorted(times, reverse=True)


def test_what_no_cut_allows_is_infeasible_at_once():
    """Each op alone fits, and so do all results; the last large op beside the others does not."""
    values, ops = [Value("x", 1)], []
    for i in range(10):
        values += [Value(f"big{i}", 50), Value(f"mid{i}", 20), Value(f"w{i}", 10)]
        ops += [
            Op(f"make{i}", ("x",), (f"big{i}",), 1.0),
            Op(f"shrink{i}", (f"big{i}",), (f"mid{i}",), 1.0),
            Op(f"result{i}", (f"mid{i}",), (f"w{i}",), 1.0),
        ]
    results = frozenset(f"w{i}" for i in range(10))
    graph = Graph(tuple(values), tuple(ops), frozenset({"x"}), results, None)
    assert peak_bound(Wiring.of(graph)).peak_bytes == 120
    assert first_schedule(graph, 160)
    reports = []
    assert refine(graph, 159, NO_LIMIT, reports.append).status is Status.INFEASIBLE
    assert [r.round for r in reports] == [0]


def test_an_op_that_does_not_fit_is_infeasible_at_once():
    graph = gpt2(layers=1)
    floor = peak_bound(Wiring.of(graph))
    solution = refine(graph, floor.peak_bytes - 1)
    assert solution.status is Status.INFEASIBLE
    assert solution.schedule is None


def test_a_schedule_given_is_where_it_begins():
    """Without time for a program, the answer is no slower than the start."""
    graph = gpt2(layers=4)
    budget = int(0.4 * simulate(graph, store_all(graph)).peak_bytes)
    good = first_schedule(graph, budget)
    reports = []
    problem = Problem(graph, budget, start=good)
    Refine().solve(problem, Limit.starting_now(0.0), reports.append)
    assert reports[0].incumbent_time <= simulate(graph, good).time
    assert simulate(graph, reports[0].incumbent()).peak_bytes <= budget


def test_a_long_chain_is_planned_as_one():
    graph, budget = unit_chain(24), 4
    chain = Rotor().solve(Problem(graph, budget), Limit.starting_now(NO_LIMIT), silent)
    until(graph, budget, lambda progress: (progress.incumbent_time or math.inf) <= chain.time)


def test_only_a_schedule_in_the_order_of_the_graph_is_begun_with():
    values = tuple(Value(name, 1) for name in ("x", "a", "b"))
    ops = (Op("a", ("x",), ("a",), 1.0), Op("b", ("x",), ("b",), 1.0))
    wiring = Wiring.of(Graph(values, ops, frozenset({"x"}), frozenset({"a", "b"}), None))
    ab = Schedule((Compute("a"), Free("a"), Compute("b"), Compute("a")))
    assert in_order(wiring, ab).tolist() == [0, 1, 0]
    ba = Schedule((Compute("b"), Compute("a")))
    assert in_order(wiring, ba) is None
    assert sequence_of(wiring, ba).tolist() == [1, 0]


def test_no_time_still_gives_a_schedule():
    graph = gpt2(layers=2)
    peak = simulate(graph, store_all(graph)).peak_bytes
    solution = refine(graph, int(peak * 0.6), seconds=0)
    assert solution.schedule is None or solution.peak_bytes <= peak * 0.6


def test_a_refusal_looks_for_a_smallest_peak_no_longer_than_its_limit(monkeypatch):
    seconds = []

    def noted(wiring, deadline, **options):
        seconds.append(deadline - time.perf_counter())
        return minimal_peak_trace(wiring, deadline, **options)

    monkeypatch.setattr(solver, "minimal_peak_trace", noted)
    graph = gpt2(layers=2)
    too_little = peak_bound(Wiring.of(graph)).peak_bytes - 1
    assert refine(graph, too_little, seconds=0.02).schedule is None
    assert len(seconds) == 1
    assert max(seconds) <= 0.02


def test_an_interrupt_in_a_report_propagates():
    def interrupt(progress):
        raise KeyboardInterrupt

    graph = gpt2(layers=1)
    peak = simulate(graph, store_all(graph)).peak_bytes
    with pytest.raises(KeyboardInterrupt):
        refine(graph, peak // 2, NO_LIMIT, interrupt)


def test_without_a_limit_it_waits_the_less_the_less_can_be_gained(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    graph = gpt2(2)
    wiring = Wiring.of(graph)
    everything = trace(wiring, np.arange(wiring.op_count))
    last = math.inf

    def state(seconds, *, loose=False):
        limit = Limit.starting_now(seconds, loose=loose)
        made = State(wiring, 2**60, last, limit, lambda progress: None)
        assert made.deadline == last
        made.offer(everything)
        return made

    assert state(30.0).deadline == last
    assert state(30.0, loose=True).deadline < last
    patient = state(None)
    patient.best_time = 1.5 * patient.once
    wide = patient.deadline
    assert wide < 110  # whatever the gap, if all was found at once
    patient.learn(0.499 * COST_OF_ONCE)
    assert patient.deadline < wide < last
    waited = patient.deadline
    patient.offer(everything)
    assert patient.closed(0.0)
    assert patient.deadline < waited  # nothing is left to gain
