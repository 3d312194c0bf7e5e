"""Values that can be made in several ways: what `refine` finds and tells of, and `auto` by it."""

from dataclasses import replace
from unittest import mock

import pytest
from solver_cases import NO_LIMIT
from solver_cases.alternatives import (
    convolutions,
    packable,
)

from remat_graph import Compute, Status, simulate
from remat_solvers import (
    InvalidProblem,
    Limit,
    Problem,
    UnsuitableSolver,
    smallest_budget,
    solve,
    store_all,
    tradeoff,
)
from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.wiring import Wiring
from remat_solvers.refine import Refine
from remat_solvers.refine.heuristics import Heuristics
from remat_solvers.search.selection import arrange, first_choices
from remat_solvers.step import region_front


@pytest.mark.sweep
def test_gradients_of_convolutions_are_planned_by_their_halves():
    """The best makers are no kind that is the same everywhere: where memory binds, halves."""
    graph = convolutions()
    alone = graph.without_alternatives()
    peak = simulate(alone, store_all(alone)).peak_bytes
    found = Refine().solve(
        Problem(graph, int(0.9 * peak)), Limit.starting_now(NO_LIMIT), lambda _: None
    )
    assert found.status is Status.OPTIMAL
    assert found.time < 1.01 * alone.time
    low = int(0.75 * peak)
    assert low < smallest_budget(alone, limit_seconds=0.5).least_bytes

    def end_at_the_first(progress):
        if progress.incumbent is not None:
            raise KeyboardInterrupt

    options = {"solver": "refine", "progress": end_at_the_first, "keep_best": True}
    assert solve(graph, low, limit_seconds=NO_LIMIT, **options).peak_bytes <= low


@pytest.mark.sweep
def test_a_given_schedule_over_alternatives_is_where_it_begins():
    graph = convolutions()
    alone = graph.without_alternatives()
    budget = int(0.9 * simulate(alone, store_all(alone)).peak_bytes)
    known = Refine().solve(Problem(graph, budget), Limit.starting_now(NO_LIMIT), lambda _: None)
    problem = Problem(graph, budget, start=known.schedule)
    again = Refine().solve(problem, Limit.starting_now(0.05), lambda _: None)
    assert again.time <= known.time * (1 + 1e-9)


def test_what_is_found_without_alternatives_is_told_but_not_what_is_proved_of_it():
    graph, budget, told = packable(), 330, []
    with mock.patch("remat_solvers.refine.rounds.Rounds.quick_start"):
        found = Refine().solve(Problem(graph, budget), Limit.starting_now(NO_LIMIT), told.append)
    alone = graph.without_alternatives()
    first = next(progress for progress in told if progress.incumbent is not None)
    assert simulate(alone, first.incumbent()).peak_bytes <= budget
    assert first.lower_bound is None
    assert first.incumbent_time > found.time
    assert found.lower_bound > 0
    assert all(p.lower_bound <= found.time for p in told if p.lower_bound is not None)
    assert [p.seconds for p in told] == sorted(p.seconds for p in told)


def test_what_is_found_at_a_glance_is_told_first_and_nothing_slower_after_it():
    graph, budget, told = packable(), 330, []
    found = Refine().solve(Problem(graph, budget), Limit.starting_now(30.0), told.append)
    assert [progress.message for progress in told[:2]] == ["first schedules", "quick start"]
    assert simulate(graph, told[0].incumbent()).time == told[0].incumbent_time
    assert told[0].lower_bound is None
    times = [progress.incumbent_time for progress in told]
    assert times == sorted(times, reverse=True)
    assert times[-1] == found.time


def test_what_is_found_with_the_implementations_of_a_schedule_is_told_at_once():
    graph, told = convolutions(), []
    budget = int(0.8 * simulate(graph, store_all(graph)).peak_bytes)

    def report(progress):
        told.append(progress)
        if progress.message == "with the implementations of a schedule":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Refine().solve(Problem(graph, budget), Limit.starting_now(NO_LIMIT), report)
    assert told[-1].incumbent_time < told[-2].incumbent_time
    timeline = simulate(graph, told[-1].incumbent())
    assert timeline.peak_bytes <= budget
    assert timeline.time == pytest.approx(told[-1].incumbent_time)


def test_what_stores_everything_is_built_once_and_out_of_time_repaired_until_it_fits():
    graph = packable(60)
    budget = int(0.4 * simulate(graph, store_all(graph)).peak_bytes)
    begun = "remat_solvers.refine.heuristics.Heuristics._repair_unfolded"
    with (
        mock.patch("remat_solvers.refine.rounds.arrange", wraps=arrange) as arranged,
        mock.patch(begun, autospec=True, side_effect=Heuristics._repair_unfolded) as repairs,
    ):
        found = Refine().solve(Problem(graph, budget), Limit.starting_now(0.0), lambda _: None)
    assert simulate(graph, found.schedule).peak_bytes <= budget
    wiring = Wiring.of(graph)
    assert arranged.call_count == len(list(first_choices(wiring, Alternatives.of(wiring))))
    assert repairs.call_count <= arranged.call_count


@pytest.mark.sweep
def test_auto_plans_with_what_is_packed_where_that_is_faster_than_recomputing():
    graph = packable()
    budget = 330
    alone = solve(graph.without_alternatives(), budget, limit_seconds=3)
    found = solve(graph, budget, limit_seconds=3)
    assert [trial.solver for trial in found.trials] == ["store-all", "refine"]
    assert found.time < alone.time - 4
    assert found.lower_bound >= graph.time
    assert any(step == Compute("mask1") for step in found.schedule)


def test_storing_everything_takes_the_fastest_ways_and_is_then_optimal():
    graph = packable(3)
    fast = replace(graph.ops[0], name="fast", time=1.0, workspace_bytes=50, alternative_of="f0")
    graph = replace(graph, ops=(graph.ops[0], fast, *graph.ops[1:]))
    found = solve(graph, 10**6)
    assert (found.solver, found.status) == ("store-all", Status.OPTIMAL)
    assert found.time == graph.time - 4
    assert found.schedule.steps[0] == Compute("fast")


def test_solvers_that_do_not_choose_say_so():
    graph = packable(3)
    with pytest.raises(UnsuitableSolver, match=r"without_alternatives\(\)"):
        solve(graph, 10**6, solver="checkmate")
    assert solve(graph.without_alternatives(), 10**6, solver="checkmate").schedule is not None
    with pytest.raises(InvalidProblem, match=r"without_alternatives\(\)"):
        region_front(graph)


@pytest.mark.sweep
def test_the_curve_goes_below_the_time_of_what_is_owed():
    graph = packable(4)
    fast = replace(graph.ops[0], name="fast", time=1.0, workspace_bytes=50, alternative_of="f0")
    graph = replace(graph, ops=(graph.ops[0], fast, *graph.ops[1:]))
    curve = tradeoff(graph, points=3, limit_seconds=6)
    assert curve.store_all_time == curve.points[-1].solution.time == graph.time - 4
    assert all(p.lower_bound <= p.solution.time for p in curve.points)
    assert (
        curve.points[0].solution.time
        < solve(
            graph.without_alternatives(), curve.points[0].budget_bytes + 70, limit_seconds=3
        ).time
    )


def test_hardly_any_time_is_enough_for_an_answer():
    graph = packable(40)
    budget = int(0.8 * simulate(graph, store_all(graph)).peak_bytes)
    for seconds in (0.0, 1e-3, 0.02):
        found = solve(graph, budget, solver="refine", limit_seconds=seconds)
        assert simulate(graph, found.schedule).peak_bytes <= budget
