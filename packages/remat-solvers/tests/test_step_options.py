"""Options of a region: measured by the simulator, at the ends of what there is, bounded truly."""

import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.random_graphs import graphs
from solver_cases.regions import closed, fastest_within, least_kept, regions
from solver_cases.synthetic import gpt2

from remat_graph import (
    Compute,
    Footprint,
    Free,
    Graph,
    Op,
    Schedule,
    Stage,
    Value,
    reads_after_leaving,
    simulate,
)
from remat_graph.testing import unit_chain
from remat_solvers import InvalidProblem, UnknownSolver, solve, store_all
from remat_solvers.bounds.kept_bytes import KeptBytesProgram
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.search.descent import minimal_peak_trace
from remat_solvers.step import (
    ANY_BYTES,
    RegionBound,
    TimeStep,
    front_from_schedules,
    measure_option,
    refined_options,
    region_front,
    step_bound,
)
from remat_solvers.step.options import front_of

few = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
INF = float("inf")
# Of a graph with nothing after its boundary there is no half to plan.
ANY = regions() | graphs(7, 9).filter(lambda g: g.boundary_index + 1 < len(g.ops)).map(closed)


def by_hand() -> Graph:
    """Two activations of 10 and 4, an output of 2, a gradient of 3 that comes in."""
    values = (
        Value("x", 100), Value("a", 10), Value("b", 4), Value("y", 2), Value("t", 3),
        Value("gb", 5), Value("g", 1),
    )  # fmt: skip
    back = Stage.BACKWARD
    ops = (
        Op("fa", ("x",), ("a",), 1.0),
        Op("fb", ("a",), ("b",), 2.0, 7),
        Op("fy", ("b",), ("y",), 4.0, replayable=False),
        Op("loss", ("y",), ("t",), 0.0, 50, back, replayable=False),
        Op("bb", ("t", "b"), ("gb",), 8.0, stage=back),
        Op("ba", ("gb", "a"), ("g",), 16.0, stage=back),
    )
    return Graph(values, ops, frozenset({"x"}), frozenset({"y", "g"}), "loss")


def steps(text: str) -> Schedule:
    return Schedule(tuple(Free(s[1:]) if s[0] == "-" else Compute(s) for s in text.split()))


def check(graph, front):
    """What holds for every front."""
    assert front.options == front_of(front.options)
    for option in front.options:
        again = measure_option(graph, option.schedule, lower_bound=option.lower_bound)
        assert again == option
        assert option.time == simulate(graph, option.schedule).time
        assert graph.time * (1 - 1e-9) <= option.lower_bound <= option.time
        assert option.kept_bytes >= front.least_kept_bytes
        assert option.forward_bytes >= front.least_forward_bytes
        assert option.backward_bytes >= front.least_backward_bytes


def test_an_option_is_measured_as_added_up_by_hand():
    graph = by_hand()
    everything = measure_option(graph, store_all(graph))
    assert everything.kept_bytes == 10 + 4 + 2
    assert everything.forward_bytes == 10 + 4 + 7
    assert everything.backward_bytes == 10 + 4 + 2 + 3 + 5
    assert everything.time == 31.0
    late = measure_option(graph, steps("fa fb -a fy -b loss fa fb bb -t -b ba -gb -a"))
    assert late.kept_bytes == 2
    assert late.forward_bytes == 21
    assert late.backward_bytes == 2 + 3 + 10 + 4 + 7
    assert late.time == 34.0
    assert late.peak_bytes == 26


def test_a_graph_without_one_op_at_its_boundary_is_refused():
    chain = unit_chain(3)
    with pytest.raises(InvalidProblem, match="replayable"):
        region_front(chain)
    alone = Graph((Value("x", 1), Value("y", 1)), (Op("f", ("x",), ("y",), 1.0),), {"x"}, {"y"})
    with pytest.raises(InvalidProblem, match="no backward half"):
        measure_option(alone, store_all(alone))


@pytest.mark.parametrize("wrong", [{"points": 1}, {"most_bytes": 0}, {"limit_seconds": -1}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(InvalidProblem):
        region_front(by_hand(), **wrong)


def test_a_solver_that_is_not_there_is_named():
    graph = closed(gpt2(layers=1))
    with pytest.raises(UnknownSolver):
        region_front(graph, solver="nobody", limit_seconds=0)
    front = front_from_schedules(graph, [store_all(graph)])
    with pytest.raises(UnknownSolver):
        refined_options(front, kept_bytes=10**9, peak_bytes=10**9, solver="nobody")


@thorough
@given(ANY)
def test_the_least_that_is_kept_is_that_of_a_search(graph):
    found, proved = KeptBytesProgram(Wiring.of(graph)).least_bytes(5.0)
    assert proved <= least_kept(graph) == found


@thorough
@given(ANY, st.floats(0, 1))
def test_the_time_of_what_is_kept_is_that_of_a_search(graph, share):
    wiring = Wiring.of(graph)
    most = measure_option(graph, store_all(graph)).kept_bytes
    kept = int(share * most)
    truth = fastest_within(graph, kept, INF, INF)
    found = KeptBytesProgram(wiring).fastest(kept, 5.0)
    if truth is None:
        assert found is None
        return
    option = measure_option(graph, expand(wiring, found.sequence))
    assert option.kept_bytes <= kept
    assert option.time == pytest.approx(truth)
    assert truth * (1 - 1e-5) - 1e-6 <= found.lower_bound <= truth * (1 + 1e-12)


@few
@given(ANY)
def test_a_front_has_both_ends_and_true_bounds(graph):
    front = region_front(graph, points=4, limit_seconds=NO_LIMIT)
    check(graph, front)
    # Between the ends seconds decide.
    again = region_front(graph, points=4, limit_seconds=NO_LIMIT).options
    for end in (0, -1):
        assert again[end].kept_bytes == front.options[end].kept_bytes
    everything = measure_option(graph, store_all(graph))
    assert front.best().time == pytest.approx(everything.time)
    assert min(o.kept_bytes for o in front.options) == least_kept(graph)
    lowest = minimal_peak_trace(Wiring.of(graph), time.perf_counter() + 10).peak_bytes
    assert min(o.peak_bytes for o in front.options) <= lowest
    for option in front.options:
        for kept, peak in (
            (option.kept_bytes, option.peak_bytes),
            (option.kept_bytes, ANY_BYTES),
            (option.kept_bytes - 1, option.peak_bytes),
            (option.kept_bytes, option.peak_bytes - 1),
        ):
            truth = fastest_within(graph, kept, peak, peak)
            bound = front.bound(kept, peak)
            assert truth is None or bound <= truth * (1 + 1e-9)
        truth = fastest_within(
            graph, option.kept_bytes, option.forward_bytes, option.backward_bytes
        )
        assert option.lower_bound <= truth * (1 + 1e-9) <= option.time * (1 + 2e-9)


@few
@given(ANY, st.floats(0, 1), st.floats(0, 1))
def test_a_refined_front_has_the_fastest_within_the_box(graph, kept_share, peak_share):
    front = region_front(graph, points=2, limit_seconds=NO_LIMIT)
    everything = measure_option(graph, store_all(graph))
    kept = int(kept_share * everything.kept_bytes)
    peak = max(1, int(peak_share * everything.peak_bytes))
    refined = refined_options(front, kept_bytes=kept, peak_bytes=peak, limit_seconds=NO_LIMIT)
    check(graph, refined)
    truth = fastest_within(graph, kept, peak, peak)
    best = refined.best(kept, peak)
    if truth is None:
        assert best is None
    else:
        assert best.time == pytest.approx(truth)
        assert refined.bound(kept, peak) <= truth * (1 + 1e-9)
    for option in front.options:
        better = refined.best(option.kept_bytes, option.peak_bytes)
        assert better.time <= option.time * (1 + 1e-9)


def test_an_output_that_is_let_go_of_may_leave_no_room_to_spare():
    """What is kept with it, and the gradient that comes in, are together above the lowest peak."""
    back = Stage.BACKWARD
    values = (
        Value("x", 100), Value("a", 4), Value("b", 4), Value("y", 1000), Value("t", 1000),
        Value("gb", 4), Value("g", 4),
    )  # fmt: skip
    ops = (
        Op("fa", ("x",), ("a",), 1.0, 1500),
        Op("fb", ("a",), ("b",), 1.0),
        Op("fy", ("b",), ("y",), 1.0),
        Op("loss", ("y",), ("t",), 0.0, 0, back, replayable=False),
        Op("bb", ("t", "b"), ("gb",), 1.0, stage=back),
        Op("ba", ("gb", "a"), ("g",), 1.0, stage=back),
    )
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"g"}), "loss")
    front = region_front(graph, points=4, limit_seconds=NO_LIMIT)
    check(graph, front)
    lowest = min(front.options, key=lambda option: option.peak_bytes)
    assert lowest.peak_bytes < lowest.kept_bytes + 1000


def test_nothing_but_the_ends_peaks_above_what_is_asked():
    graph = closed(gpt2(layers=1))
    everything = measure_option(graph, store_all(graph))
    most = int(0.8 * everything.peak_bytes)
    front = region_front(graph, most_bytes=most, points=3, limit_seconds=NO_LIMIT)
    check(graph, front)
    over = [o for o in front.options if o.peak_bytes > most]
    assert all(o.kept_bytes == front.options[0].kept_bytes for o in over)
    assert any(o.peak_bytes <= most for o in front.options)
    assert everything.time not in [o.time for o in front.options]


@pytest.mark.sweep
def test_lower_peaks_are_found_among_those_that_keep_little():
    graph = closed(gpt2(layers=1))
    front = region_front(graph, points=8, limit_seconds=NO_LIMIT)
    check(graph, front)
    least = front.options[0].kept_bytes
    peaks = {o.peak_bytes for o in front.options if o.kept_bytes == least}
    assert len(peaks) > 1
    assert front.best(least, min(peaks)).time > front.best(least).time


def test_one_option_keeps_the_least_and_peaks_hardly_higher_than_the_lowest(monkeypatch):
    monkeypatch.setattr("remat_solvers.step.region._SMALLEST_SECONDS", 3.0)  # on a busy machine
    graph = closed(gpt2(layers=2))
    front = region_front(graph, points=2, limit_seconds=NO_LIMIT)
    least, lowest = front.options[0].kept_bytes, min(o.peak_bytes for o in front.options)
    assert front.options[0].peak_bytes < 1.1 * lowest
    assert min(o.peak_bytes for o in front.options if o.kept_bytes > least) < 1.1 * lowest


def test_a_bound_is_infinite_where_nothing_fits_and_else_at_least_all_once():
    graph = by_hand()
    front = region_front(graph, points=2)
    assert front.bound(1) == math.inf
    assert front.bound(peak_bytes=20) == math.inf
    assert front.bound() == graph.time
    raised = front.with_([], [RegionBound(2, ANY_BYTES, 33.5)])
    assert raised.bound(2) == max(front.bound(2), 33.5)
    assert raised.bound(16) == graph.time


def test_any_solver_plans_a_region():
    graph = closed(gpt2(layers=1))
    front = region_front(graph, solver="auto", points=2, limit_seconds=1)
    check(graph, front)


@pytest.mark.parametrize("of_other_sizes", [False, True])
def test_the_search_begins_with_what_is_known(of_other_sizes):
    graph = closed(gpt2(layers=1))
    known = region_front(graph, points=4, limit_seconds=0.5).options
    if of_other_sizes:
        schedules = [Footprint(graph, option.schedule) for option in known]
        twice = tuple(replace(value, size_bytes=2 * value.size_bytes) for value in graph.values)
        graph = replace(graph, values=twice)
    else:
        schedules = [option.schedule for option in known]
    found = [measure_option(graph, option.schedule) for option in known]

    def has_all(front):
        best = [front.best(option.kept_bytes, option.peak_bytes) for option in found]
        pairs = zip(best, found, strict=True)
        return all(one is not None and one.time <= other.time for one, other in pairs)

    front = region_front(graph, points=2, limit_seconds=0, known=schedules)
    check(graph, front)
    assert has_all(front)
    assert not has_all(region_front(graph, points=2, limit_seconds=0))


def test_without_time_there_are_the_options_that_need_none():
    graph = closed(gpt2(layers=2))
    front = region_front(graph, limit_seconds=0)
    check(graph, front)
    assert front.best().time == pytest.approx(graph.time)


def test_one_region_alone_is_as_fast_as_planned_plainly():
    graph = by_hand()
    front = region_front(graph)
    for budget in (72, 68, 60, 59, 55):
        plain = solve(graph, budget)
        room = budget - 3 - 50
        front = refined_options(front, kept_bytes=room, peak_bytes=budget)
        assert front.best(room, budget).time == plain.time


def test_what_runs_again_needs_what_it_reads():
    """Of a source that runs once, either it or what follows from it must be kept."""
    values = (Value("x", 9), Value("n", 1), Value("v", 10), Value("t", 1), Value("g", 1))
    ops = (
        Op("fn", ("x",), ("n",), 1.0, replayable=False),
        Op("fv", ("n",), ("v",), 2.0),
        Op("loss", (), ("t",), 0.0, stage=Stage.BACKWARD, replayable=False),
        Op("b", ("v", "t"), ("g",), 1.0, stage=Stage.BACKWARD),
    )
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"g"}), "loss")
    assert KeptBytesProgram(Wiring.of(graph)).least_bytes(5.0) == (1, 1)
    front = region_front(graph)
    assert [(o.kept_bytes, o.time) for o in front.options] == [(1, 6.0), (10, 4.0)]
    assert front.bound(0) == math.inf
    assert front.bound(9) == pytest.approx(6.0)
    assert front.bound(10) == 4.0


def test_a_schedule_that_peaks_in_its_forward_half_is_not_charged_for_it_in_the_backward():
    graph = by_hand()
    ops = (graph.ops[0], Op("fb", ("a",), ("b",), 2.0, 100), *graph.ops[2:])
    graph = Graph(graph.values, ops, graph.resident, graph.results, graph.boundary)
    front = region_front(graph, points=2).with_([], [RegionBound(ANY_BYTES, 50, math.inf)])
    assert step_bound([front], [1], [TimeStep(0, (), (0, "backward"))], 40) == graph.time
    assert step_bound([front], [1], [TimeStep(0, (), (0, "forward"))], 40) == math.inf


def test_the_first_region_of_a_process_does_not_pay_for_an_import():
    """CVXPY takes about as long to import as a small region has in all."""
    code = """
import dataclasses
import sys

from remat_graph.testing import unit_chain
from remat_solvers.step import region_front
from remat_solvers.core.problem import Limit

begin = Limit.starting_now
loaded = []
Limit.starting_now = lambda *args, **kw: loaded.append("cvxpy" in sys.modules) or begin(*args, **kw)
chain = unit_chain(3)
ops = (dataclasses.replace(op, replayable=op.name != "loss") for op in chain.ops)
region_front(dataclasses.replace(chain, ops=tuple(ops)), limit_seconds=1.0)
assert loaded and all(loaded), loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_option_lets_gradients_leave_behind_all_that_reads_their_parameter():
    ops = (
        Op("f", ("x", "w"), ("y",), 1.0),
        Op("loss", ("y",), ("t",), 0.0, stage=Stage.BACKWARD, replayable=False),
        Op("g", ("x", "t"), ("d",), 1.0, stage=Stage.BACKWARD),
        Op("leave@w", ("d", "w"), (), 0.0, stage=Stage.BACKWARD, replayable=False),
        Op("h", ("x", "y", "t"), ("z",), 1.0, stage=Stage.BACKWARD),
    )
    values = (*(Value(name, 10) for name in ("x", "w", "y", "t", "d")), Value("z", 1))
    graph = Graph(values, ops, frozenset({"x", "w"}), frozenset({"z"}), "loss")
    first = [Compute("f"), Compute("loss"), Free("y"), Compute("g"), Compute("leave@w"), Free("d")]
    again = [Compute("f"), Compute("h"), Free("y"), Free("t")]
    early = Schedule((*first, *again))
    option = measure_option(graph, early)
    assert reads_after_leaving(graph, early)
    assert reads_after_leaving(graph, option.schedule) is None
    assert option.backward_bytes == 30  # t, d and y, which f makes again
    kept = Schedule((*first[:2], *first[3:], Compute("h"), Free("y"), Free("t")))
    assert measure_option(graph, kept).schedule is kept
