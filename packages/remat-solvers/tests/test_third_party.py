"""A solver of another distribution, which has only public names to build on."""

import ast
import importlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases import third_party
from solver_cases.answers import peak_of
from solver_cases.random_graphs import graphs, trainings
from solver_cases.smallest_budgets import smallest

from remat_graph import Status, simulate
from remat_graph.testing import unit_chain
from remat_solvers import Limit, Problem, cite, list_solvers, solve
from remat_solvers.testing import check_solver
from remat_solvers.testing.brute_force import fastest

SOURCE = Path(third_party.__file__).read_text()
PUBLIC = {"remat_graph", "remat_solvers", "remat_solvers.toolkit"}


def test_it_needs_public_names_alone():
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("remat"):
            assert node.module in PUBLIC
            offered = importlib.import_module(node.module).__all__
            assert {alias.name for alias in node.names} <= set(offered)


def test_it_is_found_by_its_entry_point(install):
    install("third", "1.2", SOURCE, perturbed="Perturbed")
    assert list_solvers()["perturbed"].origin == "third 1.2 (third_code:Perturbed)"
    assert cite("perturbed").startswith("An example")
    graph = unit_chain(8)
    solution = solve(graph, peak_of(graph) - 2, solver="perturbed(tries=6)", limit_seconds=60)
    assert solution.solver == "perturbed(tries=6)"
    assert solution.status is Status.OPTIMAL
    assert solution.time > graph.time


@pytest.mark.sweep
def test_it_does_what_it_says():
    check = check_solver(third_party.Perturbed, problems=30)
    assert not check.faults
    assert check.proved > check.problems / 3


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(graphs(), trainings()), st.integers(0, 100))
def test_its_bound_is_below_the_optimum_and_its_start_is_kept(graph, share):
    least_bytes, most_bytes = smallest(graph), peak_of(graph)
    budget = max(1, least_bytes + (most_bytes - least_bytes) * share // 100)
    solver, told = third_party.Perturbed(), []
    first = solver.solve(Problem(graph, budget), Limit.starting_now(3600.0), told.append)
    best = fastest(graph, budget)
    assert first.status is not Status.INFEASIBLE
    assert all(progress.lower_bound <= best * (1 + 1e-9) for progress in told)
    if first.schedule is not None:
        begun = Problem(graph, budget, start=first.schedule)
        second = third_party.Perturbed(tries=0).solve(
            begun, Limit.starting_now(3600.0), told.append
        )
        assert simulate(graph, second.schedule).time <= first.time * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_it_proves_more_than_computing_everything_once(share):
    graph = unit_chain(10)
    budget = int(share * peak_of(graph))
    solution = solve(graph, budget, solver=third_party.Perturbed(), limit_seconds=60)
    assert graph.time < solution.lower_bound <= solution.time
