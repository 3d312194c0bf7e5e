"""What fits between the halves bounds the time of every schedule, in whatever order."""

import heapq
import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.answers import peak_of
from solver_cases.random_graphs import graphs, trainings
from solver_cases.random_hierarchies import branching, nested
from solver_cases.smallest_budgets import smallest

from remat_graph import Status
from remat_graph.testing import in_blocks, unit_chain
from remat_solvers import Limit, Problem
from remat_solvers.bounds.kept_bytes import KeptBytesProgram
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.hierarchical.hilp import HILP
from remat_solvers.testing.brute_force import overwritten

thorough = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
halved = st.one_of(graphs(6, 7), trainings(3), branching(2)).filter(lambda g: g.boundary)


def fastest_in_any_order(graph, budget):
    """Return the least time of all legal schedules within a budget; infinity if nothing fits."""
    names = [v for op in graph.ops for v in op.outputs]
    bit = {v: 1 << i for i, v in enumerate(names)}
    size = {v: graph.value_by_name[v].size_bytes for v in names}
    done_bit = {op.name: 1 << i for i, op in enumerate(graph.ops)}
    wanted = sum(bit[v] for v in graph.results if v in bit)
    everything = (1 << len(graph.ops)) - 1
    distance, heap = {(0, 0): 0.0}, [(0.0, (0, 0))]
    while heap:
        time, state = heapq.heappop(heap)
        done, alive = state
        if time > distance[state]:
            continue
        if done == everything and alive & wanted == wanted:
            return time
        held = sum(size[v] for v in names if alive & bit[v])
        following = [((done, alive & ~bit[v]), 0.0) for v in names if alive & bit[v]]
        for op in graph.ops:
            reads = sum(bit[v] for v in op.inputs if v in bit)
            earlier = sum(done_bit[name] for name in op.order_after)
            again = done & done_bit[op.name] and not op.replayable
            if reads & ~alive or earlier & ~done or again:
                continue
            makes = sum(bit[v] for v in op.outputs)
            made = sum(size[v] for v in op.outputs) + op.workspace_bytes
            for over in overwritten(op):
                if held + made - sum(size[v] for v in over) <= budget:
                    left = alive & ~sum(bit[v] for v in over)
                    following.append(((done | done_bit[op.name], left | makes), op.time))
        for new, cost in following:
            if time + cost < distance.get(new, math.inf):
                distance[new] = time + cost
                heapq.heappush(heap, (time + cost, new))
    return math.inf


@thorough
@given(halved, st.integers(0, 100))
def test_no_schedule_in_any_order_is_faster(graph, share):
    least_bytes, most_bytes = smallest(graph), peak_of(graph)
    budget = max(1, least_bytes + (most_bytes - least_bytes) * share // 100 - (share < 20))
    keeping = KeptBytesProgram(Wiring.of(graph), any_order=True)
    best = fastest_in_any_order(graph, budget)
    assert graph.time <= keeping.bound(budget, NO_LIMIT) <= best * (1 + 1e-9)
    ordered = KeptBytesProgram(Wiring.of(graph)).bound(budget, NO_LIMIT)
    assert keeping.bound(budget, NO_LIMIT) <= ordered * (1 + 1e-9)


@pytest.mark.sweep
@settings(thorough, max_examples=6)
@given(st.one_of(branching(2), trainings(3)).flatmap(nested), st.integers(0, 100))
def test_the_bounds_of_h_ilp_are_below_the_optimum_in_any_order(hierarchy, share):
    graph = hierarchy.graph
    least_bytes, most_bytes = smallest(graph), peak_of(graph)
    assume(least_bytes < most_bytes)
    budget = max(1, least_bytes + (most_bytes - 1 - least_bytes) * share // 100)
    told = []
    problem = Problem(graph, budget, hierarchy)
    solution = HILP().solve(problem, Limit.starting_now(10.0), told.append)
    best = fastest_in_any_order(graph, budget)
    assert solution.status is not Status.INFEASIBLE
    assert solution.lower_bound <= best * (1 + 1e-9)
    assert all(progress.lower_bound <= best * (1 + 1e-9) for progress in told)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_h_ilp_proves_more_than_computing_everything_once(share):
    graph = unit_chain(12)
    problem = Problem(graph, int(share * peak_of(graph)), in_blocks(graph))
    solution = HILP().solve(problem, Limit.starting_now(NO_LIMIT), lambda progress: None)
    assert graph.time < solution.lower_bound <= solution.time
