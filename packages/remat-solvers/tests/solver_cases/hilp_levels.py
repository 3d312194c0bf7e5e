"""What the tests of H-ILP share: random cases, and a solve."""

import numpy as np
from hypothesis import strategies as st

from remat_solvers import Limit, Problem
from remat_solvers.core.trace import trace
from solver_cases.random_graphs import trainings
from solver_cases.random_hierarchies import branching, nested

small = st.one_of(branching(6), trainings(6)).flatmap(nested)


def silent(progress):
    pass


def solved(solver, graph, budget, hierarchy=None, seconds=10.0, executor=None, report=silent):
    problem = Problem(graph, budget, hierarchy, executor)
    return solver.solve(problem, Limit.starting_now(seconds), report)


def some_staged_schedule(stages, random):
    """Draw a schedule of the stages in which all that is computed again is of use."""
    kept = np.array([[random.random() < 0.4 for _ in row] for row in stages.may_keep()])
    run = stages.least_run(kept)
    while True:
        now = trace(stages.wiring, stages.sequence(run))
        less = stages.least_run(stages.read_off(now))
        if np.array_equal(run, less):
            return now
        run = less
