from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from solver_cases.alternatives import packable, trainings_with_alternatives

from remat_graph import Compute, Graph, Op, Status, Value, simulate
from remat_solvers import BudgetTooSmall, Limit, Problem, solve, store_all
from remat_solvers.published.baselines.gist import Gist


def computed(solution):
    return [step.op for step in solution.schedule if isinstance(step, Compute)]


def with_copies(graph: Graph) -> Graph:
    """Add to each value of the forward half a copy of half its size, and what unpacks it."""
    values, ops = list(graph.values), []
    for op in graph.ops:
        ops.append(op)
        if op.name.startswith("f"):
            (v,) = op.outputs
            values.append(Value(f"{v}h", 50))
            ops.append(Op(f"pack {v}", (v,), (f"{v}h",), 0.2, optional=True))
            ops.append(Op(f"unpack {v}", (f"{v}h",), (v,), 0.2, alternative_of=op.name))
    return replace(graph, values=tuple(values), ops=tuple(ops))


def test_every_mask_is_kept_and_nothing_runs_twice():
    graph = packable(5)
    found = solve(graph, 10**6, solver="gist")
    ops = computed(found)
    assert len(set(ops)) == len(ops)
    assert {f"b{i} by mask" for i in range(4)} <= set(ops)
    assert found.peak_bytes == 240 < simulate(graph, store_all(graph)).peak_bytes


def test_what_has_no_mask_is_kept_in_a_smaller_copy():
    graph = with_copies(packable(5).without_alternatives())
    found = solve(graph, 10**6, solver="gist")
    ops = computed(found)
    assert len(set(ops)) == len(ops)
    assert {f"unpack a{i}" for i in range(4)} <= set(ops)
    assert found.peak_bytes < simulate(graph, store_all(graph)).peak_bytes - 100


@pytest.mark.sweep
def test_there_is_one_schedule_whatever_the_budget():
    graph = packable(5)
    tight, wide = (solve(graph, budget, solver="gist") for budget in (240, 10**6))
    assert tight.schedule == wide.schedule
    with pytest.raises(BudgetTooSmall):
        solve(graph, 239, solver="gist")


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(trainings_with_alternatives())
def test_answers_hold(graph):
    problem = Problem(graph, 10**6)
    found = Gist().solve(problem, Limit.starting_now(1.0), lambda now: None)
    if found.schedule is None:
        assert found.status is Status.LIMIT
    else:
        assert simulate(graph, found.schedule).peak_bytes == found.peak_bytes
