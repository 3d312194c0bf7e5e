import dataclasses
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.random_graphs import trainings

from remat_graph import Graph, Op, Stage, Value, simulate
from remat_graph.testing import unit_chain
from remat_solvers import InvalidProblem, UnknownSolver, max_batch_size, store_all, with_batch
from remat_solvers.testing.brute_force import fastest


def test_a_graph_is_scaled_but_for_what_is_fixed():
    values = (Value("x", 1), Value("a", 3), Value("w", 5))
    ops = (Op("f", ("x",), ("a", "w"), 2.0, workspace_bytes=7),)
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"w"}))
    scaled = with_batch(graph, 3, of_batch=2, fixed={"w"})
    assert [v.size_bytes for v in scaled.values] == [2, 5, 5]
    assert (scaled.ops[0].time, scaled.ops[0].workspace_bytes) == (3.0, 11)
    assert with_batch(graph, 2, of_batch=2) == graph
    assert with_batch(graph, 3, fixed=iter(["a", "w"])) == with_batch(graph, 3, fixed={"a", "w"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"graph": None}, "graph=None of type NoneType; it must be a remat_graph.Graph"),
        ({"of_batch": 0}, "of_batch=0; it must be a whole number, 1 or more"),
        ({"of_batch": "x"}, "of_batch='x'; it must be"),
        ({"of_batch": 2.0}, "of_batch=2.0; it must be"),
        ({"of_batch": None}, "of_batch=None; it must be"),
        ({"of_batch": 10**400}, "of_batch is above 4,611,"),
        ({"fixed": {"v"}}, "'v' is no value"),
        ({"fixed": "a0"}, "fixed='a0'; give names"),
        ({"fixed": None}, "fixed=None; give names"),
        ({"fixed": [["a0"]]}, r"fixed value \['a0'\] is no value"),
    ],
)
@pytest.mark.parametrize("ask", [with_batch, max_batch_size])
def test_what_is_not_what_it_should_be_is_named(ask, wrong, message):
    arguments = {"graph": unit_chain(3), **wrong}
    with pytest.raises(InvalidProblem, match=message):
        ask(arguments.pop("graph"), 100, **arguments)


@pytest.mark.parametrize("batch", [0, -1, 1.5, "2", None, True, math.nan])
def test_a_batch_is_a_whole_number(batch):
    with pytest.raises(InvalidProblem, match=r"batch_size=.*whole number, 1 or more"):
        with_batch(unit_chain(3), batch)


@pytest.mark.parametrize("overhead", [-0.1, math.nan, "x", [1]])
def test_an_overhead_is_a_number(overhead):
    with pytest.raises(InvalidProblem, match=r"max_overhead=.*a number, 0 or more"):
        max_batch_size(unit_chain(3), 10, max_overhead=overhead)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"solver": "nosuch"}, UnknownSolver),
        ({"solver": None}, InvalidProblem),
        ({"executor": 3}, InvalidProblem),
    ],
)
def test_solver_and_executor_are_looked_at_even_where_nothing_is_asked(wrong, error):
    with pytest.raises(error):
        max_batch_size(unit_chain(3), 1, **wrong)


def test_ops_without_time_take_no_longer():
    graph = unit_chain(4)
    timeless = dataclasses.replace(
        graph, ops=tuple(dataclasses.replace(op, time=0.0) for op in graph.ops)
    )
    found = max_batch_size(timeless, 24, max_overhead=math.inf)
    assert found.batch_size == max_batch_size(graph, 24, max_overhead=math.inf).batch_size
    assert found.proved


def good(graph: Graph, budget: int, batch: int) -> bool:
    """Ask brute force whether a batch fits with at most one more forward half."""
    scaled = with_batch(graph, batch)
    forward = math.fsum(op.time for op in graph.ops if op.stage is Stage.FORWARD)
    best = fastest(scaled, budget)
    return best is not None and best <= (graph.time + forward) * batch * (1 + 1e-9)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(trainings(3), st.integers(20, 60), st.sampled_from(["refine", "checkmate"]))
def test_against_brute_force(graph, budget, solver):
    found = max_batch_size(graph, budget, solver=solver, limit_seconds=20)
    truth = 0
    while good(graph, budget, truth + 1):
        truth += 1
    assert found.batch_size <= truth
    if found.proved:
        assert found.batch_size == truth
    if found.batch_size:
        timeline = simulate(found.graph, found.solution.schedule)
        assert found.graph == with_batch(graph, found.batch_size)
        assert timeline.peak_bytes == found.solution.peak_bytes <= budget
    else:
        assert found.solution is None


@pytest.mark.sweep
def test_recomputation_makes_room_and_time_is_bounded():
    graph = unit_chain(6)
    budget = 48
    stored = max_batch_size(graph, budget, max_overhead=0.0)
    assert simulate(stored.graph, store_all(stored.graph)).peak_bytes <= budget
    assert stored.solution.time == stored.graph.time
    some = max_batch_size(graph, budget, max_overhead=0.1)
    one_more_half = max_batch_size(graph, budget)
    assert stored.batch_size < some.batch_size < one_more_half.batch_size
    assert some.solution.time <= 1.1 * some.graph.time
    assert one_more_half.solution.time <= 1.5 * one_more_half.graph.time
    assert stored.proved
    assert one_more_half.proved


def test_fixed_values_leave_less_room():
    graph = unit_chain(4)
    states = {f"a{i}" for i in range(3)}
    assert (
        max_batch_size(graph, 24, fixed=states).batch_size
        > max_batch_size(graph, 24).batch_size
        > max_batch_size(with_batch(graph, 2), 24, of_batch=1).batch_size
    )
    assert max_batch_size(with_batch(graph, 2), 24, of_batch=2).batch_size == (
        max_batch_size(graph, 24).batch_size
    )


@pytest.mark.sweep
def test_a_solver_that_finds_less_gives_less():
    graph = unit_chain(6)
    assert (
        max_batch_size(graph, 45, solver="store-all").batch_size
        < max_batch_size(graph, 45, solver="chen-greedy").batch_size
        <= max_batch_size(graph, 45).batch_size
    )


def test_what_never_fits_and_what_always_does():
    graph = unit_chain(3)
    nothing = max_batch_size(graph, 1)
    assert (nothing.batch_size, nothing.graph, nothing.solution) == (0, None, None)
    assert nothing.proved
    with pytest.raises(InvalidProblem, match="grow with the batch"):
        max_batch_size(graph, 1000, fixed=set(graph.value_by_name))
    with pytest.raises(InvalidProblem, match="budget_bytes="):
        max_batch_size(graph, 0)
