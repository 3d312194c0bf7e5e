"""How a curve is asked for: what is refused, progress, Ctrl-C, and executors."""

import functools
import math
from concurrent.futures import Executor, Future

import pytest
from solver_cases.curves import CHAIN, PEAK, answered_by, check, nothing, repaired

from remat_graph import Status
from remat_solvers import (
    InvalidProblem,
    UnknownSolver,
    UnsuitableSolver,
    WorkerDied,
    max_batch_size,
    solve,
    tradeoff,
)
from remat_solvers.published.rotor import Rotor
from remat_solvers.queries import curve


@pytest.fixture
def fake(monkeypatch):
    return functools.partial(answered_by, monkeypatch)


@pytest.mark.parametrize("points", [1, 0, -3, 2.5, True, "8"])
def test_points_that_are_no_curve_are_refused(points):
    with pytest.raises(InvalidProblem, match="points="):
        tradeoff(CHAIN, points=points)


@pytest.mark.parametrize(
    "budgets",
    [[], (), "", [0], [-1], [0.0], [-0.5], [1.5], [math.nan], [math.inf], [True], ["8GiB"], [None],
     "50%", [0.5, 0]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_budget_is_refused(budgets):
    with pytest.raises(InvalidProblem, match="budget"):
        tradeoff(CHAIN, budgets=budgets)


def test_what_else_is_refused_before_work(fake, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("work was done")

    with monkeypatch.context() as patch:
        patch.setattr(curve, "smallest_budget", never)
        with pytest.raises(UnknownSolver):
            tradeoff(CHAIN, solver="refined")
        with pytest.raises(InvalidProblem, match="limit_seconds"):
            tradeoff(CHAIN, limit_seconds=-1)
    fake(repaired).needs_hierarchy = True
    with pytest.raises(UnsuitableSolver, match="hierarchy"):
        tradeoff(CHAIN, solver="fake", budgets=[PEAK - 10])


def test_progress_after_every_point():
    reports = []
    found = tradeoff(CHAIN, points=4, progress=reports.append)
    done = [report for report in reports if report.message.startswith(f"{report.round} of 4, ")]
    assert [report.round for report in done] == [1, 2, 3, 4]
    assert "optimal" in done[0].message
    assert any(report.solver == "refine" and "of 4: " in report.message for report in reports)
    assert done[-1].incumbent_time == found.points[0].solution.time


def test_what_the_progress_raises_is_raised(fake):
    fake(repaired)

    def full(report):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        tradeoff(CHAIN, progress=full)


def test_ctrl_c_is_raised(fake):
    def answer(problem):
        raise KeyboardInterrupt

    fake(answer)
    with pytest.raises(KeyboardInterrupt):
        tradeoff(CHAIN, solver="fake")


class Recorded(Executor):
    """Runs at once, with a number of workers; records what it was given."""

    def __init__(self, workers=None):
        self.calls = []
        if workers is not None:
            self._max_workers = workers

    def submit(self, function, /, *arguments):
        self.calls.append(arguments)
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.mark.parametrize(
    "workers",
    [
        None,
        pytest.param(1, marks=pytest.mark.sweep),
        2,
        pytest.param(3, marks=pytest.mark.sweep),
        pytest.param(50, marks=pytest.mark.sweep),
    ],
)
def test_the_executor_gives_the_same_kind_of_curve(workers):
    executor = Recorded(workers)
    here = tradeoff(CHAIN, points=5)
    found = tradeoff(CHAIN, points=5, executor=executor)
    check(CHAIN, found)
    assert [(p.budget_bytes, p.solution.time) for p in found.points] == [
        (p.budget_bytes, p.solution.time) for p in here.points
    ]
    assert 1 <= len(executor.calls) <= 4


def test_the_time_of_an_executor_is_shared_by_rounds(fake):
    solver = fake(nothing)
    budgets = list(range(PEAK - 40, PEAK, 10))
    tradeoff(CHAIN, budgets=budgets, solver="fake", executor=Recorded(2), limit_seconds=1000)
    seconds = [limit for _, limit, _ in solver.asked]
    assert len(seconds) == 4
    assert all(400 < s <= 500 for s in seconds[:2])
    assert all(900 < s <= 1000 for s in seconds[2:])


def test_an_object_is_asked_in_processes_too(processes):
    found = tradeoff(CHAIN, points=3, solver=Rotor(slots=40), limit_seconds=6, executor=processes)
    assert found.solver == "rotor(slots=40)"
    asked = {point.solution.solver for point in found.points}
    assert asked <= {"rotor(slots=40)", "store-all", "smallest-budget"}
    middle = found.points[1].budget_bytes
    assert solve(CHAIN, middle, solver=Rotor(slots=40)).time >= found.points[1].solution.time
    assert max_batch_size(CHAIN, 60, solver=Rotor(slots=40)).batch_size >= 1


def test_a_pool_of_processes(processes):
    found = tradeoff(CHAIN, points=4, executor=processes)
    check(CHAIN, found)
    assert all(point.status is Status.OPTIMAL for point in found.points)


def test_an_executor_that_loses_a_budget_says_which():
    class Cancelling(Recorded):
        def submit(self, function, /, *arguments):
            future = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    with pytest.raises(WorkerDied, match=rf"budget of {PEAK - 10} bytes"):
        tradeoff(CHAIN, budgets=[PEAK - 10], executor=Cancelling())
