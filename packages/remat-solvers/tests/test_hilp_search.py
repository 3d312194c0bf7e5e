"""H-ILP from end to end: on any graph and hierarchy, by other executors, from given schedules."""

import dataclasses
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.answers import peak_of
from solver_cases.hilp_levels import silent, small, solved, some_staged_schedule
from solver_cases.networks_in_blocks import feed_forward_in_blocks
from solver_cases.random_graphs import graphs, trainings
from solver_cases.random_hierarchies import branching, fatal, nested, quick

from remat_graph import Block, Graph, Hierarchy, Op, Status, Value, simulate
from remat_solvers import InvalidProblem, Limit, Problem, WorkerDied
from remat_solvers.core.milp import BudgetedProgram
from remat_solvers.core.trace import sequence_time
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.published.checkmate import Checkmate
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.published.hierarchical.blocks.bottom_up import Blocks
from remat_solvers.published.hierarchical.hilp import HILP, RKCheckmate
from remat_solvers.published.hierarchical.hilp.planner import LevelPlanner
from remat_solvers.published.hierarchical.hilp.search import search
from remat_solvers.search.evict import evict
from remat_solvers.testing.brute_force import fastest


def check(problem, solution):
    """Hold an answer of `h-ilp` against the simulator."""
    graph, budget = problem.graph, problem.budget_bytes
    if solution.schedule is None:
        assert solution.status in (Status.INFEASIBLE, Status.LIMIT)
        if solution.status is Status.INFEASIBLE:
            assert fastest(graph, budget) is None
        return
    timeline = simulate(graph, solution.schedule)
    assert timeline.peak_bytes == solution.peak_bytes <= budget
    assert timeline.time == solution.time
    assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert graph.time * (1 - 1e-6) <= solution.lower_bound <= solution.time
    if solution.status is Status.OPTIMAL:
        assert solution.time == pytest.approx(solution.lower_bound, rel=2e-6)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(branching(4), trainings(4), graphs(7, 8)).flatmap(nested),
    st.floats(0.3, 1.1),
    st.sampled_from([1, 12, 28]),
)
def test_h_ilp_holds_on_any_graph_and_hierarchy(hierarchy, share, most_nodes):
    graph = hierarchy.graph
    budget = max(1, int(share * peak_of(graph)))
    solver = HILP(most_nodes=most_nodes)
    check(Problem(graph, budget), solved(solver, graph, budget, hierarchy, seconds=60))


HIERARCHY = feed_forward_in_blocks(6, 2)
BUDGET = 10


@pytest.fixture(scope="module")
def serial():
    return solved(HILP(), HIERARCHY.graph, BUDGET, HIERARCHY, seconds=None)


@pytest.mark.sweep
def test_a_network_in_blocks_comes_near_its_optimum(serial):
    graph = HIERARCHY.graph
    assert peak_of(graph) > BUDGET
    check(Problem(graph, BUDGET), serial)
    best = solved(RKCheckmate(), graph, BUDGET)
    assert best.status is Status.OPTIMAL
    assert best.time <= serial.time <= 1.1 * best.time


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [None, "processes", "dask_executor"])
def test_the_result_is_the_same_whatever_runs_it(kind, request, serial):
    executor = None if kind is None else request.getfixturevalue(kind)
    found = solved(HILP(), HIERARCHY.graph, BUDGET, HIERARCHY, seconds=None, executor=executor)
    assert dataclasses.replace(found, solve_seconds=serial.solve_seconds) == serial


def test_a_worker_that_dies_names_the_block(importable):
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
        pytest.raises(WorkerDied, match="before 'block block0' was solved"),
    ):
        solved(HILP(planner=fatal), HIERARCHY.graph, BUDGET, HIERARCHY, executor=pool)


def test_an_interrupt_leaves_nothing_running():
    calls = []

    def counted(level, budget, seconds):
        calls.append(budget)
        return quick(level, budget, seconds)

    def press(progress):
        if progress.message.startswith("planned"):
            raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(KeyboardInterrupt):
            solved(HILP(planner=counted), HIERARCHY.graph, BUDGET, HIERARCHY, 60, pool, press)
        before = len(calls)
        assert pool._work_queue.empty()
        assert [pool.submit(len, ()).result() for _ in range(4)] == [0] * 4
        assert len(calls) == before > 0


@pytest.mark.sweep
def test_gurobi_solves_a_network_in_blocks_as_highs_does():
    hierarchy = feed_forward_in_blocks(4, 2)
    found = [
        solved(
            HILP(
                most_options=8,
                most_nodes=1,
                gap=0.0,
                back_end=back_end,
                planner=LevelPlanner(back_end=back_end),
            ),
            hierarchy.graph,
            9,
            hierarchy,
            seconds=60,
        )
        for back_end in ("HIGHS", "GUROBI")
    ]
    assert found[0].time == found[1].time < math.inf
    assert found[0].time > hierarchy.graph.time


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("make", [HILP, RKCheckmate])
def test_little_time_is_no_crash(make, seconds):
    hierarchy = feed_forward_in_blocks(12, 3)
    solution = solved(make(), hierarchy.graph, 14, hierarchy, seconds)
    assert solution.status in (Status.LIMIT, Status.FEASIBLE)
    check(Problem(hierarchy.graph, 14), solution)


def test_what_no_op_fits_is_infeasible_and_what_all_fit_is_optimal():
    graph = HIERARCHY.graph
    assert solved(HILP(), graph, 1, HIERARCHY).status is Status.INFEASIBLE
    assert solved(HILP(), graph, peak_of(graph), HIERARCHY).status is Status.OPTIMAL


def test_bad_settings_are_refused():
    for settings_, match in (
        ({"most_options": 0}, "most_options=0"),
        ({"most_nodes": 0}, "most_nodes=0"),
        ({"gap": -1.0}, "gap=-1"),
        ({"gap": math.nan}, "gap=nan"),
        ({"most_options": "8"}, "most_options='8'; it must be a whole number"),
        ({"most_nodes": None}, "most_nodes=None; it must be a whole number"),
        ({"gap": None}, "gap=None; it must be a number"),
    ):
        with pytest.raises(InvalidProblem, match=match):
            HILP(**settings_)
    for settings_, match in (
        ({"gap": -1.0}, "gap=-1"),
        ({"gap": "0.1"}, "gap='0.1'; it must be a number"),
        ({"gap": True}, "gap=True; it must be a number"),
        ({"most_columns": None}, "most_columns=None; it must be a whole number"),
    ):
        for solver in (RKCheckmate, Checkmate):
            with pytest.raises(InvalidProblem, match=match):
                solver(**settings_)
    with pytest.raises(InvalidProblem, match="form='x'; give one of tight, paper"):
        Checkmate(form="x")
    reason = HILP(back_end=3).can_solve(Problem(HIERARCHY.graph, BUDGET, HIERARCHY))
    assert reason == "back_end=3; give the name of a solver of CVXPY, such as 'HIGHS'"
    with pytest.raises(InvalidProblem, match="needs a hierarchy"):
        solved(HILP(), HIERARCHY.graph, BUDGET)


def test_infeasible_is_not_said_for_the_order_of_the_graph_alone():
    values = (Value("a", 10), Value("b", 1), Value("c", 1))
    ops = (
        Op("a", (), ("a",), 1.0, replayable=False),
        Op("b", (), ("b",), 1.0, workspace_bytes=10),
        Op("c", ("a",), ("c",), 1.0),
    )
    graph = Graph(values, ops, results=frozenset({"b", "c"}))
    hierarchy = Hierarchy(graph, Block("root", (Block("A", ("a", "c")), Block("B", ("b",)))))
    found = HILP().solve(Problem(graph, 13, hierarchy), Limit.starting_now(5), lambda _: None)
    assert found.status is not Status.INFEASIBLE
    if found.schedule is not None:
        assert simulate(graph, found.schedule).peak_bytes <= 13


def test_a_given_schedule_in_another_order_is_kept():
    """In the order of the graph, `a` and `b` do not fit side by side."""
    values = (Value("a", 10), Value("b", 10), Value("c", 1), Value("d", 1))
    ops = (
        Op("a", (), ("a",), 3.0),
        Op("b", (), ("b",), 3.0),
        Op("c", ("a",), ("c",), 1.0),
        Op("d", ("b",), ("d",), 1.0),
    )
    graph = Graph(values, ops, results=frozenset({"c", "d"}))
    hierarchy = Hierarchy(graph, Block("root", ("a", "b", "c", "d")))
    wiring = Wiring.of(graph)
    start = expand(wiring, np.array([0, 2, 1, 3]))
    alone = HILP().solve(Problem(graph, 12, hierarchy), Limit.starting_now(5), silent)
    assert alone.time > graph.time
    given = Problem(graph, 12, hierarchy, start=start)
    found = HILP().solve(given, Limit.starting_now(5), silent)
    assert (found.status, found.time) == (Status.OPTIMAL, graph.time)


def test_a_given_schedule_may_have_another_order_than_the_hierarchy():
    """`b` is computed twice; `n` cannot be, and is first in the hierarchy."""
    values = (Value("b", 10), Value("n", 1), Value("e", 1), Value("d", 1))
    ops = (
        Op("b", (), ("b",), 1.0),
        Op("n", (), ("n",), 1.0, replayable=False),
        Op("e", (), ("e",), 1.0, workspace_bytes=12),
        Op("d", ("b", "n", "e"), ("d",), 1.0),
    )
    graph = Graph(values, ops, results=frozenset({"d"}))
    hierarchy = Hierarchy(graph, Block("root", ("n", "b", "e", "d")))
    start = expand(Wiring.of(graph), np.array([0, 1, 2, 0, 3]))
    given = Problem(graph, 14, hierarchy, start=start)
    found = HILP().solve(given, Limit.starting_now(5), silent)
    assert found.time == graph.time + 1


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(small, st.randoms(use_true_random=False), st.floats(0, 0.5))
def test_h_ilp_is_never_slower_than_a_given_schedule_that_fits(hierarchy, random, seconds):
    graph = hierarchy.graph
    now = some_staged_schedule(Stages.of(Wiring.of(graph)), random)
    start = expand(Wiring.of(graph), now.sequence)
    problem = Problem(graph, max(1, now.peak_bytes), hierarchy, start=start)
    found = HILP().solve(problem, Limit.starting_now(seconds), silent)
    check(problem, found)
    assert found.time <= simulate(graph, start).time * (1 + 1e-9)


@pytest.mark.sweep
def test_the_program_starts_from_what_a_given_schedule_does_in_its_blocks(monkeypatch):
    """The options planned are storing everything and least memory; what pays is in between."""
    hierarchy = feed_forward_in_blocks(6, 3)
    wiring = Wiring.of(hierarchy.graph)
    blocks = Blocks(hierarchy, 20)
    blocks.plan(lambda *_: [], None, time.perf_counter() + 60, lambda _: None)
    budget = 8
    start = evict(wiring, np.arange(wiring.op_count), budget)
    assert start.peak_bytes <= budget
    handed_on = []
    original = BudgetedProgram.solve

    def solve(program, budget_bytes, **options):
        handed_on.append(float(program._program.cost @ options["start"]))
        return original(program, budget_bytes, **options)

    monkeypatch.setattr(BudgetedProgram, "solve", solve)
    times = []
    for begun in ([], [start.sequence]):
        found = search(
            blocks.top(1, begun),
            budget,
            deadline=time.perf_counter() + 20,
            gap=0.0,
            corrected=True,
            back_end="HIGHS",
            starts=begun,
        )
        times.append(sequence_time(wiring, found.sequence))
    assert times[1] < sequence_time(wiring, start.sequence) < times[0]
    assert handed_on[1] < handed_on[0]
