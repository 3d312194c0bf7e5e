"""`check_solver` finds what is wrong with a solver, and nothing where nothing is."""

import dataclasses
import math
import time

import pytest
from solver_cases import NO_LIMIT

from remat_graph import Compute, Schedule, Solution, Status
from remat_solvers import UnknownSolver
from remat_solvers.core.store_all import StoreAll
from remat_solvers.published.baselines.xla_greedy import XLAGreedy
from remat_solvers.testing import SolverCheckFailed, check_solver, solver_check


class Plain(StoreAll):
    """Stores everything, and is changed below."""

    takes_alternatives = False


class Illegal(Plain):
    def solve(self, problem, limit, report):
        steps = Schedule((Compute(problem.graph.ops[-1].name),))
        return Solution(Status.FEASIBLE, steps, 1.0, 1, None, self.name, 0.0)


class OverBudget(Plain):
    def solve(self, problem, limit, report):
        return super().solve(dataclasses.replace(problem, budget_bytes=10**9), limit, report)


class WrongPeak(Plain):
    def solve(self, problem, limit, report):
        return dataclasses.replace(super().solve(problem, limit, report), peak_bytes=-1)


class WrongTime(Plain):
    def solve(self, problem, limit, report):
        answer = super().solve(problem, limit, report)
        return dataclasses.replace(answer, time=answer.time / 2, lower_bound=None)


class BoundOfItsOwn(XLAGreedy):
    """Claims the time of its own schedule, which only brute force refutes."""

    def solve(self, problem, limit, report):
        answer = super().solve(problem, limit, report)
        return dataclasses.replace(answer, lower_bound=answer.time if answer.schedule else None)


class FalseOptimal(XLAGreedy):
    def solve(self, problem, limit, report):
        answer = super().solve(problem, limit, report)
        status = Status.OPTIMAL if answer.schedule else answer.status
        return dataclasses.replace(answer, status=status)


class FalseInfeasible(Plain):
    def solve(self, problem, limit, report):
        answer = super().solve(problem, limit, report)
        status = answer.status if answer.schedule else Status.INFEASIBLE
        return dataclasses.replace(answer, status=status)


class Empty(Plain):
    def solve(self, problem, limit, report):
        return dataclasses.replace(super().solve(problem, limit, report), schedule=None)


class Typeless(Plain):
    def solve(self, problem, limit, report):
        return None


class Failing(Plain):
    def solve(self, problem, limit, report):
        raise ZeroDivisionError("of all things")


class Dumb(Plain):
    def can_solve(self, problem):
        return ""


class Choosy(Plain):
    def can_solve(self, problem):
        return "it is Monday"


class Boastful(XLAGreedy):
    exact = True


class Vague(Plain):
    exact = "sometimes"


class Nameless(Plain):
    name = " "


class Deaf(XLAGreedy):
    def solve(self, problem, limit, report):
        def kept(progress):
            try:
                report(progress)
            except Exception:
                return

        return super().solve(problem, limit, kept)


class Optimist(XLAGreedy):
    """Reports a bound that does not hold."""

    def solve(self, problem, limit, report):
        def more(progress):
            report(dataclasses.replace(progress, lower_bound=math.inf))

        return super().solve(problem, limit, more)


class Slow(Plain):
    def solve(self, problem, limit, report):
        if len(problem.graph.ops) > 100:
            time.sleep(0.3)
        return super().solve(problem, limit, report)


@pytest.mark.parametrize(
    ("solver", "fault"),
    [
        (Illegal, "its schedule is illegal"),
        (OverBudget, r"peaks at \d+ bytes, over the budget of \d+"),
        (WrongPeak, "it says that its schedule peaks at -1 bytes, not"),
        (WrongTime, r"it says that its schedule takes \S+, not"),
        (BoundOfItsOwn, r"claims the bound \S+, but a schedule of time \S+ fits"),
        (FalseOptimal, r"claims that a time of \S+ is optimal, but one of \S+ fits"),
        (FalseInfeasible, "claims that nothing fits, but a schedule"),
        (Empty, "claims 'optimal' with no schedule"),
        (Typeless, "it returned None, no Solution"),
        (Failing, r"it raised ZeroDivisionError: of all things \(.*test_check_solver.py:\d+\)"),
        (Dumb, "it refused without a reason: ''"),
        (Choosy, "it solved none of these problems"),
        (Boastful, r"it says that it is exact, but proved \d+ of \d+"),
        (Vague, "its `exact` is 'sometimes'"),
        (Nameless, "its `name` is no text"),
        (Deaf, "it went on where its report raised"),
        (Optimist, "it reported the bound inf"),
    ],
)
def test_what_is_wrong_is_found(solver, fault):
    with pytest.raises(SolverCheckFailed, match=fault) as caught:
        check_solver(solver, problems=24)
    assert caught.value.check.faults
    assert str(caught.value).startswith(f"solver '{solver.name}': ")


def test_a_solve_that_does_not_end_is_found(monkeypatch):
    monkeypatch.setattr(solver_check, "_LATE_SECONDS", 0.2)
    with pytest.raises(SolverCheckFailed, match=r"within 0 s: it took \d+\.\d s"):
        check_solver(Slow, problems=1)


@pytest.mark.parametrize(
    "name",
    [
        "store-all",
        "checkmate",
        pytest.param("h-tw-remat", marks=pytest.mark.sweep),
        pytest.param("chen-greedy", marks=pytest.mark.sweep),
    ],
)
def test_nothing_is_found_where_nothing_is(monkeypatch, name):
    monkeypatch.setattr(solver_check, "_LATE_SECONDS", NO_LIMIT)
    check = check_solver(name, problems=24, limit_seconds=NO_LIMIT)
    assert check.faults == []
    assert check.solved
    assert check.problems >= 27
    assert name in str(check)


@pytest.mark.sweep
def test_a_solver_of_alternatives_is_given_some(monkeypatch):
    monkeypatch.setattr(solver_check, "_LATE_SECONDS", NO_LIMIT)
    assert check_solver("refine", problems=1, limit_seconds=1).problems == 8


def test_settings_that_cannot_be_told_are_noted():
    class Secret(Plain):
        def __init__(self, slots=3):
            self._slots = slots

    (note,) = check_solver(Secret(), problems=1).notes
    assert "its solutions are not cached" in note


def test_an_unknown_name_is_no_fault():
    with pytest.raises(UnknownSolver):
        check_solver("nosuch")
