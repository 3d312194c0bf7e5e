"""The peak that budgets are shares of, and what the answers of some solvers are held against."""

from __future__ import annotations

import pytest

from remat_graph import Graph, Solution, Status, simulate
from remat_solvers import store_all
from remat_solvers.testing.brute_force import fastest
from solver_cases.staged_brute_force import fastest_staged


def peak_of(graph: Graph) -> int:
    """Return what storing everything takes, in bytes."""
    return simulate(graph, store_all(graph)).peak_bytes


def check_of_chain(graph: Graph, budget: int, solution: Solution) -> None:
    """Hold an answer of the rotors against the simulator."""
    if solution.schedule is None:
        assert solution.status is Status.LIMIT
        return
    timeline = simulate(graph, solution.schedule)
    assert timeline.peak_bytes == solution.peak_bytes <= budget
    assert timeline.time == solution.time >= graph.time
    assert (solution.status is Status.OPTIMAL) == (solution.time == graph.time)


def check_staged(graph: Graph, budget: int, solution: Solution) -> None:
    """Hold an answer with Checkmate's stages against brute force, at a budget that fits."""
    best = fastest(graph, budget)
    assert solution.status in (Status.OPTIMAL, Status.FEASIBLE, Status.LIMIT)
    assert solution.lower_bound <= best * (1 + 1e-9)
    if fastest_staged(graph, budget) == best:
        assert solution.time == pytest.approx(best, rel=2e-6)
    if solution.schedule is not None:
        timeline = simulate(graph, solution.schedule)
        assert (timeline.peak_bytes, timeline.time) == (solution.peak_bytes, solution.time)
        assert timeline.peak_bytes <= budget
    if solution.status is Status.OPTIMAL:
        assert solution.time == pytest.approx(best, rel=2e-6)
