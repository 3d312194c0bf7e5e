import subprocess
import sys

import networkx as nx
import pytest
from hypothesis import given, settings
from solver_cases.brute_force import fastest, smallest
from solver_cases.random_graphs import graphs
from solver_cases.synthetic import gpt2

from remat_graph import (
    Block,
    Compute,
    Free,
    Graph,
    Hierarchy,
    InvalidSchedule,
    Op,
    Schedule,
    Status,
    Value,
    from_networkx,
    simulate,
)
from remat_solvers import BudgetTooSmall, InvalidProblem, smallest_budget, solve
from remat_solvers.store_all import store_all

GRAPH = gpt2(layers=1)
PEAK = simulate(GRAPH, store_all(GRAPH)).peak_bytes


def test_store_all_frees_after_the_last_use():
    values = (Value("x", 1), Value("a", 2), Value("unused", 7), Value("b", 3), Value("c", 1))
    ops = (
        Op("f", ("x",), ("a", "unused"), 1.0),
        Op("g", ("a",), ("b",), 2.0),
        Op("h", ("a", "b"), ("c",), 2.0),
    )
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"b", "c"}))
    assert store_all(graph).steps == (
        Compute("f"),
        Free("unused"),
        Compute("g"),
        Compute("h"),
        Free("a"),
    )


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_store_all_is_legal_and_computes_every_op_once(graph):
    timeline = simulate(graph, store_all(graph))
    assert timeline.time == pytest.approx(graph.time)
    solution = solve(graph, max(1, timeline.peak_bytes))
    assert (solution.status, solution.solver) == (Status.OPTIMAL, "store-all")
    assert solution.lower_bound == solution.time == timeline.time


def test_auto_refines_what_does_not_fit():
    reports = []
    solution = solve(GRAPH, int(PEAK * 0.7), progress=reports.append, limit_seconds=10)
    assert solution.solver == "refine"
    assert solution.peak_bytes <= PEAK * 0.7
    assert {r.solver for r in reports} == {"store-all", "refine"}


def test_store_all_alone_says_what_would_fit():
    with pytest.raises(BudgetTooSmall) as caught:
        solve(GRAPH, PEAK - 1, solver="store-all")
    assert caught.value.status is Status.LIMIT
    assert caught.value.smallest_bytes < PEAK


def test_too_small_by_proof():
    with pytest.raises(BudgetTooSmall, match=r"budget 1 B is below .* reached at op '") as caught:
        solve(GRAPH, 1)
    error = caught.value
    assert error.status is Status.INFEASIBLE
    assert error.budget_bytes == 1 < error.least_bytes <= error.smallest_bytes <= PEAK
    assert solve(GRAPH, error.smallest_bytes, limit_seconds=1).peak_bytes <= error.smallest_bytes


@settings(max_examples=25, deadline=None)
@given(graphs(most_ops=7))
def test_infeasible_is_what_brute_force_says(graph):
    needed = smallest(graph)
    if needed <= 1:
        return
    with pytest.raises(BudgetTooSmall) as caught:
        solve(graph, needed - 1, limit_seconds=1)
    assert caught.value.least_bytes <= needed <= caught.value.smallest_bytes
    found = solve(graph, caught.value.smallest_bytes, limit_seconds=1)
    assert found.time >= fastest(graph, caught.value.smallest_bytes) * (1 - 1e-9)


@pytest.mark.parametrize("budget", [0, -5, 1.5, "8GiB", None, True])
def test_a_budget_is_a_positive_whole_number(budget):
    with pytest.raises(InvalidProblem, match="budget_bytes="):
        solve(GRAPH, budget)


def test_a_limit_is_not_negative():
    with pytest.raises(InvalidProblem, match="limit_seconds="):
        solve(GRAPH, 1, limit_seconds=-1.0)


def test_a_hierarchy_of_another_graph_is_refused():
    other = gpt2(layers=2)
    names = tuple(op.name for op in other.ops[: other.boundary_index])
    with pytest.raises(InvalidProblem, match="another graph"):
        solve(GRAPH, PEAK, hierarchy=Hierarchy(other, Block("root", names)))


def _interrupt_at_the_first_schedule(progress):
    if progress.incumbent is not None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("solver", ["refine", "tw-remat", "checkmate-rounding"])
def test_the_best_so_far_is_kept_on_ctrl_c_if_asked(solver):
    options = {"solver": solver, "progress": _interrupt_at_the_first_schedule, "limit_seconds": 30}
    solution = solve(GRAPH, int(PEAK * 0.7), keep_best=True, **options)
    assert solution.status is Status.FEASIBLE
    assert simulate(GRAPH, solution.schedule).peak_bytes <= int(PEAK * 0.7)
    with pytest.raises(KeyboardInterrupt):
        solve(GRAPH, int(PEAK * 0.7), **options)


def test_ctrl_c_before_any_schedule_is_ctrl_c():
    def interrupt(_progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(GRAPH, int(PEAK * 0.7), keep_best=True, solver="tw-remat", progress=interrupt)


def test_a_schedule_to_start_from_must_be_legal():
    start = store_all(GRAPH)
    with pytest.raises(InvalidSchedule, match="not alive"):
        solve(GRAPH, PEAK, start=Schedule(start.steps[1:]))
    assert solve(GRAPH, PEAK, start=start).status is Status.OPTIMAL


def test_a_schedule_to_start_from_is_better_than_none():
    small = smallest_budget(GRAPH)
    options = {"solver": "xla-greedy", "limit_seconds": 5}
    with pytest.raises(BudgetTooSmall):
        solve(GRAPH, small.peak_bytes, **options)
    solution = solve(GRAPH, small.peak_bytes, start=small.schedule, **options)
    assert (solution.status, solution.schedule) == (Status.FEASIBLE, small.schedule)


def test_any_networkx_dag_can_be_planned():
    dag = nx.DiGraph()
    for i in range(6):
        dag.add_node(f"f{i}", time=1.0, size_bytes=10, position=i)
        dag.add_node(f"b{i}", time=2.0, size_bytes=10, position=11 - i)
    nx.add_path(dag, [f"f{i}" for i in range(6)])
    nx.add_path(dag, [f"b{i}" for i in reversed(range(6))])
    dag.add_edges_from((f"f{i}", f"b{i}") for i in range(6))
    graph = from_networkx(dag)
    least = smallest_budget(graph)
    solution = solve(graph, least.peak_bytes)
    assert solution.status is Status.OPTIMAL
    assert solution.time > graph.time


def test_the_package_needs_no_torch_and_no_sibling():
    code = (
        "import sys, remat_solvers, remat_solvers.refine\n"
        "seen = {m.split('.')[0] for m in sys.modules}\n"
        "print(seen & {'torch', 'remat', 'remat_partition', 'remat_exec'})"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "set()"
