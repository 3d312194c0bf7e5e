"""The curve: monotone, checked, never above the truth, and made of fewer solves than points."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.curves import CHAIN, PEAK, answered_by, check, nothing, repaired
from solver_cases.random_graphs import graphs, trainings
from solver_cases.smallest_budgets import smallest

from remat_graph import Graph, Op, Schedule, Solution, Status, Value, simulate
from remat_solvers import (
    BrokenSolver,
    UnsuitableSolver,
    smallest_budget,
    solve,
    store_all,
    tradeoff,
)
from remat_solvers.queries import curve
from remat_solvers.testing.brute_force import fastest

PERMISSIVE = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def fake(monkeypatch):
    return functools.partial(answered_by, monkeypatch)


@PERMISSIVE
@given(graphs(6, 7) | trainings(3), st.integers(2, 6))
def test_any_curve_is_monotone_and_true(graph, points):
    found = tradeoff(graph, points=points, limit_seconds=20)
    check(graph, found)
    assert found.least_bytes <= max(1, smallest(graph))
    for point in found.points:
        truth = fastest(graph, point.budget_bytes)
        if point.solution is None:
            assert not point.proved_infeasible or truth is None
        else:
            assert point.lower_bound <= truth * (1 + 1e-9) <= point.solution.time * (1 + 2e-9)
            if point.status is Status.OPTIMAL:
                assert point.solution.time <= truth * (1 + 2e-6)


@PERMISSIVE
@given(graphs() | trainings(6), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5),
       st.sampled_from(["xla-greedy", "tw-remat", "store-all", "last-node"]))  # fmt: skip
def test_any_solver_and_any_shares(graph, shares, solver):
    try:
        found = tradeoff(graph, budgets=shares, solver=solver, limit_seconds=5)
    except UnsuitableSolver:
        return
    check(graph, found)


def test_both_ends_are_the_known_ones():
    found = tradeoff(CHAIN, points=5)
    first, *_, last = found.points
    assert len(found.points) == 5
    assert first.budget_bytes == smallest_budget(CHAIN).peak_bytes
    assert last.budget_bytes == last.solution.peak_bytes == PEAK == found.store_all_peak_bytes
    assert last.solution.time == CHAIN.time == found.store_all_time
    assert all(point.status is Status.OPTIMAL for point in found.points)
    assert found.overhead(last.solution.time) == 0.0 < found.overhead(first.solution.time)
    steps = {b.budget_bytes - a.budget_bytes for a, b in itertools.pairwise(found.points)}
    assert max(steps) - min(steps) <= 1


def test_each_point_is_as_good_as_alone():
    for point in tradeoff(CHAIN, points=4).points:
        alone = solve(CHAIN, point.budget_bytes)
        assert point.solution.time == alone.time
        assert point.status is alone.status is Status.OPTIMAL


def test_ends_and_what_is_known_not_to_fit_need_no_solve(fake):
    solver = fake(repaired)
    least = smallest_budget(CHAIN).least_bytes
    found = tradeoff(CHAIN, budgets=[1, least - 1, PEAK, 2 * PEAK], solver="fake")
    check(CHAIN, found)
    assert not solver.asked
    assert [p.status for p in found.points] == [Status.INFEASIBLE] * 2 + [Status.OPTIMAL] * 2


def test_a_known_schedule_near_the_bound_needs_no_solve(fake):
    """The schedule of the largest budget is proved optimal, and fits the others too."""
    schedule = repaired(Problemlike(CHAIN, PEAK - 30)).schedule
    timeline = simulate(CHAIN, schedule)

    def answer(problem):
        return Solution(Status.OPTIMAL, schedule, 0.0, 0, timeline.time, "fake", 0.0)

    solver = fake(answer)
    budgets = [timeline.peak_bytes, PEAK - 20, PEAK - 10]
    found = tradeoff(CHAIN, budgets=budgets, solver="fake")
    check(CHAIN, found)
    assert [budget for budget, _, _ in solver.asked] == [PEAK - 10]
    assert {p.solution.time for p in found.points} == {timeline.time}
    assert {p.status for p in found.points} == {Status.OPTIMAL}


def test_a_minimal_peak_that_a_schedule_refutes_is_given_up(monkeypatch):
    smallest = smallest_budget(CHAIN)
    wrong = dataclasses.replace(smallest, least_bytes=smallest.peak_bytes + 1)
    monkeypatch.setattr(curve, "smallest_budget", lambda *_, **__: wrong)
    found = tradeoff(CHAIN, points=3)
    check(CHAIN, found)
    assert "claims that nothing fits" in found.doubt


class Problemlike:
    def __init__(self, graph, budget_bytes):
        self.graph, self.budget_bytes = graph, budget_bytes


def test_the_schedule_of_a_smaller_budget_serves_where_nothing_was_found(fake):
    lucky = PEAK - 30

    def answer(problem):
        return repaired(problem) if problem.budget_bytes == lucky else nothing(problem)

    solver = fake(answer)
    found = tradeoff(CHAIN, budgets=[lucky, PEAK - 20, PEAK - 10], solver="fake")
    check(CHAIN, found)
    assert [budget for budget, _, _ in solver.asked] == [PEAK - 10, PEAK - 20, lucky]
    served = {p.solution.schedule for p in found.points}
    assert served == {repaired(Problemlike(CHAIN, lucky)).schedule}
    assert {p.solution.solver for p in found.points} == {"fake"}


def test_where_the_solver_finds_nothing_the_smallest_schedule_serves(fake):
    fake(nothing)
    found = tradeoff(CHAIN, points=3, solver="fake")
    check(CHAIN, found)
    assert [p.solution.solver for p in found.points] == [
        "smallest-budget", "smallest-budget", "store-all",
    ]  # fmt: skip


def test_a_bound_holds_at_smaller_budgets_only(fake):
    bound = CHAIN.time + 0.5

    def answer(problem):
        return nothing(problem, bound=bound if problem.budget_bytes == PEAK - 20 else None)

    fake(answer)
    found = tradeoff(CHAIN, budgets=[PEAK - 30, PEAK - 20, PEAK - 10], solver="fake")
    check(CHAIN, found)
    assert [p.lower_bound for p in found.points] == [bound, bound, CHAIN.time]


def test_infeasibility_holds_at_smaller_budgets(fake, monkeypatch):
    def blind(graph, limit_seconds):
        return type(smallest_budget(graph))(PEAK, store_all(graph), 1, None)

    monkeypatch.setattr(curve, "smallest_budget", blind)
    solver = fake(lambda problem: nothing(problem, Status.INFEASIBLE))
    found = tradeoff(CHAIN, budgets=[1, 2, 3], solver="fake")
    check(CHAIN, found)
    assert [budget for budget, _, _ in solver.asked] == [3]
    assert all(p.proved_infeasible for p in found.points)
    assert found.least_bytes == 4


def test_the_schedule_of_the_next_larger_budget_is_handed_on(fake):
    made = []

    def answer(problem):
        made.append(repaired(problem))
        return made[-1]

    solver = fake(answer)
    tradeoff(CHAIN, budgets=[PEAK - 30, PEAK - 20, PEAK - 10], solver="fake")
    starts = [start for _, _, start in solver.asked]
    assert starts == [store_all(CHAIN), made[0].schedule, made[1].schedule]


def test_what_fits_is_handed_on_where_little_less_does(fake):
    solver = fake(repaired)
    least = smallest_budget(CHAIN)
    tradeoff(CHAIN, budgets=[least.peak_bytes, 2 * least.peak_bytes], solver="fake")
    (_, _, above), (_, _, fitting) = solver.asked
    assert above == store_all(CHAIN)
    assert simulate(CHAIN, fitting).peak_bytes <= least.peak_bytes


def test_unused_time_passes_on(fake):
    solver = fake(repaired)
    tradeoff(CHAIN, budgets=[PEAK - 30, PEAK - 20, PEAK - 10], solver="fake", limit_seconds=3000)
    seconds = [limit for _, limit, _ in solver.asked]
    assert seconds == sorted(seconds)
    assert 900 < seconds[0] <= 1000
    assert 2700 < seconds[-1] <= 3000
    solver.asked.clear()
    tradeoff(CHAIN, budgets=[PEAK - 10], solver="fake")
    assert [limit for _, limit, _ in solver.asked] == [15.0]


def test_without_time_there_is_still_a_curve(fake):
    solver = fake(repaired)
    reports = []
    budgets = [1, PEAK - 10, PEAK]
    found = tradeoff(
        CHAIN, budgets=budgets, solver="fake", limit_seconds=0, progress=reports.append
    )
    check(CHAIN, found)
    assert not solver.asked
    assert [report.round for report in reports] == [1, 2, 3]
    assert found.points[0].proved_infeasible
    assert found.points[-1].status is Status.OPTIMAL


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda p: nothing(p, bound=1e9), "claims the bound"),
        (lambda p: nothing(p, Status.INFEASIBLE), "claims that nothing fits"),
    ],
)
def test_a_solver_that_a_schedule_contradicts_is_broken(fake, answer, message):
    fake(answer)
    with pytest.raises(BrokenSolver, match=message):
        tradeoff(CHAIN, points=3, solver="fake")


def test_a_schedule_in_an_order_of_its_own_contradicts_nobody(fake):
    values = (Value("x", 1), Value("a", 4), Value("b", 1), Value("c", 1), Value("d", 1))
    ops = (
        Op("big", ("x",), ("a",), 2.0),
        Op("other", ("x",), ("b",), 1.0, workspace_bytes=9),
        Op("read", ("a",), ("c",), 1.0),
        Op("last", ("b", "c"), ("d",), 1.0),
    )
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"d"}))
    reordered = Graph(values, (ops[1], ops[0], ops[2], ops[3]), graph.resident, graph.results)
    schedule: Schedule = store_all(reordered)
    fits = simulate(graph, schedule)
    stored = simulate(graph, store_all(graph))
    assert fits.peak_bytes < stored.peak_bytes
    truth = fastest(graph, fits.peak_bytes)
    assert truth > fits.time

    def answer(problem):
        return Solution(Status.FEASIBLE, schedule, 0.0, 0, None, "fake", 0.0)

    solver = fake(answer)
    found = tradeoff(graph, budgets=[fits.peak_bytes], solver="fake")
    check(graph, found)
    assert found.points[0].solution.time == fits.time
    solver.answer = lambda problem: nothing(problem, bound=truth)
    assert tradeoff(graph, budgets=[fits.peak_bytes], solver="fake").points[0].lower_bound == truth


def test_budgets_are_sorted_counted_once_and_mixed():
    found = tradeoff(CHAIN, budgets=[PEAK, 1.0, np.int64(5 * PEAK), 1, np.float64(0.99), 1])
    check(CHAIN, found)
    sizes = [point.budget_bytes for point in found.points]
    assert sizes == [1, int(0.99 * PEAK), PEAK, 5 * PEAK]


def test_a_graph_with_nothing_to_trade_has_one_point():
    values = (Value("x", 1), Value("a", 7))
    one = Graph(values, (Op("f", ("x",), ("a",), 1.0),), frozenset({"x"}), frozenset({"a"}))
    for graph, budget in [(one, 7), (Graph((), (), frozenset(), frozenset()), 1)]:
        found = tradeoff(graph)
        check(graph, found)
        (point,) = found.points
        assert (point.budget_bytes, point.status) == (budget, Status.OPTIMAL)
        assert found.overhead(point.solution.time) == 0.0
    assert tradeoff(one, budgets=[6]).points[0].proved_infeasible
