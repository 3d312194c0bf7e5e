import time

import pytest
from hypothesis import HealthCheck, given, settings
from solver_cases.brute_force import smallest
from solver_cases.random_graphs import graphs, trainings

from remat_graph import Graph, Op, Status, Value
from remat_solvers import BudgetTooSmall, regression, solve
from remat_solvers.bottleneck import bottleneck
from remat_solvers.least import least
from remat_solvers.regression import regress
from remat_solvers.smallest import smallest_trace
from remat_solvers.wiring import Wiring

thorough = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(graphs())
def test_no_random_graph_goes_below_the_bound(graph):
    wiring = Wiring.of(graph)
    assert regress(wiring, least(wiring)).peak_bytes <= smallest(graph)


@thorough
@given(trainings())
def test_no_training_goes_below_the_bound(graph):
    wiring = Wiring.of(graph)
    assert regress(wiring, least(wiring)).peak_bytes <= smallest(graph)


@thorough
@given(graphs(most_ops=16, most_values=20))
def test_no_schedule_found_of_a_larger_graph_goes_below_the_bound(graph):
    wiring = Wiring.of(graph)
    found = smallest_trace(wiring, time.perf_counter() + 0.3)
    assert regress(wiring, bottleneck(wiring)).peak_bytes <= found.peak_bytes


@thorough
@given(graphs(most_ops=7, most_values=9))
def test_stopped_early_the_bound_still_holds_and_is_never_below_the_given_one(graph):
    wiring = Wiring.of(graph)
    floor = bottleneck(wiring)
    stopped = regress(wiring, floor, deadline=0.0).peak_bytes
    assert floor.peak_bytes <= stopped <= regress(wiring, floor).peak_bytes


def join(results: set[str]) -> Graph:
    """An op that reads one output of each of two wide ops: one is made while the other is there."""
    values = [Value("a", 6), Value("beside_a", 2), Value("b", 5), Value("beside_b", 6)]
    ops = (
        Op("make_a", (), ("a", "beside_a"), 1.0, workspace_bytes=4),
        Op("make_b", (), ("b", "beside_b"), 1.0),
        Op("join", ("a", "b"), ("joined",), 1.0),
    )
    return Graph((*values, Value("joined", 2)), ops, frozenset(), frozenset(results), None)


def test_what_one_op_reads_is_made_one_beside_the_other_even_if_it_is_made_again_later(monkeypatch):
    monkeypatch.setattr(regression, "_MOST_SETS_AT_END", 0)
    graph = join({"b", "beside_b", "joined"})
    wiring = Wiring.of(graph)
    floor = bottleneck(wiring)
    proved = regress(wiring, floor)
    assert floor.peak_bytes < proved.peak_bytes == smallest(graph) == 17
    assert proved.op == "join"


def test_some_result_is_made_last_beside_all_others(monkeypatch):
    monkeypatch.setattr(regression, "_SHARES", ())
    graph = join({"b", "beside_b", "joined"})
    wiring = Wiring.of(graph)
    floor = bottleneck(wiring)
    proved = regress(wiring, floor)
    assert floor.peak_bytes < proved.peak_bytes == smallest(graph) == 17
    assert proved.op is None


def test_what_the_last_runs_prove_already_stays():
    graph = join({"joined"})
    wiring = Wiring.of(graph)
    floor = bottleneck(wiring)
    assert floor.peak_bytes == smallest(graph) == 17
    assert regress(wiring, floor) == floor


def test_a_budget_below_the_bound_is_proved_infeasible():
    graph = join({"b", "beside_b", "joined"})
    assert solve(graph, 17, solver="refine").peak_bytes == 17
    with pytest.raises(BudgetTooSmall) as caught:
        solve(graph, 16, solver="refine")
    assert caught.value.status is Status.INFEASIBLE


def test_it_ends_as_soon_as_more_than_enough_is_proved():
    wiring = Wiring.of(join({"b", "beside_b", "joined"}))
    floor = bottleneck(wiring)
    assert regress(wiring, floor, enough_bytes=floor.peak_bytes - 1) == floor


def test_it_is_left_where_too_many_values_are_large(monkeypatch):
    monkeypatch.setattr(regression, "_MOST_LARGE", 3)
    wiring = Wiring.of(join({"b", "beside_b", "joined"}))
    floor = bottleneck(wiring)
    assert regress(wiring, floor) == floor


def test_searches_that_are_cut_short_leave_a_bound_that_holds(monkeypatch):
    monkeypatch.setattr(regression, "_MOST_SETS", 2)
    graph = join({"b", "beside_b", "joined"})
    wiring = Wiring.of(graph)
    floor = bottleneck(wiring)
    assert floor.peak_bytes <= regress(wiring, floor).peak_bytes <= smallest(graph)
