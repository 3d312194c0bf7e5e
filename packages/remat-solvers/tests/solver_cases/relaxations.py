"""What the tests of refine share."""

import pytest

from remat_solvers import Limit, Problem
from remat_solvers.refine import Refine
from solver_cases import NO_LIMIT


def refine(graph, budget, seconds=3.0, report=lambda progress: None):
    return Refine().solve(Problem(graph, budget), Limit.starting_now(seconds), report)


class Enough(Exception):
    """What was waited for was reported."""


def until(graph, budget, enough):
    """Solve until a report is enough, however long that takes; give that report."""

    def report(progress):
        if enough(progress):
            raise Enough(progress)

    with pytest.raises(Enough) as reached:
        refine(graph, budget, NO_LIMIT, report)
    return reached.value.args[0]


def first_schedule(graph, budget):
    return until(graph, budget, lambda progress: progress.incumbent is not None).incumbent()
