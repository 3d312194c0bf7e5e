"""Plans say where what a solver proves is not certified."""

import importlib
from dataclasses import replace

import pytest

import remat
from remat.cache import cached_solution, keep_smallest, keep_solution
from remat.planning.solving import solution_for
from remat_graph import Solution, Status, simulate
from remat_graph.testing import unit_chain
from remat_solvers import BrokenSolver, smallest_budget, store_all
from remat_solvers.core.store_all import StoreAll

GRAPH = unit_chain(4)
DOUBT = "HIGHS was wrong in this process: it lied"


def test_a_plan_says_so_and_keeps_it_in_its_file():
    plan = remat.Plan.of(GRAPH, store_all(GRAPH), 100)
    assert "not certified" not in str(plan)
    doubted = replace(plan, doubt=DOUBT)
    assert f"  not certified        {DOUBT}" in str(doubted)
    assert remat.Plan.decode(doubted.encode()).solution.doubt == DOUBT


def test_what_is_not_certified_is_not_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    solution = remat.Plan.of(GRAPH, store_all(GRAPH), 100).solution
    for doubt in (DOUBT, None):
        keep_solution(GRAPH, 100, "auto", None, replace(solution, doubt=doubt))
        assert (cached_solution(GRAPH, 100, "auto", None) is None) == (doubt is not None)


def test_a_refusal_is_held_against_what_was_known_from_before(monkeypatch):
    """Here the solver, and the search for the minimal peak after it, know less."""

    class Pessimist(StoreAll):
        def solve(self, problem, limit, report):
            return Solution(Status.INFEASIBLE, None, 0.0, 0, None, self.name, 0.0)

    smallest = smallest_budget(GRAPH)
    keep_smallest(GRAPH, smallest.schedule)
    peak = simulate(GRAPH, store_all(GRAPH)).peak_bytes
    blind = replace(smallest, peak_bytes=peak, schedule=store_all(GRAPH))
    solve = importlib.import_module("remat_solvers.solve")  # the name of the function hides it
    monkeypatch.setattr(solve, "smallest_budget", lambda *_, **__: blind)
    with pytest.raises(BrokenSolver, match="nothing fits 3 bytes, but a schedule of 'an earlier"):
        solution_for(GRAPH, 3, 3, Pessimist(), 1.0, None)
