"""What solvers by integer programs begin with, before their first program."""

import math
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.answers import peak_of
from solver_cases.networks_in_blocks import feed_forward_in_blocks
from solver_cases.random_graphs import graphs, trainings
from solver_cases.smallest_budgets import smallest

from remat_graph import Compute, Graph, Op, Schedule, Status, Value, simulate
from remat_solvers import Limit, Problem, get_solver, smallest_budget, solve, store_all
from remat_solvers.core.milp import BudgetedProgram
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Wiring, expand, in_order
from remat_solvers.published.checkmate import CheckmateRounding
from remat_solvers.search.prune import prune
from remat_solvers.search.starts import starts

NAMES = ["checkmate", "checkmate-rounding", "rk-checkmate", "h-ilp"]
HIERARCHY = feed_forward_in_blocks(6, 2)
GRAPH = HIERARCHY.graph
BUDGET = 10
STARTS = "remat_solvers.search.starts"
MODULES = ("checkmate.bound", "hierarchical.hilp.solver")
EVERYTHING = store_all(GRAPH)

thorough = settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def best():
    found = solve(GRAPH, BUDGET, solver="refine", limit_seconds=NO_LIMIT)
    assert found.status is Status.OPTIMAL
    return found


@pytest.fixture
def alone(monkeypatch):
    """Leave nothing to begin with but the given schedule."""

    def only_given(wiring, budget_bytes, schedule, deadline):
        if schedule is not None:
            yield trace(wiring, in_order(wiring, schedule))

    for module in MODULES:
        monkeypatch.setattr(f"remat_solvers.published.{module}.starts", only_given)


@pytest.fixture
def unbounded(monkeypatch):
    """Bound nothing before the program."""
    bound = "remat_solvers.published.checkmate.bound._bound_all"
    monkeypatch.setattr(bound, lambda *_, **__: None)


def interrupt(_progress):
    raise KeyboardInterrupt


@pytest.mark.parametrize("solver", NAMES)
def test_ctrl_c_at_the_first_report_has_a_schedule_to_keep(solver):
    found = solve(
        GRAPH,
        BUDGET,
        solver=solver,
        hierarchy=HIERARCHY,
        limit_seconds=NO_LIMIT,
        progress=interrupt,
        keep_best=True,
    )
    assert found.status is Status.FEASIBLE
    assert simulate(GRAPH, found.schedule).peak_bytes <= BUDGET


@pytest.mark.parametrize("solver", NAMES)
def test_the_given_schedule_comes_first_and_is_not_lost(solver, best, alone):
    reports = []
    problem = Problem(GRAPH, BUDGET, HIERARCHY, start=best.schedule)
    found = get_solver(solver).solve(problem, Limit.starting_now(0.0), reports.append)
    assert reports[0].incumbent_time == best.time
    assert simulate(GRAPH, reports[0].incumbent()).time == best.time
    assert found.time == best.time
    assert found.lower_bound <= best.time


@pytest.mark.parametrize("solver", NAMES)
def test_a_given_schedule_that_does_not_fit_is_repaired(solver):
    reports = []
    problem = Problem(GRAPH, BUDGET, HIERARCHY, start=EVERYTHING)
    found = get_solver(solver).solve(problem, Limit.starting_now(NO_LIMIT), reports.append)
    assert reports[0].incumbent_peak_bytes <= BUDGET
    assert found.time <= reports[0].incumbent_time


@pytest.mark.parametrize(("solver", "free"), [("checkmate", GRAPH.time), ("rk-checkmate", 0)])
def test_the_program_is_started_from_the_given_schedule(
    solver, free, best, alone, unbounded, monkeypatch
):
    """In the costs of `checkmate` first computations are free."""
    times = []

    def record(self, budget_bytes, *, seconds, gap=0.0, start=None):
        assert start is not None
        times.append(free + self._program.cost @ start * GRAPH.time / 1000)
        raise TimeoutError

    monkeypatch.setattr(BudgetedProgram, "solve", record)
    monkeypatch.setattr("remat_solvers.published.hierarchical.hilp.search._start", lambda *_: None)
    problem = Problem(GRAPH, BUDGET, start=best.schedule)
    with pytest.raises(TimeoutError):
        get_solver(solver).solve(problem, Limit.starting_now(NO_LIMIT), lambda _: None)
    assert times == [pytest.approx(best.time)]


def test_what_costs_nothing_needs_no_program():
    """`a`, of no time, is made again beside which `b` alone fits."""
    values = (Value("a", 5), Value("b", 1), Value("c", 1), Value("end", 1))
    ops = (
        Op("a", (), ("a",), 0.0),
        Op("b", ("a",), ("b",), 1.0),
        Op("c", ("b",), ("c",), 1.0, workspace_bytes=5),
        Op("end", ("a", "c"), ("end",), 1.0),
    )
    graph = Graph(values, ops, results=frozenset({"end"}))
    for solver in ("checkmate", "checkmate-rounding", "rk-checkmate"):
        reports = []
        limit = Limit.starting_now(NO_LIMIT)
        found = get_solver(solver).solve(Problem(graph, 7), limit, reports.append)
        assert (found.status, found.time, len(reports)) == (Status.OPTIMAL, 3.0, 1)


def test_the_rounding_as_printed_begins_with_nothing(best):
    reports = []
    solver = CheckmateRounding(thresholds=(0.5,), pruned=False)
    problem = Problem(GRAPH, BUDGET, start=best.schedule)
    found = solver.solve(problem, Limit.starting_now(NO_LIMIT), reports.append)
    assert reports[0].incumbent_time is None
    assert found.time >= best.time


def test_a_given_schedule_does_not_end_the_rounding_early(best, alone, unbounded):
    said = []
    for start in (None, best.schedule):
        reports = []
        problem = Problem(GRAPH, BUDGET, start=start)
        CheckmateRounding().solve(problem, Limit.starting_now(NO_LIMIT), reports.append)
        said.append([report.message for report in reports if "epsilon" in report.message])
    assert said[0] == said[1] != []


@thorough
@given(st.one_of(graphs(), trainings()), st.floats(0, 1))
def test_all_starts_are_legal_and_in_order(graph, share):
    low, high = smallest(graph), peak_of(graph)
    assume(low < high)
    budget = max(1, low + int(share * (high - 1 - low)))
    wiring = Wiring.of(graph)
    found = list(starts(wiring, budget, store_all(graph), time.perf_counter() + NO_LIMIT))
    assert found[0].sequence.tolist() == list(range(wiring.op_count))
    for now in found:
        schedule = expand(wiring, now.sequence)
        assert simulate(graph, schedule).peak_bytes == now.peak_bytes
        assert in_order(wiring, schedule) is not None
    fitting = [now for now in found if now.peak_bytes <= budget]
    assert len(fitting) <= 2  # no more is tried than what is always


def test_where_eviction_finds_nothing_it_is_paged(monkeypatch):
    wiring = Wiring.of(GRAPH)
    monkeypatch.setattr(f"{STARTS}.evict", lambda w, found, *_, **__: trace(w, found))
    *over, last = starts(wiring, BUDGET, None, time.perf_counter() + NO_LIMIT)
    assert all(now.peak_bytes > BUDGET for now in over)
    assert last.peak_bytes <= BUDGET


def test_without_time_there_is_still_the_given_one(best):
    wiring = Wiring.of(GRAPH)
    found = list(starts(wiring, BUDGET, best.schedule, time.perf_counter()))
    assert sequence_time(wiring, found[0].sequence) == best.time
    assert len(found) <= 4


def test_starts_take_a_small_share_of_the_time():
    wiring = Wiring.of(GRAPH)
    deadlines = []

    def spend(w, found, *_, deadline, **__):
        deadlines.append(deadline - time.perf_counter())
        return trace(w, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{STARTS}.evict", spend)
        list(starts(wiring, BUDGET, None, time.perf_counter() + 60))
    assert deadlines
    assert max(deadlines) <= 2


def test_what_must_not_run_again_is_not_begun_with():
    values = (Value("a", 1), Value("b", 1))
    ops = (Op("a", (), ("a",), 1.0, replayable=False), Op("b", ("a",), ("b",), 1.0))
    wiring = Wiring.of(Graph(values, ops, results=frozenset({"b"})))
    once = Schedule((Compute("a"), Compute("b")))
    twice = Schedule((Compute("a"), Compute("b"), Compute("a")))
    assert in_order(wiring, once).tolist() == [0, 1]
    assert in_order(wiring, twice) is None
    assert in_order(wiring, Schedule((Compute("a"),))) is None


def test_pruning_ends_at_its_deadline():
    wiring = Wiring.of(GRAPH)
    again = np.repeat(np.arange(wiring.op_count), 2)
    now = trace(wiring, again)
    late = prune(wiring, now, 10**6, deadline=-math.inf)
    assert wiring.op_count <= late.steps <= now.steps
    assert prune(wiring, now, 10**6).steps == wiring.op_count


def test_a_descent_finds_what_eviction_does_not(monkeypatch):
    wiring = Wiring.of(GRAPH)
    budget = smallest_budget(GRAPH).peak_bytes
    monkeypatch.setattr(f"{STARTS}.evict_in_one_pass", lambda *_, **__: None)
    monkeypatch.setattr(f"{STARTS}.evict", lambda _, now, *__, **___: trace(wiring, now))
    *others, last = starts(wiring, budget, None, time.perf_counter() + NO_LIMIT)
    assert all(found.peak_bytes > budget for found in others)
    assert last.peak_bytes <= budget
