"""What every solver of the registry owes, on random graphs and budgets, against brute force."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.chains import chains
from solver_cases.edge_graphs import hierarchies, side_by_side, single_ops
from solver_cases.random_graphs import graphs, trainings

from remat_graph import Block, Compute, Hierarchy, Solution, Stage, simulate
from remat_graph.testing import unit_chain
from remat_solvers import Limit, Problem, get_solver, list_solvers, solve, store_all
from remat_solvers.testing import fastest
from remat_solvers.testing.answer_faults import faults

SECONDS = 3.0
EXAMPLES = 25

small = st.one_of(
    graphs(most_ops=7, most_values=8),
    trainings(most_depth=3),
    chains(most_stages=3),
    single_ops(),
    side_by_side(graphs(most_ops=3, most_values=4)),
    side_by_side(chains(most_stages=1)),
)


@st.composite
def problems(draw, with_hierarchy: bool) -> Problem:
    """A small graph, and a budget between too little and a little more than storing everything."""
    graph = draw(small)
    roomy = simulate(graph, store_all(graph)).peak_bytes + 1
    budget = max(1, roomy - draw(st.integers(0, roomy * 2 // 3)))
    return Problem(graph, budget, draw(hierarchies(graph)) if with_hierarchy else None)


def in_order(problem: Problem, solution: Solution) -> bool:
    """Whether the first computations are in the order of the graph."""
    steps = [step.op for step in solution.schedule.steps if isinstance(step, Compute)]
    return list(dict.fromkeys(steps)) == [op.name for op in problem.graph.ops]


def check(problem: Problem, solution: Solution) -> None:
    """Hold an answer against the simulator and brute force.

    Bounds, `OPTIMAL` and `INFEASIBLE` are claims about schedules in the order of the graph.
    """
    best = fastest(problem.graph, problem.budget_bytes)
    assert faults(problem, solution, best) == []
    if solution.schedule is not None and in_order(problem, solution):  # else brute force is wrong
        assert best is not None
        assert best <= solution.time * (1 + 1e-9)


@pytest.mark.parametrize("name", list_solvers())
def test_every_answer_holds(name):
    solver = get_solver(name)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(problems(solver.needs_hierarchy))
    def answers(problem):
        reason = solver.can_solve(problem)
        if reason is not None:
            assert isinstance(reason, str)
            assert reason.strip()
            return
        solution = solver.solve(problem, Limit.starting_now(SECONDS), lambda progress: None)
        check(problem, solution)

    answers()


@pytest.mark.parametrize("name", list_solvers())
def test_a_chain_with_room_is_solved(name):
    """No solver passes by refusing everything."""
    graph = unit_chain(4)
    names = tuple(op.name for op in graph.ops[: graph.boundary_index])
    hierarchy = Hierarchy(graph, Block("root", (*names[:1], Block("rest", names[1:]))))
    solution = solve(graph, 100, solver=name, hierarchy=hierarchy, limit_seconds=SECONDS)
    check(Problem(graph, 100), solution)
    assert solution.schedule is not None


def test_the_cases_are_as_odd_as_they_should_be():
    """Every oddity that the module promises is drawn."""
    found = set()

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
    @given(small)
    def look(graph):
        sizes = [graph.value_by_name[v].size_bytes for op in graph.ops for v in op.outputs]
        reading = [v for op in graph.ops for v in op.inputs if v not in graph.resident]
        oddities = {
            "no bytes": 0 in sizes,
            "no time": any(op.time == 0 for op in graph.ops),
            "one op": len(graph.ops) == 1,
            "apart": len(graph.ops) > 1 and not reading,
            "workspace": any(op.workspace_bytes for op in graph.ops),
            "results": len(graph.results) > 1,
            "no result": not graph.results,
            "once": any(not op.replayable for op in graph.ops),
            "two halves": {op.stage for op in graph.ops} == set(Stage),
            "forward only": {op.stage for op in graph.ops} == {Stage.FORWARD},
            "twins": any(op.twin for op in graph.ops),
            "order": any(op.order_after for op in graph.ops),
            "several outputs": any(len(op.outputs) > 1 for op in graph.ops),
        }
        found.update(oddity for oddity, there in oddities.items() if there)

    look()
    assert len(found) == 13, found


@pytest.mark.parametrize("name", list_solvers())
def test_no_time_at_all_is_no_excuse(name):
    """At a limit of 0 an answer still holds."""
    solver = get_solver(name)

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    @given(problems(solver.needs_hierarchy))
    def answers(problem):
        if solver.can_solve(problem) is None:
            solution = solver.solve(problem, Limit.starting_now(0.0), lambda progress: None)
            check(problem, solution)

    answers()
