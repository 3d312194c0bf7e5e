"""What reaches the MILP back ends, and what comes back."""

import contextlib
import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import cvxpy as cp
import numpy as np
import pytest
from cvxpy.error import SolverError
from scipy import sparse
from solver_cases import NO_LIMIT

from remat_solvers import BackEndFailed
from remat_solvers.core import milp, trust
from remat_solvers.core.milp import (
    Answer,
    BudgetedProgram,
    Outcome,
    Program,
    relaxed,
    solve_program,
)

SLACK = 1 - 1e-6  # values are negative, so this makes them larger


def knapsacks(items: int = 300, rows: int = 40) -> Program:
    """A program that no back end closes in a moment, of items whole but for some."""
    rng = np.random.default_rng(0)
    weight = rng.integers(1, 1000, (rows, items)).astype(float)
    return Program(
        cost=-rng.integers(1, 1000, items).astype(float),
        matrix=sparse.csr_array(weight),
        right=weight.sum(axis=1) / 3,
        lower=np.zeros(items),
        upper=np.ones(items),
        integral=np.arange(items) % 10 > 0,
    )


def _one_item(right: float = 1.0) -> dict:
    one = np.ones(1)
    return {
        "cost": -one, "matrix": sparse.csr_array([[1.0]]), "right": right * one,
        "lower": 0 * one, "upper": one, "integral": one > 0,
    }  # fmt: skip


@pytest.mark.parametrize("back_end", ["HIGHS", "GUROBI"])
def test_limit_gap_start_and_bound_reach_the_back_end(back_end, capfd):
    program = knapsacks()
    short = solve_program(program, seconds=0.2, back_end=back_end)
    assert short.outcome is Outcome.STOPPED
    assert short.bound < short.value  # infinite if no point was found in time
    coarse = solve_program(program, seconds=NO_LIMIT, gap=0.2, back_end=back_end)
    assert coarse.outcome is Outcome.SOLVED
    assert coarse.value * 1.2 <= coarse.bound * SLACK <= coarse.value * SLACK
    resumed = solve_program(program, seconds=0.3, start=coarse.point, back_end=back_end)
    assert resumed.value <= coarse.value * SLACK
    full = dataclasses.replace(program, lower=np.ones(300))
    assert solve_program(full, seconds=NO_LIMIT, back_end=back_end).outcome is Outcome.INFEASIBLE
    assert capfd.readouterr() == ("", "")


def test_the_canonical_form_of_a_program_is_written_once_for_a_solve_from_a_start(monkeypatch):
    program = knapsacks(60, 5)
    start = solve_program(program, seconds=NO_LIMIT, gap=0.5).point
    written, write = [], cp.Problem.get_problem_data
    monkeypatch.setattr(
        cp.Problem, "get_problem_data", lambda *a, **k: written.append(a) or write(*a, **k)
    )
    solve_program(program, seconds=NO_LIMIT, start=start)
    assert len(written) == 1


def test_large_linear_programs_by_an_interior_point_are_solved_as_well(monkeypatch):
    program = relaxed(knapsacks())
    simplex = solve_program(program, seconds=NO_LIMIT)
    monkeypatch.setattr(milp, "_INTERIOR_COLUMNS", 10)
    interior = solve_program(program, seconds=NO_LIMIT)
    assert interior.outcome is simplex.outcome is Outcome.SOLVED
    assert interior.value == pytest.approx(simplex.value)
    assert interior.bound == pytest.approx(simplex.bound)
    assert solve_program(knapsacks(60, 5), seconds=NO_LIMIT).outcome is Outcome.SOLVED


def test_a_target_ends_the_search():
    program = knapsacks(60, 5)
    best = solve_program(program, seconds=NO_LIMIT)
    assert best.outcome is Outcome.SOLVED
    target = 0.9 * best.value  # values are negative
    enough = solve_program(program, seconds=NO_LIMIT, target=target)
    assert enough.outcome is Outcome.SOLVED
    assert best.value <= enough.value <= target
    assert enough.bound <= best.value * SLACK
    assert enough.bound < best.bound


def test_near_the_bound_and_far_from_it_a_search_may_begin_anew_and_keeps_what_it_found(
    monkeypatch,
):
    asked = []

    def noted(problem, x, program, seconds, gap, start, back_end, options, meanwhile):
        asked.append((seconds, start, options["mip_allow_restart"]))
        return run(problem, x, program, seconds, gap, start, back_end, options, meanwhile)

    run = milp._run
    monkeypatch.setattr(milp, "_run", noted)
    monkeypatch.setattr(milp, "_SECONDS_ANEW", NO_LIMIT)
    small = knapsacks(60, 5)
    assert solve_program(small, seconds=NO_LIMIT).value == pytest.approx(
        solve_program(small, seconds=NO_LIMIT, apart=0.005).value
    )
    solve_program(small, seconds=NO_LIMIT, apart=0.015)
    solve_program(small, seconds=NO_LIMIT, apart=0.3)
    assert [anew for _, _, anew in asked] == [False, True, False, True]  # solved at once

    def stopped(problem, x, program, seconds, gap, start, back_end, options, meanwhile):
        clock.now += seconds
        asked.append((seconds, start, options["mip_allow_restart"]))
        return Answer(Outcome.STOPPED, np.zeros(300), 0.0, -1e6)

    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(milp, "time", clock)
    monkeypatch.setattr(milp, "_run", stopped)
    monkeypatch.setattr(milp, "_SECONDS_ANEW", 0.25)
    asked.clear()
    answer = solve_program(knapsacks(), seconds=1, apart=0.005)
    assert [(seconds, anew) for seconds, _, anew in asked] == [(0.25, True), (0.75, False)]
    assert [start is None for _, start, _ in asked] == [True, False]
    assert (answer.outcome, answer.value) == (Outcome.STOPPED, 0.0)
    clock.now = 0.0
    found = iter([Answer(Outcome.STOPPED, np.ones(300), -5.0, -8.0),
                  Answer(Outcome.STOPPED, None, np.inf, -9.0)])  # fmt: skip
    monkeypatch.setattr(milp, "_run", lambda *_: next(found))
    kept = solve_program(knapsacks(), seconds=1, apart=0.005)
    assert (kept.value, kept.bound) == (-5.0, -8.0)
    assert kept.point is not None


def test_a_sweep_with_gurobi_starts_where_it_is_told():
    plain = knapsacks()
    program = BudgetedProgram(
        dataclasses.replace(plain, right=np.zeros_like(plain.right)), plain.right, "GUROBI"
    )
    first = program.solve(1.0, seconds=NO_LIMIT, gap=0.2)
    half = program.solve(0.5, seconds=NO_LIMIT, gap=0.2, start=first.point)
    assert half.value > first.value
    again = program.solve(1.0, seconds=0.02, start=first.point)  # not from the solve before
    assert again.value <= first.value * SLACK


def test_a_program_beyond_the_licence_of_gurobi_is_an_error():
    most = 2_001
    program = Program(
        cost=np.ones(most),
        matrix=sparse.csr_array(np.ones((1, most))),
        right=np.ones(1),
        lower=np.zeros(most),
        upper=np.ones(most),
        integral=np.ones(most, dtype=bool),
    )
    with contextlib.suppress(BackEndFailed):
        solve_program(program, seconds=NO_LIMIT, back_end="GUROBI")
        pytest.skip("a full licence of Gurobi is installed")
    said = "'GUROBI' failed on a program of 2,001 variables .*; the licence .* back_end='HIGHS'"
    with pytest.raises(BackEndFailed, match=said):
        solve_program(program, seconds=NO_LIMIT, back_end="GUROBI")


@pytest.mark.parametrize("where", ["get_problem_data", "unpack_results"])
def test_what_a_back_end_raises_is_its_failure(monkeypatch, where):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("token server not found") if where == "get_problem_data" else SolverError

    monkeypatch.setattr(f"cvxpy.Problem.{where}", fail)
    with pytest.raises(BackEndFailed, match="'HIGHS' failed on a program of 20 variables"):
        solve_program(relaxed(knapsacks(items=20, rows=4)), seconds=NO_LIMIT)


def test_an_answer_that_the_start_point_refutes_is_refused(monkeypatch, caplog):
    program = Program(
        cost=np.array([1.0, 2.0]),
        matrix=sparse.csr_array([[-1.0, -1.0]]),
        right=np.array([-1.0]),
        lower=np.zeros(2),
        upper=np.ones(2),
        integral=np.ones(2, dtype=bool),
    )
    cheap, dear, outside = np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.zeros(2)
    wrong = Answer(Outcome.SOLVED, dear, 2.0, 2.0)
    monkeypatch.setattr(milp, "_read", lambda *_: wrong)
    refused = solve_program(program, seconds=1, start=cheap)
    assert refused.outcome is Outcome.STOPPED
    assert refused.point is cheap
    assert (refused.value, refused.bound) == (1.0, -np.inf)
    assert "bound 2 to a program in which a point of 1 is feasible" in caplog.text
    assert "HIGHS was wrong in this process" in trust.doubt_of("HIGHS")
    assert solve_program(program, seconds=1, start=outside) is wrong
    assert solve_program(program, seconds=1, start=dear) is wrong
    barely = Answer(Outcome.SOLVED, dear, 2.0, 2.0 + 1e-6)
    monkeypatch.setattr(milp, "_read", lambda *_: barely)
    assert solve_program(program, seconds=1, start=dear).bound == 2.0
    none = Answer(Outcome.INFEASIBLE, None, np.inf, np.inf)
    monkeypatch.setattr(milp, "_read", lambda *_: none)
    assert solve_program(program, seconds=1, start=dear).outcome is Outcome.STOPPED
    assert solve_program(program, seconds=1, start=outside) is none


def test_an_answer_that_its_own_point_refutes_is_refused(monkeypatch):
    program = Program(**_one_item())
    wrong = Answer(Outcome.SOLVED, np.ones(1), -1.0, -0.5)
    monkeypatch.setattr(milp, "_read", lambda *_: wrong)
    refused = solve_program(program, seconds=1)
    assert (refused.outcome, refused.value, refused.bound) == (Outcome.STOPPED, -1.0, -np.inf)
    assert trust.doubt_of("HIGHS")


def test_a_point_that_is_nearly_one_costs_no_trust(monkeypatch):
    """A back end has tolerances, too: what it finds infeasible may be so by a hair."""
    program = Program(**_one_item(right=1 - 1e-6))
    monkeypatch.setattr(milp, "_read", lambda *_: Answer(Outcome.SOLVED, None, np.inf, 0.0))
    refused = solve_program(program, seconds=1, start=np.ones(1))
    assert (refused.outcome, refused.bound) == (Outcome.STOPPED, -np.inf)
    assert trust.doubt_of("HIGHS") is None


def test_a_status_that_cvxpy_does_not_know_is_out_of_time(monkeypatch, caplog):
    def unpack(*_: object) -> None:
        raise ValueError("Cannot unpack invalid solution")

    monkeypatch.setattr("cvxpy.Problem.unpack_results", unpack)
    answer = solve_program(relaxed(knapsacks(items=20, rows=4)), seconds=NO_LIMIT)
    assert (answer.outcome, answer.point, answer.bound) == (Outcome.STOPPED, None, -np.inf)
    assert "HIGHS gave up on 20 variables: Cannot unpack" in caplog.text


@pytest.mark.parametrize("back_end", ["HIGHS", "GUROBI"])
def test_the_bound_of_a_linear_program_is_that_of_its_prices(back_end):
    program = relaxed(knapsacks())
    answer = solve_program(program, seconds=NO_LIMIT, back_end=back_end)
    assert answer.outcome is Outcome.SOLVED
    assert answer.value == pytest.approx(answer.bound, rel=1e-6)
    swept = BudgetedProgram(dataclasses.replace(program, right=0 * program.right), program.right)
    assert swept.solve(0.5, seconds=NO_LIMIT).bound >= answer.bound
    half = dataclasses.replace(program, right=0.5 * program.right)
    assert swept.solve(0.5, seconds=NO_LIMIT).bound == pytest.approx(
        solve_program(half, seconds=NO_LIMIT).value
    )


def test_no_prices_can_raise_the_bound_above_the_optimum():
    program = relaxed(knapsacks(items=20, rows=4))
    optimum = solve_program(program, seconds=NO_LIMIT).value
    rng = np.random.default_rng(0)
    for scale in (0.0, 0.01, 1.0, 100.0):
        prices = rng.normal(scale=scale, size=4)
        assert milp._dual_bound(program, prices) <= optimum + 1e-9
    assert milp._dual_bound(program, None) == -np.inf
    assert milp._dual_bound(program, np.full(4, np.nan)) == -np.inf


@pytest.mark.sweep
def test_nothing_is_printed_by_a_process_that_solves():
    """Not at its end either, when what C has buffered is written; capfd does not see that."""
    code = """
import numpy as np
from scipy import sparse
from remat_solvers.core.milp import Program, solve_program

one = np.ones(1)
program = Program(-one, sparse.csr_array([[2.0]]), one, 0 * one, one, one > 0)
assert solve_program(program, seconds=3600).value == 0
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("", "")
