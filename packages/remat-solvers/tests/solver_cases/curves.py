"""What the tests of curves share."""

import importlib
import math

import numpy as np

from remat_graph import Solution, Status, simulate
from remat_graph.testing import unit_chain
from remat_solvers import store_all, with_batch
from remat_solvers.core.store_all import StoreAll
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.queries import curve
from remat_solvers.queries import tradeoff as tradeoff_module
from remat_solvers.registry import Chosen
from remat_solvers.search.evict import evict

ORIGIN = "nowhere 0.0"
# By name: `remat_solvers.solve` is the function.
SOLVE = importlib.import_module("remat_solvers.solve")
CHAIN = with_batch(unit_chain(6), 10)
PEAK = simulate(CHAIN, store_all(CHAIN)).peak_bytes


def check(graph, found):
    """What holds for every curve."""
    budgets = [point.budget_bytes for point in found.points]
    assert budgets == sorted(set(budgets))
    for point in found.points:
        solution = point.solution
        if solution is None:
            assert point.status is (Status.INFEASIBLE if point.proved_infeasible else Status.LIMIT)
            assert (point.lower_bound is None) == point.proved_infeasible
            continue
        assert not point.proved_infeasible
        timeline = simulate(graph, solution.schedule)
        assert timeline.peak_bytes == solution.peak_bytes <= point.budget_bytes
        assert solution.time == timeline.time >= point.lower_bound == solution.lower_bound
        assert solution.peak_bytes >= found.smallest_bytes
    times = [math.inf if p.solution is None else p.solution.time for p in found.points]
    bounds = [math.inf if p.lower_bound is None else p.lower_bound for p in found.points]
    assert times == sorted(times, reverse=True)
    assert bounds == sorted(bounds, reverse=True)
    assert found.least_bytes <= found.smallest_bytes <= found.store_all_peak_bytes


class Fake(StoreAll):
    """Answers by a function of the problem, and remembers what it was asked."""

    name = "fake"

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def solve(self, problem, limit, report):
        self.asked.append((problem.budget_bytes, limit.seconds, problem.start))
        return self.answer(problem)


def answered_by(patch, answer):
    """Let curves ask a solver that answers so; give it."""
    made = Fake(answer)
    for module in (SOLVE, tradeoff_module, curve):
        patch.setattr(module, "resolve_solver", lambda name: Chosen(made, name, ORIGIN, None))
    return made


def nothing(problem, status=Status.LIMIT, bound=None):
    return Solution(status, None, math.inf, 0, bound, "fake", 0.0)


def repaired(problem, bound=None):
    """Some schedule that fits, or nothing."""
    wiring = Wiring.of(problem.graph)
    found = evict(wiring, np.arange(wiring.op_count), problem.budget_bytes)
    if found.peak_bytes > problem.budget_bytes:
        return nothing(problem)
    schedule = expand(wiring, found.sequence)
    return Solution(Status.FEASIBLE, schedule, 0.0, 0, bound, "fake", 0.0)
