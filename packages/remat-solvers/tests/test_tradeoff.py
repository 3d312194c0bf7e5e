"""The curve: monotone, checked, never above the truth, and made of fewer solves than points."""

import dataclasses
import importlib
import itertools
import math
from concurrent.futures import Executor, Future

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.random_graphs import graphs, trainings
from solver_cases.smallest_budgets import smallest

from remat_graph import Graph, Op, Schedule, Solution, Status, Value, simulate
from remat_graph.testing import unit_chain
from remat_solvers import (
    BrokenSolver,
    InvalidProblem,
    UnknownSolver,
    UnsuitableSolver,
    WorkerDied,
    max_batch_size,
    smallest_budget,
    solve,
    store_all,
    tradeoff,
    with_batch,
)
from remat_solvers.core.store_all import StoreAll
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.published.rotor import Rotor
from remat_solvers.queries import curve
from remat_solvers.queries import tradeoff as tradeoff_module
from remat_solvers.registry import Chosen
from remat_solvers.search.evict import evict
from remat_solvers.testing.brute_force import fastest

# By name: `remat_solvers.solve` is the function.
ORIGIN = "nowhere 0.0"
SOLVE = importlib.import_module("remat_solvers.solve")
CHAIN = with_batch(unit_chain(6), 10)
PEAK = simulate(CHAIN, store_all(CHAIN)).peak_bytes
PERMISSIVE = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


def check(graph, found):
    """What holds for every curve."""
    budgets = [point.budget_bytes for point in found.points]
    assert budgets == sorted(set(budgets))
    for point in found.points:
        solution = point.solution
        if solution is None:
            assert point.status is (Status.INFEASIBLE if point.proved_infeasible else Status.LIMIT)
            assert (point.lower_bound is None) == point.proved_infeasible
            continue
        assert not point.proved_infeasible
        timeline = simulate(graph, solution.schedule)
        assert timeline.peak_bytes == solution.peak_bytes <= point.budget_bytes
        assert solution.time == timeline.time >= point.lower_bound == solution.lower_bound
        assert solution.peak_bytes >= found.smallest_bytes
    times = [math.inf if p.solution is None else p.solution.time for p in found.points]
    bounds = [math.inf if p.lower_bound is None else p.lower_bound for p in found.points]
    assert times == sorted(times, reverse=True)
    assert bounds == sorted(bounds, reverse=True)
    assert found.least_bytes <= found.smallest_bytes <= found.store_all_peak_bytes


class Fake(StoreAll):
    """Answers by a function of the problem, and remembers what it was asked."""

    name = "fake"

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def solve(self, problem, limit, report):
        self.asked.append((problem.budget_bytes, limit.seconds, problem.start))
        return self.answer(problem)


@pytest.fixture
def fake(monkeypatch):
    def make(answer):
        made = Fake(answer)
        for module in (SOLVE, tradeoff_module, curve):
            monkeypatch.setattr(
                module, "resolve_solver", lambda name: Chosen(made, name, ORIGIN, None)
            )
        return made

    return make


def nothing(problem, status=Status.LIMIT, bound=None):
    return Solution(status, None, math.inf, 0, bound, "fake", 0.0)


def repaired(problem, bound=None):
    """Some schedule that fits, or nothing."""
    wiring = Wiring.of(problem.graph)
    found = evict(wiring, np.arange(wiring.op_count), problem.budget_bytes)
    if found.peak_bytes > problem.budget_bytes:
        return nothing(problem)
    schedule = expand(wiring, found.sequence)
    return Solution(Status.FEASIBLE, schedule, 0.0, 0, bound, "fake", 0.0)


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


@pytest.mark.parametrize("points", [1, 0, -3, 2.5, True, "8"])
def test_points_that_are_no_curve_are_refused(points):
    with pytest.raises(InvalidProblem, match="points="):
        tradeoff(CHAIN, points=points)


@pytest.mark.parametrize(
    "budgets",
    [[], (), "", [0], [-1], [0.0], [-0.5], [1.5], [math.nan], [math.inf], [True], ["8GiB"], [None],
     "50%", [0.5, 0]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_budget_is_refused(budgets):
    with pytest.raises(InvalidProblem, match="budget"):
        tradeoff(CHAIN, budgets=budgets)


def test_what_else_is_refused_before_work(fake, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("work was done")

    with monkeypatch.context() as patch:
        patch.setattr(curve, "smallest_budget", never)
        with pytest.raises(UnknownSolver):
            tradeoff(CHAIN, solver="refined")
        with pytest.raises(InvalidProblem, match="limit_seconds"):
            tradeoff(CHAIN, limit_seconds=-1)
    fake(repaired).needs_hierarchy = True
    with pytest.raises(UnsuitableSolver, match="hierarchy"):
        tradeoff(CHAIN, solver="fake", budgets=[PEAK - 10])


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


def test_progress_after_every_point():
    reports = []
    found = tradeoff(CHAIN, points=4, progress=reports.append)
    done = [report for report in reports if report.message.startswith(f"{report.round} of 4, ")]
    assert [report.round for report in done] == [1, 2, 3, 4]
    assert "optimal" in done[0].message
    assert any(report.solver == "refine" and "of 4: " in report.message for report in reports)
    assert done[-1].incumbent_time == found.points[0].solution.time


def test_what_the_progress_raises_is_raised(fake):
    fake(repaired)

    def full(report):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        tradeoff(CHAIN, progress=full)


def test_ctrl_c_is_raised(fake):
    def answer(problem):
        raise KeyboardInterrupt

    fake(answer)
    with pytest.raises(KeyboardInterrupt):
        tradeoff(CHAIN, solver="fake")


class Recorded(Executor):
    """Runs at once, with a number of workers; records what it was given."""

    def __init__(self, workers=None):
        self.calls = []
        if workers is not None:
            self._max_workers = workers

    def submit(self, function, /, *arguments):
        self.calls.append(arguments)
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.mark.parametrize("workers", [None, 1, 2, 3, 50])
def test_the_executor_gives_the_same_kind_of_curve(workers):
    executor = Recorded(workers)
    here = tradeoff(CHAIN, points=5)
    found = tradeoff(CHAIN, points=5, executor=executor)
    check(CHAIN, found)
    assert [(p.budget_bytes, p.solution.time) for p in found.points] == [
        (p.budget_bytes, p.solution.time) for p in here.points
    ]
    assert 1 <= len(executor.calls) <= 4


def test_the_time_of_an_executor_is_shared_by_rounds(fake):
    solver = fake(nothing)
    budgets = list(range(PEAK - 40, PEAK, 10))
    tradeoff(CHAIN, budgets=budgets, solver="fake", executor=Recorded(2), limit_seconds=1000)
    seconds = [limit for _, limit, _ in solver.asked]
    assert len(seconds) == 4
    assert all(400 < s <= 500 for s in seconds[:2])
    assert all(900 < s <= 1000 for s in seconds[2:])


def test_an_object_is_asked_in_processes_too(processes):
    found = tradeoff(CHAIN, points=3, solver=Rotor(slots=40), limit_seconds=6, executor=processes)
    assert found.solver == "rotor(slots=40)"
    asked = {point.solution.solver for point in found.points}
    assert asked <= {"rotor(slots=40)", "store-all", "smallest-budget"}
    middle = found.points[1].budget_bytes
    assert solve(CHAIN, middle, solver=Rotor(slots=40)).time >= found.points[1].solution.time
    assert max_batch_size(CHAIN, 60, solver=Rotor(slots=40)).batch_size >= 1


def test_a_pool_of_processes(processes):
    found = tradeoff(CHAIN, points=4, executor=processes)
    check(CHAIN, found)
    assert all(point.status is Status.OPTIMAL for point in found.points)


def test_an_executor_that_loses_a_budget_says_which():
    class Cancelling(Recorded):
        def submit(self, function, /, *arguments):
            future = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    with pytest.raises(WorkerDied, match=rf"budget of {PEAK - 10} bytes"):
        tradeoff(CHAIN, budgets=[PEAK - 10], executor=Cancelling())
