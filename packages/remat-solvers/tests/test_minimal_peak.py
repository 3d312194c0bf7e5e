import dataclasses
import time

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.random_graphs import graphs, trainings
from solver_cases.smallest_budgets import smallest
from solver_cases.synthetic import gpt2

from remat_graph import Graph, Op, Value, simulate
from remat_solvers import smallest_budget, solve
from remat_solvers.bounds.bottleneck import bottleneck
from remat_solvers.bounds.peak import PeakBound, peak_bound
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring, expand, in_order
from remat_solvers.minimal_peak.programs import lower
from remat_solvers.search.descent import minimal_peak_trace
from remat_solvers.search.evict import evict
from remat_solvers.search.replay import give_up, replay

thorough = settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def heavy_results(branches: int) -> Graph:
    """Results that follow from small values, which large ones are needed to compute."""
    values = [Value("x", 1)]
    ops: list[Op] = []
    for i in range(branches):
        values += [Value(f"big{i}", 50), Value(f"mid{i}", 5), Value(f"w{i}", 20)]
        ops += [
            Op(f"make{i}", ("x",), (f"big{i}",), 1.0),
            Op(f"shrink{i}", (f"big{i}",), (f"mid{i}",), 1.0),
            Op(f"result{i}", (f"mid{i}",), (f"w{i}",), 1.0),
        ]
    results = frozenset(f"w{i}" for i in range(branches))
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), results, None)


def store_all_trace(wiring):
    return trace(wiring, np.arange(wiring.op_count))


def check(graph, wiring, found):
    """What holds for every sequence found: legal, in order, and the peak is the simulator's."""
    schedule = expand(wiring, found.sequence)
    assert simulate(graph, schedule).peak_bytes == found.peak_bytes >= smallest(graph)
    assert in_order(wiring, schedule) is not None


@thorough
@given(graphs() | trainings(), st.floats(0.0, 1.0), st.integers(0, 3))
def test_replays_are_legal_and_never_raise_the_peak(graph, share, seed):
    wiring = Wiring.of(graph)
    start = store_all_trace(wiring)
    found = replay(wiring, start, int(share * start.peak_bytes), seed=seed)
    check(graph, wiring, found)
    assert found.peak_bytes <= start.peak_bytes


@thorough
@given(graphs() | trainings(), st.integers(0, 9))
def test_what_is_given_up_is_made_again(graph, seed):
    wiring = Wiring.of(graph)
    start = store_all_trace(wiring)
    found = give_up(wiring, start, np.random.default_rng(seed))
    check(graph, wiring, found)
    assert found is start or found.steps > start.steps


def test_a_value_is_given_up_where_it_is_idle_at_the_peak():
    wiring = Wiring.of(gpt2(layers=1))
    start = store_all_trace(wiring)
    found = give_up(wiring, start, np.random.default_rng(0))
    peak = int(start.during.argmax())
    (first,) = np.flatnonzero(found.sequence == start.sequence[peak])
    assert found.steps > start.steps
    assert found.during[first] < start.peak_bytes


@thorough
@given(graphs(most_ops=7, most_values=9) | trainings(most_depth=3))
def test_the_smallest_peak_is_legal_and_between_the_truth_and_storing_everything(graph):
    wiring = Wiring.of(graph)
    found = minimal_peak_trace(wiring, time.perf_counter() + NO_LIMIT)
    check(graph, wiring, found)
    assert found.peak_bytes <= store_all_trace(wiring).peak_bytes


def test_results_are_given_up_and_made_again_from_small_values():
    graph = heavy_results(3)
    wiring = Wiring.of(graph)
    start, truth = store_all_trace(wiring), smallest(graph)
    assert replay(wiring, start, truth).peak_bytes == truth == 65
    assert evict(wiring, start.sequence, truth).peak_bytes > truth


@thorough
@given(graphs(most_ops=7, most_values=9) | trainings(most_depth=3))
def test_programs_find_what_is_legal_and_prove_no_more_than_the_truth(graph):
    wiring = Wiring.of(graph)
    start = store_all_trace(wiring)
    lowest = lower(wiring, start, peak_bound(wiring).peak_bytes, time.perf_counter() + 2)
    check(graph, wiring, lowest.schedule)
    assert lowest.least_bytes <= smallest(graph)
    assert lowest.schedule.peak_bytes <= start.peak_bytes


def what_steps_miss() -> Graph:
    """Between its first run and the last, op 0 must run again, which no small step gains by."""
    sizes = {"a": 1, "b": 1, "c": 1, "d": 5, "e": 1, "f": 1, "g": 1, "h": 3}
    ops = (
        Op("0", (), ("a", "b"), 1.0),
        Op("1", ("b",), ("c", "d"), 1.0, 4, overwrites=(("b", "c"),)),
        Op("2", ("b", "d"), ("e",), 1.0, 1, overwrites=(("b", "e"),)),
        Op("3", ("b",), ("f",), 1.0, replayable=False, overwrites=(("b", "f"),)),
        Op("4", ("b",), ("g", "h"), 1.0, 4, overwrites=(("b", "g"),)),
    )
    values = tuple(Value(name, size) for name, size in sizes.items())
    return Graph(values, ops, frozenset(), frozenset({"h"}), None)


def test_programs_find_and_prove_what_steps_miss():
    graph = what_steps_miss()
    wiring = Wiring.of(graph)
    steps = minimal_peak_trace(wiring, time.perf_counter() + NO_LIMIT)
    found = smallest_budget(graph, limit_seconds=NO_LIMIT)
    assert steps.peak_bytes > smallest(graph) == found.peak_bytes == found.least_bytes
    assert simulate(graph, found.schedule).peak_bytes == found.peak_bytes


def test_on_small_graphs_programs_are_asked_in_a_short_time_too(monkeypatch):
    sizes = {"x": 1, "a": 1, "b": 1, "c": 1, "t": 2, "gc": 1, "gb": 1, "wb": 2, "ga": 1, "wa": 2}
    ops = (
        Op("fa", ("x",), ("a",), 1.0),
        Op("fb", ("a",), ("b",), 1.0),
        Op("fc", ("b",), ("c",), 1.0),
        Op("loss", ("c",), ("t",), 0.0, replayable=False),
        Op("bc", ("c", "t"), ("gc",), 1.0),
        Op("bb", ("b", "gc"), ("gb", "wb"), 1.0, overwrites=(("gc", "gb"),)),
        Op("ba", ("a", "gb"), ("ga", "wa"), 1.0, 2),
    )
    values = tuple(Value(name, size) for name, size in sizes.items())
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"ga", "wa", "wb"}), None)
    steps = minimal_peak_trace(Wiring.of(graph), time.perf_counter() + NO_LIMIT, floor_bytes=8)
    assert steps.peak_bytes == 9
    smallest_budget(graph)  # loads what solves programs
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    assert smallest_budget(graph, limit_seconds=0.5).peak_bytes == 8 == smallest(graph)


def test_ops_may_take_no_time():
    graph = what_steps_miss()
    graph = dataclasses.replace(
        graph, ops=tuple(dataclasses.replace(op, time=0.0) for op in graph.ops)
    )
    found = smallest_budget(graph, limit_seconds=NO_LIMIT)
    assert found.peak_bytes == smallest(graph)
    assert solve(graph, found.peak_bytes, solver="refine").peak_bytes == found.peak_bytes


def test_what_programs_prove_is_kept_where_no_schedule_is_lower():
    wiring = Wiring.of(what_steps_miss())
    best = lower(wiring, store_all_trace(wiring), 1, time.perf_counter() + NO_LIMIT)
    again = lower(wiring, best.schedule, 1, time.perf_counter() + NO_LIMIT)
    assert again.schedule.peak_bytes == best.schedule.peak_bytes == again.least_bytes


def test_many_heavy_results_come_to_the_bound():
    wiring = Wiring.of(heavy_results(40))
    found = minimal_peak_trace(wiring, time.perf_counter() + NO_LIMIT)
    assert found.peak_bytes <= 1.05 * bottleneck(wiring).peak_bytes


def test_at_a_deadline_that_is_over_the_start_is_returned():
    wiring = Wiring.of(gpt2(layers=4))
    start = store_all_trace(wiring)
    found = replay(wiring, start, 0, deadline=time.perf_counter())
    assert found.peak_bytes <= start.peak_bytes
    assert found.steps == start.steps


def test_sizes_near_64_bits_do_not_overflow():
    graph = heavy_results(3)
    scale = 2**61 // sum(v.size_bytes for v in graph.values)
    large = Graph(
        tuple(Value(v.name, v.size_bytes * scale) for v in graph.values),
        graph.ops, graph.resident, graph.results, graph.boundary,
    )  # fmt: skip
    wiring = Wiring.of(large)
    assert replay(wiring, store_all_trace(wiring), 65 * scale).peak_bytes == 65 * scale


def test_a_proof_that_a_schedule_refutes_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(
        "remat_solvers.minimal_peak.budget.regress", lambda *_: PeakBound(10**6, "wrong")
    )
    graph = heavy_results(2)
    found = smallest_budget(graph, limit_seconds=1.0)
    assert found.least_bytes == peak_bound(Wiring.of(graph)).peak_bytes <= found.peak_bytes
    assert "gave up" in caplog.text


def test_where_results_bind_no_op_is_named():
    wiring = Wiring.of(heavy_results(40))
    found = peak_bound(wiring)
    assert found.peak_bytes >= sum(wiring.size[wiring.results])
    assert found.op is None
