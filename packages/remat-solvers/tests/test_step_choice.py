"""The choice of options under one budget: the best of all combinations, never over the budget."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.regions import closed, regions
from solver_cases.synthetic import gpt2

from remat_graph import Schedule, Solution, Status
from remat_solvers import BrokenSolver, BudgetTooSmall, InvalidProblem, solve, store_all
from remat_solvers.core import milp, trust
from remat_solvers.core.milp import Answer, Outcome
from remat_solvers.core.store_all import StoreAll
from remat_solvers.step import (
    ANY_BYTES,
    RegionBound,
    RegionOption,
    StepTooLarge,
    TimeStep,
    choose,
    measure_option,
    refined_options,
    region_front,
    step_bound,
)
from remat_solvers.step.table import Table

few = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
NOTHING = Schedule(())


def option(kept, forward, backward, time):
    return RegionOption(NOTHING, kept, forward, backward, float(time), None)


def nested(count, fixed=0):
    """Moments of regions that run one after another, and their backwards in reverse."""
    return [
        TimeStep(fixed, tuple((before, 1) for before in range(region)), (region, half))
        for half in ("forward", "backward")
        for region in range(count)
    ]


def held(options, moment, indices):
    total = moment.fixed_bytes
    total += sum(count * options[r][indices[r]].kept_bytes for r, count in moment.live)
    if moment.running is not None:
        region, half = moment.running
        chosen = options[region][indices[region]]
        total += chosen.forward_bytes if half == "forward" else chosen.backward_bytes
    return total


def peak(options, moments, indices):
    return max((held(options, moment, indices) for moment in moments), default=0)


def step_time(options, calls, indices):
    return sum(n * row[i].time for n, row, i in zip(calls, options, indices, strict=True))


def combinations(options):
    return itertools.product(*(range(len(row)) for row in options))


@st.composite
def steps(draw):
    """Up to four regions of up to four options, and any moments."""
    sizes = st.integers(0, 30)
    options = [
        [
            option(*(draw(sizes) for _ in range(3)), draw(st.integers(0, 20)))
            for _ in range(draw(st.integers(1, 4)))
        ]
        for _ in range(draw(st.integers(1, 4)))
    ]
    count = len(options)
    calls = [draw(st.integers(1, 3)) for _ in options]
    some = st.integers(0, count - 1)
    moments = [
        TimeStep(
            draw(st.integers(0, 10)),
            tuple(
                (region, draw(st.integers(0, 3)))
                for region in draw(st.lists(some, max_size=count, unique=True))
            ),
            draw(st.none() | st.tuples(some, st.sampled_from(["forward", "backward"]))),
        )
        for _ in range(draw(st.integers(0, 6)))
    ]
    return options, calls, [*moments, *nested(count)] if draw(st.booleans()) else moments


@thorough
@given(steps(), st.integers(1, 150))
def test_the_choice_is_the_best_of_all_combinations(step, budget):
    options, calls, moments = step
    fitting = [i for i in combinations(options) if peak(options, moments, i) <= budget]
    if not fitting:
        least = min(peak(options, moments, i) for i in combinations(options))
        with pytest.raises(StepTooLarge) as caught:
            choose(options, calls, moments, budget)
        assert caught.value.smallest_bytes == caught.value.least_bytes == least
        assert caught.value.status is Status.INFEASIBLE
        assert isinstance(caught.value, BudgetTooSmall)
        return
    found = choose(options, calls, moments, budget)
    assert found.peak_bytes == peak(options, moments, found.indices) <= budget
    assert found.time == pytest.approx(step_time(options, calls, found.indices))
    truth = min(step_time(options, calls, i) for i in fitting)
    assert found.time == pytest.approx(truth)
    assert found.lower_bound <= truth * (1 + 1e-9) + 1e-9
    assert found.status is Status.OPTIMAL


@thorough
@given(steps(), st.integers(1, 150), st.integers(0, 40))
def test_a_larger_budget_never_costs_more_time(step, budget, more):
    options, calls, moments = step
    try:
        first = choose(options, calls, moments, budget)
    except StepTooLarge:
        return
    second = choose(options, calls, moments, budget + more)
    assert second.time <= first.time * (1 + 2e-6)


@thorough
@given(steps())
def test_the_least_budget_that_is_named_is_enough_and_no_less_is(step):
    options, calls, moments = step
    least = min(peak(options, moments, i) for i in combinations(options))
    if least < 2:
        return
    with pytest.raises(StepTooLarge) as caught:
        choose(options, calls, moments, least - 1)
    assert choose(options, calls, moments, caught.value.smallest_bytes).peak_bytes == least


def test_a_budget_to_the_last_byte_is_kept_in_large_numbers():
    """Beyond the tolerance of a back end, which works in floating point."""
    large = 10**15
    options = [[option(0, 0, large + 1, 1), option(0, 0, large, 2)]]
    assert choose(options, [1], nested(1), large).indices == (1,)
    assert choose(options, [1], nested(1), large + 1).indices == (0,)
    with pytest.raises(StepTooLarge, match=f"{large} B") as caught:
        choose(options, [1], nested(1, fixed=1), large)
    assert caught.value.smallest_bytes == large + 1


def test_many_regions_that_fit_only_to_the_last_byte():
    large = 10**12
    options = [[option(large, large, large, 1), option(large - 1, large, large, 2)]] * 4
    found = choose(options, [1] * 4, nested(4), 4 * large - 2)
    assert sum(found.indices[:3]) == 2
    assert found.peak_bytes == 4 * large - 2


def test_how_often_a_region_is_called_counts():
    options = [[option(10, 0, 0, 1), option(0, 0, 0, 3)]] * 2
    moment = TimeStep(0, ((0, 1), (1, 1)), None)
    assert choose(options, [5, 1], [moment], 10).indices == (0, 1)
    assert choose(options, [1, 5], [moment], 10).indices == (1, 0)


def test_when_time_is_out_what_fits_is_still_given():
    options = [[option(10 * i, 40, 50, 10 - i) for i in range(1, 9)]] * 12
    found = choose(options, [1] * 12, nested(12), 600, limit_seconds=0)
    assert found.peak_bytes <= 600
    assert found.lower_bound <= found.time


def test_a_back_end_that_finds_nothing_is_no_proof(monkeypatch):
    def nothing(program, **_):
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf)

    monkeypatch.setattr("remat_solvers.step.table.solve_program", nothing)
    monkeypatch.setattr("remat_solvers.step.table.Table._greedy", lambda *_: None)
    options = [[option(10, 0, 0, 1), option(0, 0, 10, 2)]]
    moments = [TimeStep(0, ((0, 1),), None), TimeStep(0, (), (0, "backward"))]
    with pytest.raises(StepTooLarge) as caught:
        choose(options, [1], moments, 5)
    assert caught.value.status is Status.LIMIT
    assert caught.value.least_bytes <= 5 < caught.value.smallest_bytes == 10
    found = choose(options, [1], moments, 10)
    assert found.peak_bytes == 10


@pytest.mark.parametrize(
    ("options", "calls", "moments", "match"),
    [
        ([], [], [], "no regions"),
        ([[]], [1], [], "no options"),
        ([[option(1, 1, 1, 1)]], [], [], "one for each"),
        ([[option(1, 1, 1, 1)]], [0], [], "calls"),
        ([[option(1, 1, 1, 1)]], [1], [TimeStep(0, ((1, 1),), None)], "region 1 of 1"),
        ([[option(1, 1, 1, 1)]], [1], [TimeStep(0, (), (0, "sideways"))], "sideways"),
        ([[option(1, 1, 1, 1)]], [1], [TimeStep(-1, (), None)], "fixed_bytes"),
    ],
)
def test_what_does_not_go_together_is_refused(options, calls, moments, match):
    with pytest.raises(InvalidProblem, match=match):
        choose(options, calls, moments, 10)


@pytest.mark.sweep
@settings(few, max_examples=3)
@given(st.lists(regions(), min_size=1, max_size=2), st.floats(0.0, 1.0), st.integers(0, 5))
def test_the_bound_of_the_step_is_below_all_schedules(graphs, share, fixed):
    """Every trade-off of each region is listed by search; their best combination is the truth."""
    fronts = [region_front(graph, points=3, limit_seconds=NO_LIMIT) for graph in graphs]
    truth = [every_option(front) for front in fronts]
    moments, calls = nested(len(graphs), fixed), [2] * len(graphs)
    peaks = [peak(truth, moments, i) for i in combinations(truth)]
    budget = max(1, int(min(peaks) + share * (max(peaks) - min(peaks))))
    bound = step_bound(fronts, calls, moments, budget)
    times = [
        step_time(truth, calls, i) for i in combinations(truth) if peak(truth, moments, i) <= budget
    ]
    assert bound <= min(times) * (1 + 1e-7)
    listed = [front.options for front in fronts]
    try:
        found = choose(listed, calls, moments, budget)
    except StepTooLarge:
        return
    assert bound <= found.time * (1 + 1e-7)
    assert sum(2 * graph.time for graph in graphs) <= bound * (1 + 1e-7)


def every_option(front):
    """List all trade-offs of a small region, by asking for each box of what there may be.

    What is best in a box is so in each that is smaller and still has room for it.
    """
    everything = measure_option(front.graph, store_all(front.graph))
    found = front
    for kept in range(front.least_kept_bytes, everything.kept_bytes + 1):
        most = everything.peak_bytes
        while most > 0:
            found = refined_options(found, kept_bytes=kept, peak_bytes=most, limit_seconds=NO_LIMIT)
            best = found.best(kept, most)
            if best is None:
                break
            most = best.peak_bytes - 1
    return found.options


def test_the_bound_of_a_step_that_does_not_fit_is_infinite():
    front = region_front(closed(gpt2(layers=1)), points=3, limit_seconds=NO_LIMIT)
    low = max(front.least_forward_bytes, front.least_backward_bytes) - 1
    assert step_bound([front], [1], nested(1), low) == math.inf
    assert step_bound([front] * 2, [1, 1], nested(2), 10**12) == pytest.approx(2 * front.graph.time)


def test_one_region_with_its_moments_is_planned_as_by_a_plain_solve():
    graph = closed(gpt2(layers=1))
    loss = graph.ops[graph.boundary_index]
    outside = loss.workspace_bytes + sum(graph.value_by_name[v].size_bytes for v in loss.outputs)
    moments = [*nested(1), TimeStep(outside, ((0, 1),), None)]
    everything = measure_option(graph, store_all(graph))
    budget = int(0.7 * everything.peak_bytes)
    plain = solve(graph, budget, limit_seconds=NO_LIMIT)
    front = region_front(graph, points=3, limit_seconds=NO_LIMIT)
    front = refined_options(
        front, kept_bytes=budget - outside, peak_bytes=budget, limit_seconds=NO_LIMIT
    )
    found = choose([front.options], [1], moments, budget)
    assert found.time == pytest.approx(plain.time, rel=1e-3)
    assert plain.lower_bound <= found.time * (1 + 1e-9)
    bound = step_bound([front], [1], moments, budget)
    assert bound <= found.time * (1 + 1e-7)
    assert bound == pytest.approx(plain.lower_bound, rel=1e-3)


@pytest.mark.sweep
def test_layers_in_turn_keep_less_under_less():
    options = region_front(closed(gpt2(layers=1)), points=4, limit_seconds=NO_LIMIT).options
    most = 4 * options[-1].kept_bytes
    times = []
    for share in (1.5, 0.8, 0.4):
        found = choose([options] * 4, [1] * 4, nested(4), int(share * most), limit_seconds=NO_LIMIT)
        assert found.peak_bytes <= share * most
        assert found.status is Status.OPTIMAL
        times.append(found.time)
    assert times == sorted(times)
    assert times[0] < times[-1]


@pytest.fixture
def lying(monkeypatch):
    """Have the back end say something else."""
    read = milp._read

    def make(change):
        monkeypatch.setattr(milp, "_read", lambda *given: change(read(*given)))

    return make


OPTIONS = [[option(0, 5, 5, 3), option(2, 4, 4, 2), option(5, 5, 5, 1)]] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda _: Answer(Outcome.INFEASIBLE, None, math.inf, math.inf),
        lambda answer: dataclasses.replace(answer, bound=answer.value * 2),
        lambda _: Answer(Outcome.STOPPED, None, math.inf, 1e9),
    ],
)
@pytest.mark.parametrize("greedy", [True, False])
def test_a_back_end_that_lies_is_not_believed(lying, monkeypatch, change, greedy):
    if not greedy:
        monkeypatch.setattr(Table, "_greedy", lambda *_: None)
    honest = choose(OPTIONS, [1] * 3, nested(3), 11)
    assert (honest.status, honest.doubt) == (Status.OPTIMAL, None)
    lying(change)
    found = choose(OPTIONS, [1] * 3, nested(3), 11)
    assert found.peak_bytes <= 11
    assert (found.status, found.lower_bound) == (Status.FEASIBLE, 3.0)
    assert found.doubt.startswith("HIGHS was wrong in this process: ")


def test_a_least_budget_that_a_choice_refutes_is_not_told(lying):
    lying(lambda answer: dataclasses.replace(answer, bound=answer.value * 3))
    with pytest.raises(StepTooLarge) as caught:
        choose(OPTIONS, [1] * 3, nested(3), 4)
    assert caught.value.least_bytes <= caught.value.smallest_bytes
    assert caught.value.status is Status.LIMIT


def test_a_back_end_that_fails_leaves_what_is_found_without(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr("cvxpy.Problem.get_problem_data", fail)
    found = choose(OPTIONS, [1] * 3, nested(3), 11)
    assert (found.peak_bytes <= 11, found.status) == (True, Status.FEASIBLE)


class Boastful(StoreAll):
    """Says that nothing is faster than a hundred times storing everything."""

    def solve(self, problem, limit, report):
        bound = 100 * problem.graph.time
        return Solution(Status.LIMIT, None, math.inf, 0, bound, self.name, 0.0)


def test_a_region_whose_solver_an_option_refutes_is_an_error():
    graph = closed(gpt2(layers=1))
    front = region_front(graph, points=2, limit_seconds=NO_LIMIT)
    low = min(front.options, key=lambda o: o.peak_bytes)
    open_still = dataclasses.replace(front, bounds=())
    box = {"kept_bytes": low.kept_bytes, "peak_bytes": low.peak_bytes}
    with pytest.raises(BrokenSolver, match="Boastful is broken: it claims the bound"):
        refined_options(open_still, **box, solver=Boastful())


def test_a_region_gives_up_what_an_option_refutes():
    front = region_front(closed(gpt2(layers=1)), points=2, limit_seconds=NO_LIMIT)
    kept = min(option.kept_bytes for option in front.options)
    wrong = RegionBound(kept, ANY_BYTES, 1e9)
    front = dataclasses.replace(front, bounds=(*front.bounds, wrong))
    box = {"kept_bytes": kept + 1, "peak_bytes": front.options[0].peak_bytes}
    again = refined_options(front, **box, limit_seconds=0.2)  # given up before it is solved
    assert wrong not in again.bounds
    assert "claims the bound 1000000000.0" in trust.doubt_of("HIGHS")
