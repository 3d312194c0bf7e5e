"""Solving slightly below a budget, where the points of a program break it by tolerances."""

import math

import numpy as np
import pytest

from remat_solvers.core.attempt import solve_below
from remat_solvers.core.milp import Answer, Outcome

POINT = np.zeros(1)


@pytest.mark.parametrize(
    ("outcome", "point", "fitting", "asked", "ended"),
    [
        (Outcome.SOLVED, POINT, 1, 1, "solved"),
        (Outcome.SOLVED, POINT, 3, 3, "solved"),
        (Outcome.STOPPED, POINT, 2, 2, "stopped"),
        (Outcome.SOLVED, POINT, 4, 3, "has only points within its tolerances"),
        (Outcome.STOPPED, None, 1, 1, "stopped"),
        (Outcome.INFEASIBLE, None, 1, 1, "is infeasible"),
    ],
)
def test_less_is_asked_for_until_a_point_fits(outcome, point, fitting, asked, ended):
    shares = []

    def solve(share, seconds):
        assert seconds > 0
        shares.append(share)
        return Answer(outcome, point, 0.0, 0.0)

    answer, how = solve_below(solve, lambda _: len(shares) == fitting, math.inf)
    assert (answer.outcome, how) == (outcome, ended)
    assert len(shares) == asked
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1


def test_without_time_nothing_is_asked():
    assert solve_below(None, None, -math.inf) == (None, "is out of time")
