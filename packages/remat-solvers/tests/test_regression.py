import time
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from solver_cases.minimal_peaks import minimal_peaks
from solver_cases.random_graphs import graphs, trainings
from solver_cases.smallest_budgets import smallest

from remat_graph import Graph, Op, Status, Value
from remat_solvers import BudgetTooSmall, solve
from remat_solvers.bounds import regression
from remat_solvers.bounds.bottleneck import bottleneck
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.bounds.regression import regress
from remat_solvers.core.wiring import Wiring
from remat_solvers.search.descent import minimal_peak_trace

thorough = settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(graphs(uneven=True) | graphs())
def test_no_random_graph_goes_below_the_bound(graph):
    wiring = Wiring.of(graph)
    assert regress(wiring, peak_bound(wiring)).peak_bytes <= smallest(graph)


@thorough
@given(trainings())
def test_no_training_goes_below_the_bound(graph):
    wiring = Wiring.of(graph)
    assert regress(wiring, peak_bound(wiring)).peak_bytes <= smallest(graph)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(most_ops=10, most_values=12, uneven=True) | graphs(most_ops=10, most_values=12))
def test_with_every_value_large_it_finds_what_a_search_without_shortcuts_finds(graph):
    wiring = Wiring.of(graph)
    floor = peak_bound(wiring)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regression, "_SHARES", (1e-9,))
        found = regress(wiring, floor).peak_bytes
    if floor.peak_bytes:
        assert found == max(floor.peak_bytes, minimal_peaks(graph))


@thorough
@given(graphs(most_ops=10, most_values=12, uneven=True))
def test_small_values_and_fewer_sets_only_lower_the_bound(graph):
    wiring = Wiring.of(graph)
    floor = peak_bound(wiring)
    most = max(floor.peak_bytes, minimal_peaks(graph))
    for name, value in (
        ("_SHARES", (0.5, 0.25)),
        ("_MOST_BITS", 30),
        ("_MOST_BITS_AT_END", 30),
        ("_MOST_LARGE", 4),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(regression, name, value)
            assert floor.peak_bytes <= regress(wiring, floor).peak_bytes <= most


@thorough
@given(graphs(most_ops=16, most_values=20))
def test_no_schedule_found_of_a_larger_graph_goes_below_the_bound(graph):
    wiring = Wiring.of(graph)
    found = minimal_peak_trace(wiring, time.perf_counter() + 0.3)
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
    monkeypatch.setattr(regression, "_MOST_BITS_AT_END", 0)
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


def trunk(count: int) -> Graph:
    """A chain of wide values, from each of which a narrow result is made."""
    values, ops = [], []
    for i in range(count):
        values += [Value(f"wide_{i}", 100), Value(f"narrow_{i}", 10)]
        ops.append(Op(f"widen_{i}", (f"wide_{i - 1}",) if i else (), (f"wide_{i}",), 1.0))
        ops.append(Op(f"shrink_{i}", (f"wide_{i}",), (f"narrow_{i}",), 1.0))
    results = frozenset(f"narrow_{i}" for i in range(count))
    return Graph(tuple(values), tuple(ops), frozenset(), results, None)


def test_before_the_last_pass_along_a_chain_most_of_its_results_are_there(monkeypatch):
    graph = trunk(4)
    wiring = Wiring.of(graph)
    floor = bottleneck(wiring)
    monkeypatch.setattr(regression, "_MOST_BITS_AT_END", 0)
    proved = regress(wiring, floor)
    assert floor.peak_bytes < proved.peak_bytes == smallest(graph) == 220
    assert proved.op is None
    monkeypatch.setattr(regression, "_SHARES", (0.1,))  # the results are small
    assert regress(wiring, floor) == floor


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
def test_parts_are_found_as_python_finds_them(count):
    random = Random(count)
    kept = [random.getrandbits(count) & random.getrandbits(count) for _ in range(300)]
    sets = regression._Sets(count)
    for i, now in enumerate(kept):
        other = now | random.getrandbits(count)
        assert sets.has_part_of(other) == any(k & other == k for k in kept[:i])
        sets.add(now)
        assert sets.has_part_of(other)


def test_what_the_last_runs_prove_already_stays():
    graph = join({"joined"})
    wiring = Wiring.of(graph)
    floor = bottleneck(wiring)
    assert floor.peak_bytes == smallest(graph) == 17
    assert regress(wiring, floor) == floor


def two_ways_to_one_set() -> Graph:
    """What must have been there before is the same with `a` or `c` made last, the peak is not."""
    sizes = {"z": 95, "y": 20, "c": 10, "a": 10, "j": 1, "k": 1}
    ops = (
        Op("make_z", (), ("z",), 1.0),
        Op("make_y", ("z",), ("y",), 1.0),
        Op("make_c", ("y",), ("c",), 1.0),
        Op("make_a", (), ("a",), 1.0, workspace_bytes=100),
        Op("make_j", ("a", "c"), ("j",), 1.0),
        Op("make_k", ("a",), ("k",), 1.0),
    )
    values = tuple(Value(name, size) for name, size in sizes.items())
    return Graph(values, ops, frozenset(), frozenset({"j", "k"}), None)


def test_a_set_that_is_reached_twice_has_the_lower_of_the_two_peaks():
    graph = two_ways_to_one_set()
    wiring = Wiring.of(graph)
    assert regress(wiring, peak_bound(wiring)).peak_bytes == smallest(graph) == 120


def once_only(replayable: bool) -> Graph:
    """A mask of 8 that is read again at the end; between, an op with nothing to do with it."""
    values = [Value("mask", 8), Value("wide", 6), Value("narrow", 4), Value("sum", 1)]
    ops = (
        Op("draw", (), ("mask",), 1.0, replayable=replayable),
        Op("widen", (), ("wide",), 1.0),
        Op("shrink", ("wide",), ("narrow",), 1.0),
        Op("add", ("narrow", "mask"), ("sum",), 1.0),
    )
    return Graph(tuple(values), ops, frozenset(), frozenset({"sum"}), None)


@pytest.mark.parametrize(("replayable", "peak_bytes"), [(False, 18), (True, 13)])
def test_what_cannot_be_made_again_is_there_from_its_only_run_on(replayable, peak_bytes):
    graph = once_only(replayable)
    wiring = Wiring.of(graph)
    assert regress(wiring, peak_bound(wiring)).peak_bytes == smallest(graph) == peak_bytes


def test_a_budget_below_the_bound_is_proved_infeasible():
    graph = join({"b", "beside_b", "joined"})
    assert solve(graph, 17, solver="refine").peak_bytes == 17
    with pytest.raises(BudgetTooSmall) as caught:
        solve(graph, 16, solver="refine")
    assert caught.value.status is Status.INFEASIBLE


def test_it_ends_as_soon_as_more_than_enough_is_proved(monkeypatch):
    wiring = Wiring.of(join({"b", "beside_b", "joined"}))
    floor = bottleneck(wiring)
    assert regress(wiring, floor, enough_bytes=floor.peak_bytes - 1) == floor
    monkeypatch.setattr(regression, "_MOST_BITS_AT_END", 0)
    enough = regress(wiring, floor, enough_bytes=floor.peak_bytes)
    assert floor.peak_bytes < enough.peak_bytes <= 17


def test_searches_that_are_cut_short_end_a_share(monkeypatch):
    monkeypatch.setattr(regression, "_MOST_BITS_AT_END", 0)
    monkeypatch.setattr(regression, "_MOST_BITS", 0)
    wiring = Wiring.of(join({"b", "beside_b", "joined"}))
    floor = bottleneck(wiring)
    assert regress(wiring, floor) == floor
