"""What is claimed of all schedules, held against those in hand: plug-ins and back ends that lie."""

import dataclasses
import importlib
import itertools
import math
import pickle
import time

import pytest
from solver_cases import NO_LIMIT

from remat_graph import Compute, Free, Graph, Op, Schedule, Solution, Status, Value, simulate
from remat_graph.testing import unit_chain, with_mask
from remat_solvers import (
    BackEndFailed,
    BrokenSolver,
    BudgetTooSmall,
    UnsuitableSolver,
    WorkerDied,
    smallest_budget,
    solve,
    store_all,
    tradeoff,
)
from remat_solvers.core import milp, trust
from remat_solvers.core.alternatives import store_all_sequence
from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.milp import Answer, Outcome
from remat_solvers.core.problem import Limit, silent
from remat_solvers.core.store_all import StoreAll
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.minimal_peak.programs import Lowest
from remat_solvers.published.checkmate.rounding import CheckmateRounding
from remat_solvers.published.monet import Monet
from remat_solvers.published.monet import solver as monet_solver
from remat_solvers.refine.construct import _InWays

SOLVE = importlib.import_module("remat_solvers.solve")  # the name of the function hides it
GRAPH = unit_chain(6)
WIRING = Wiring.of(GRAPH)
PEAK = simulate(GRAPH, store_all(GRAPH)).peak_bytes
LEAST = smallest_budget(GRAPH, limit_seconds=NO_LIMIT)
SLOW = simulate(GRAPH, LEAST.schedule)
FAST = solve(GRAPH, PEAK - 1, limit_seconds=NO_LIMIT)
WITHOUT_STARTS = CheckmateRounding(pruned=False)


class Plugin(StoreAll):
    """Answers as it is told."""

    name = "plugin"

    def __init__(self, answer):
        self.answer = answer

    def solve(self, problem, limit, report):
        return self.answer(problem)


def nothing(status=Status.LIMIT, bound=None):
    return Solution(status, None, math.inf, 0, bound, "plugin", 0.0)


def slow(status=Status.FEASIBLE, bound=None):
    return Solution(status, LEAST.schedule, SLOW.time, SLOW.peak_bytes, bound, "plugin", 0.0)


@pytest.mark.parametrize(
    ("answer", "budget", "start", "message"),
    [
        (nothing(Status.INFEASIBLE), PEAK, None, f"nothing fits {PEAK} bytes, .* 'store-all'"),
        (nothing(Status.INFEASIBLE), PEAK - 1, FAST.schedule, f"fits {PEAK - 1} bytes, .* 'start'"),
        (nothing(Status.INFEASIBLE), PEAK - 1, None, f"fits {PEAK - 1} bytes, .* 'minimal-peak'"),
        (nothing(bound=1e9), PEAK, None, "the bound 1000000000.0 .* 'store-all' takes 12.0"),
        (slow(Status.OPTIMAL), PEAK, None, "that 20.0 is optimal .* 'store-all' takes 12.0"),
        (slow(Status.OPTIMAL), PEAK - 1, FAST.schedule, "optimal .* 'start' takes 13.0 within 5"),
        (slow(bound=19.0), PEAK - 1, FAST.schedule, "the bound 19.0 .* 'start' takes 13.0"),
    ],
)
def test_a_plugin_that_a_schedule_in_hand_refutes_is_broken(answer, budget, start, message):
    with pytest.raises(BrokenSolver, match=rf"'plugin' of .*Plugin is broken: it .*{message}"):
        solve(GRAPH, budget, solver=Plugin(lambda _: answer), start=start)


def test_a_plugin_is_refuted_by_what_it_reported_itself():
    class Forgetful(StoreAll):
        def solve(self, problem, limit, report):
            found = solve(problem.graph, problem.budget_bytes, solver="refine", progress=report)
            return dataclasses.replace(nothing(Status.INFEASIBLE), solver=found.solver)

    with pytest.raises(BrokenSolver, match="nothing fits 3 bytes, but a schedule"):
        solve(GRAPH, 3, solver=Forgetful())


def test_what_is_proved_and_true_is_told():
    told = solve(GRAPH, PEAK - 1, solver=Plugin(lambda _: slow(bound=13.0)))
    assert (told.time, told.lower_bound, told.doubt) == (SLOW.time, 13.0, None)
    with pytest.raises(BudgetTooSmall) as caught:
        solve(GRAPH, 1, solver=Plugin(lambda _: nothing(Status.INFEASIBLE)))
    assert caught.value.status is Status.INFEASIBLE


def test_a_faster_schedule_to_start_from_is_the_answer():
    solver = Plugin(lambda _: slow(bound=13.0))
    found = solve(GRAPH, PEAK - 1, solver=solver, start=FAST.schedule)
    assert (found.schedule, found.time, found.lower_bound) == (FAST.schedule, FAST.time, 13.0)
    for name in ("last-node", "pw-remat", "store-all"):
        assert solve(GRAPH, PEAK - 1, solver=name, start=FAST.schedule).time <= FAST.time


def in_pairs():
    """Two pairs of ops, of which the graph lists the firsts first, and a schedule pair by pair."""
    firsts = [Op(f"{name}1", (), (name,), 1.0, replayable=False) for name in "ab"]
    seconds = [Op(f"{name}2", (name,), (f"{name}'",), 1.0) for name in "ab"]
    values = tuple(Value(op.outputs[0], 10 if op in firsts else 1) for op in [*firsts, *seconds])
    results = frozenset(op.outputs[0] for op in seconds)
    graph = Graph(values, (*firsts, *seconds), frozenset(), results, None)
    pair_by_pair = [(Compute(f"{name}1"), Compute(f"{name}2"), Free(name)) for name in "ab"]
    return graph, Schedule(tuple(step for pair in pair_by_pair for step in pair))


@pytest.mark.parametrize(
    "solver", ["auto", "refine", "checkmate", Plugin(lambda _: nothing(Status.INFEASIBLE))]
)
def test_a_start_in_another_order_refutes_nothing_and_is_the_answer(solver):
    graph, start = in_pairs()
    with pytest.raises(BudgetTooSmall) as caught:
        solve(graph, 15, solver=solver)
    assert caught.value.status is Status.INFEASIBLE
    found = solve(graph, 15, solver=solver, start=start)
    assert (found.schedule, found.peak_bytes, found.status) == (start, 12, Status.FEASIBLE)
    assert (found.doubt, trust.doubt_of("HIGHS")) == (None, None)


def lie(monkeypatch, change):
    """Have the back end say something else."""
    read = milp._read
    monkeypatch.setattr(milp, "_read", lambda *given: change(read(*given)))


def infeasible(_: Answer) -> Answer:
    return Answer(Outcome.INFEASIBLE, None, math.inf, math.inf)


def too_high(answer: Answer) -> Answer:
    return dataclasses.replace(answer, bound=answer.value + 500)


@pytest.mark.parametrize("change", [infeasible, too_high])
@pytest.mark.parametrize(
    "solver", ["auto", pytest.param("refine", marks=pytest.mark.sweep), "checkmate", "rk-checkmate"]
)
def test_a_back_end_that_lies_is_not_believed_and_the_answer_says_so(monkeypatch, solver, change):
    now = itertools.count(step=0.001)  # of a clock that counts how often it is asked
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    lie(monkeypatch, change)
    found = solve(GRAPH, 3, solver=solver, limit_seconds=2)
    assert found.status is Status.FEASIBLE
    assert found.peak_bytes <= 3
    assert found.lower_bound == GRAPH.time
    assert found.doubt.startswith("HIGHS was wrong in this process: ")


@pytest.mark.parametrize("solver", ["refine", "checkmate"])
def test_from_then_on_nothing_is_certified_by_it(solver):
    assert solve(GRAPH, 3, solver=solver).status is Status.OPTIMAL
    trust.distrust("HIGHS", "it lied")
    found = solve(GRAPH, 3, solver="checkmate")
    assert (found.status, found.lower_bound) == (Status.FEASIBLE, GRAPH.time)
    assert found.doubt == "HIGHS was wrong in this process: it lied"
    certain = solve(GRAPH, PEAK)
    assert (certain.status, certain.doubt) == (Status.OPTIMAL, None)


def test_what_is_kept_after_an_interrupt_is_not_certified_by_it():
    def interrupt(progress):
        if progress.incumbent is not None:
            trust.distrust("HIGHS", "it lied")
            raise KeyboardInterrupt

    found = solve(GRAPH, 3, solver="refine", progress=interrupt, keep_best=True)
    assert (found.status, found.lower_bound) == (Status.FEASIBLE, None)
    assert found.doubt == "HIGHS was wrong in this process: it lied"


def test_that_nothing_fits_is_refuted_by_the_minimal_peak(monkeypatch):
    lie(monkeypatch, infeasible)
    with pytest.raises(BudgetTooSmall, match="though a schedule of 2 B exists") as caught:
        solve(GRAPH, 3, solver=WITHOUT_STARTS, limit_seconds=NO_LIMIT)
    assert caught.value.status is Status.LIMIT
    assert caught.value.least_bytes <= caught.value.smallest_bytes == 2
    assert "nothing fits 3 bytes, but a schedule of 'minimal-peak'" in trust.doubt_of("HIGHS")


def test_auto_goes_on_and_tells(monkeypatch):
    lie(monkeypatch, infeasible)
    monkeypatch.setattr(SOLVE, "_PORTFOLIO", ("store-all", "checkmate-rounding(pruned=False)"))
    found = solve(GRAPH, 3, limit_seconds=NO_LIMIT)
    assert (found.solver, found.status) == ("minimal-peak", Status.FEASIBLE)
    assert "nothing fits 3 bytes, but" in found.doubt


def test_what_is_proved_without_a_back_end_and_is_wrong_is_an_error():
    for wrong in (Incumbent.refuse, lambda kept: kept.prove(1e9)):
        kept = Incumbent("refine", WIRING, PEAK, Limit.starting_now(None), silent)
        wrong(kept)
        with pytest.raises(BrokenSolver, match="'refine' of remat-solvers is broken: it claims"):
            kept.offer(trace(WIRING, store_all_sequence(WIRING)))


def test_a_back_end_that_fails_is_an_error_and_ends_not_auto(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no licence")

    monkeypatch.setattr("cvxpy.Problem.get_problem_data", fail)
    for solver in ("refine", "checkmate", "monet"):
        with pytest.raises(BackEndFailed, match=r"'HIGHS' failed on a program of .* \(no licence"):
            solve(GRAPH, 3, solver=solver)
    found = solve(GRAPH, 3)
    assert (found.status, found.peak_bytes) == (Status.FEASIBLE, 3)
    assert "'HIGHS' failed" in found.doubt


def test_an_illegal_sequence_is_an_error(monkeypatch):
    monkeypatch.setattr(monet_solver, "without_dead_runs", lambda _, sequence: sequence[1:])
    with pytest.raises(BrokenSolver, match=r"'monet' of .* raised InvalidSchedule"):
        solve(unit_chain(8), 6, solver=Monet(), limit_seconds=NO_LIMIT)
    run = _InWays.run
    monkeypatch.setattr(_InWays, "run", lambda self: run(self)[1:])
    with pytest.raises(BrokenSolver, match=r"'refine' of .* raised InvalidSchedule"):
        solve(with_mask(4), 20, solver="refine", limit_seconds=NO_LIMIT)


def test_one_bad_point_does_not_discard_a_curve():
    bad = PEAK - 2

    def answer(problem):
        if problem.budget_bytes == bad:
            raise RuntimeError("boom")
        return nothing(Status.INFEASIBLE) if problem.budget_bytes == bad + 1 else slow()

    budgets = [LEAST.peak_bytes, bad, bad + 1, PEAK]
    curve = tradeoff(GRAPH, budgets=budgets, solver=Plugin(answer))
    low, failed, lied, high = curve.points
    assert "RuntimeError: boom" in str(failed.error)
    assert "nothing fits 5 bytes, but a schedule" in str(lied.error)
    assert low.error is high.error is None
    assert [point.solution.time for point in curve.points] == [20.0, 20.0, 20.0, 12.0]
    assert curve.least_bytes == LEAST.least_bytes
    with pytest.raises(BrokenSolver, match="boom"):
        tradeoff(GRAPH, budgets=[bad, PEAK], solver=Plugin(answer))


def test_a_claim_is_refuted_by_what_a_later_budget_finds():
    def answer(problem):
        if problem.budget_bytes == PEAK - 1:
            return slow(bound=15.0)
        found = solve(GRAPH, PEAK - 2, limit_seconds=NO_LIMIT)
        return dataclasses.replace(found, status=Status.FEASIBLE, lower_bound=None, solver="plugin")

    first, second, _ = tradeoff(
        GRAPH, budgets=[PEAK - 2, PEAK - 1, PEAK], solver=Plugin(answer)
    ).points
    assert "claims the bound 15.0 at 5 bytes, but a schedule of 'plugin'" in str(second.error)
    assert second.solution.schedule == first.solution.schedule
    assert (second.lower_bound, first.error) == (GRAPH.time, None)


def test_a_curve_of_a_back_end_that_lies_says_so(monkeypatch):
    lie(monkeypatch, infeasible)
    curve = tradeoff(GRAPH, budgets=[3, PEAK], solver="checkmate", limit_seconds=NO_LIMIT)
    assert curve.points[0].solution.status is Status.FEASIBLE
    assert curve.points[0].error is None
    assert "HIGHS was wrong" in curve.doubt


def test_a_minimal_peak_that_a_schedule_refutes_is_given_up(monkeypatch):
    graph = with_mask(3)
    honest = smallest_budget(graph, limit_seconds=1)
    monkeypatch.setattr("remat_solvers.minimal_peak.budget._FEW_OPS", 0)  # no glance
    monkeypatch.setattr("remat_solvers.minimal_peak.budget.CLOSE", 0.5)
    monkeypatch.setattr(
        "remat_solvers.minimal_peak.budget.lower",
        lambda _, known, *__: Lowest(known, known.peak_bytes + 1),
    )
    monkeypatch.setattr(
        "remat_solvers.minimal_peak.budget.unfold", lambda wiring, found: _Same(wiring, found)
    )
    found = smallest_budget(graph, limit_seconds=1)
    assert found.least_bytes <= found.peak_bytes
    assert found.least_bytes == honest.least_bytes
    assert "nothing fits" in trust.doubt_of("HIGHS")


def test_a_minimal_peak_by_a_back_end_that_is_not_believed_is_not_told(monkeypatch):
    stored = trace(WIRING, store_all_sequence(WIRING))
    monkeypatch.setattr(
        "remat_solvers.minimal_peak.budget.minimal_peak_trace", lambda *_, **__: stored
    )
    monkeypatch.setattr(
        "remat_solvers.minimal_peak.budget.lower", lambda *_: Lowest(stored, PEAK - 1)
    )
    assert smallest_budget(GRAPH, limit_seconds=1).least_bytes == PEAK - 1
    trust.distrust("HIGHS", "it lied")
    assert smallest_budget(GRAPH, limit_seconds=1).least_bytes == LEAST.least_bytes


@dataclasses.dataclass
class _Same:
    """A graph without a choice."""

    wiring: Wiring
    start: object

    def fold(self, found):
        return found


def test_a_start_below_the_minimal_peak_that_was_found_is_named(monkeypatch):
    wrong = dataclasses.replace(LEAST, peak_bytes=PEAK, schedule=store_all(GRAPH), least_bytes=PEAK)
    monkeypatch.setattr(SOLVE, "smallest_budget", lambda *_, **__: wrong)
    with pytest.raises(BudgetTooSmall) as caught:
        solve(GRAPH, 1, start=LEAST.schedule)
    assert caught.value.least_bytes <= caught.value.smallest_bytes == LEAST.peak_bytes
    assert caught.value.schedule == LEAST.schedule


@pytest.mark.parametrize(
    "error",
    [
        BrokenSolver("a", "b", "it lies"),
        BackEndFailed("GUROBI", 7, RuntimeError("x")),
        UnsuitableSolver("a", "too large"),
        WorkerDied(["a"], "gone"),
        BudgetTooSmall(1, 3, 2, "op", Status.INFEASIBLE, 0, LEAST.schedule),
    ],
)
def test_errors_travel_between_processes(error):
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert (str(there), vars(there)) == (str(error), vars(error))
