import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import networkx as nx
import pytest
from hypothesis import given, settings
from solver_cases import NO_LIMIT
from solver_cases.random_graphs import graphs
from solver_cases.smallest_budgets import smallest
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
from remat_graph.testing import unit_chain
from remat_solvers import BudgetTooSmall, InvalidProblem, smallest_budget, solve, store_all
from remat_solvers.core.wiring import MOST_BYTES, total_bytes
from remat_solvers.testing.brute_force import fastest

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


@settings(max_examples=20, deadline=None)
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
    first, second = solution.trials
    assert (first.solver, first.status, first.time) == ("store-all", Status.LIMIT, None)
    assert (second.solver, second.status) == ("refine", solution.status)
    assert (second.time, second.lower_bound) == (solution.time, solution.lower_bound)
    assert second.peak_bytes == solution.peak_bytes
    assert min(first.seconds, second.seconds) > 0
    assert solve(GRAPH, int(PEAK * 0.7), solver="refine", limit_seconds=10).trials == ()


def test_auto_says_that_it_took_the_schedule_of_minimal_peak(monkeypatch):
    monkeypatch.setattr(sys.modules[solve.__module__], "_PORTFOLIO", ("store-all",))
    solution = solve(GRAPH, int(PEAK * 0.7), limit_seconds=5)
    assert solution.solver == "minimal-peak"
    assert [trial.solver for trial in solution.trials] == ["store-all", "minimal-peak"]
    assert [trial.time for trial in solution.trials] == [None, solution.time]


def test_store_all_alone_says_what_would_fit():
    help_ = r"not met by this solver, though .*; use another solver, such as 'auto'"
    with pytest.raises(BudgetTooSmall, match=help_) as caught:
        solve(GRAPH, PEAK - 1, solver="store-all")
    assert caught.value.status is Status.LIMIT
    assert caught.value.smallest_bytes < PEAK


def test_too_small_by_proof():
    with pytest.raises(
        BudgetTooSmall, match=r"budget 1 B is below .* needed to run op '"
    ) as caught:
        solve(GRAPH, 1)
    error = caught.value
    assert error.status is Status.INFEASIBLE
    assert error.budget_bytes == 1 < error.least_bytes <= error.smallest_bytes <= PEAK
    assert solve(GRAPH, error.smallest_bytes, limit_seconds=1).peak_bytes <= error.smallest_bytes


@settings(max_examples=10, deadline=None)
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


@pytest.mark.parametrize("limit", ["5", [1], float("nan")])
def test_a_limit_is_a_number(limit):
    with pytest.raises(InvalidProblem, match="limit_seconds="):
        solve(GRAPH, PEAK, limit_seconds=limit)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"start": "abc"}, "start='abc' of type str; it must be a remat_graph.Schedule"),
        ({"start": [Compute("f")]}, r"start=\[.*\] of type list; it must be a remat_graph.Sched"),
        ({"start": Schedule((1, "f"))}, "step 0 of start is 1 of type int; it must be a Compute"),
        ({"hierarchy": GRAPH}, "of type Graph; it must be a remat_graph.Hierarchy"),
        ({"executor": object()}, "of type object; it must be a concurrent.futures.Executor"),
        ({"executor": ThreadPoolExecutor}, "of type type; it must be a concurrent.futures.Exec"),
        ({"graph": {}}, "graph={} of type dict; it must be a remat_graph.Graph"),
        ({"solver": None}, "solver=None; give a name, such as 'auto'"),
        ({"solver": ["refine"]}, r"solver=\['refine'\]; give a name"),
        ({"progress": 3}, "progress=3; give a function of a Progress, or None"),
        ({"graph": None}, "graph=None of type NoneType; it must be a remat_graph.Graph"),
    ],
)
def test_what_is_not_what_it_should_be_is_named(wrong, message):
    with pytest.raises(InvalidProblem, match=message):
        solve(**{"graph": GRAPH, "budget_bytes": PEAK, **wrong})


def _sized(sizes, workspace=0):
    """Sum values in a row: each op reads the last one."""
    names = [f"v{i}" for i in range(len(sizes))]
    ops = [
        Op(name, (names[i - 1],) if i else (), (name,), 1.0, workspace_bytes=workspace)
        for i, name in enumerate(names)
    ]
    values = tuple(map(Value, names, sizes))
    return Graph(values, tuple(ops), results=frozenset(names[-1:]))


def test_sizes_that_cannot_be_added_up_are_refused():
    too_large = _sized([2**61, 2**60, 2**60 - 5], 5)
    assert total_bytes(too_large) == MOST_BYTES + 1
    for ask in (lambda: solve(too_large, 2**62), lambda: smallest_budget(too_large)):
        with pytest.raises(InvalidProblem, match=f"{2**62:,} bytes .* than the {MOST_BYTES:,} "):
            ask()


@pytest.mark.parametrize("solver", ["auto", "checkmate", "rk-checkmate", "xla-greedy"])
def test_the_largest_sizes_are_added_up(solver):
    """Plans are those of the same graph in a larger unit."""
    unit = MOST_BYTES // total_bytes(small := unit_chain(8))
    large = dataclasses.replace(
        small, values=tuple(Value(v.name, v.size_bytes * unit) for v in small.values)
    )
    here = solve(small, 7, solver=solver, limit_seconds=20)
    there = solve(large, 7 * unit, solver=solver, limit_seconds=20)
    assert (there.time, there.peak_bytes) == (here.time, here.peak_bytes * unit)
    assert smallest_budget(large).peak_bytes == smallest_budget(small).peak_bytes * unit


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
    least = smallest_budget(graph, limit_seconds=NO_LIMIT)
    solution = solve(graph, least.peak_bytes, limit_seconds=NO_LIMIT)
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
