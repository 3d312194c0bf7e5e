import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.alternatives import packable, trainings_with_alternatives
from solver_cases.answers import peak_of
from solver_cases.monet_brute_force import fastest_of_monet
from solver_cases.random_graphs import graphs, trainings
from solver_cases.smallest_budgets import smallest
from solver_cases.synthetic import gpt2

from remat_graph import Compute, Graph, Op, Stage, Status, Value, simulate
from remat_graph.testing import unit_chain
from remat_solvers import BudgetTooSmall, Limit, Problem, UnsuitableSolver, solve
from remat_solvers.core.milp import Outcome, solve_program
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.errors import InvalidProblem
from remat_solvers.published.monet import Monet
from remat_solvers.published.monet.columns import count_columns
from remat_solvers.published.monet.formulation import TOTAL, formulate
from remat_solvers.published.monet.layout import Layout
from remat_solvers.published.monet.point import embed, read_point, settle
from remat_solvers.testing.brute_force import fastest

thorough = settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))


def monet(graph, budget, seconds=10.0, **options):
    said = []
    found = Monet(**options).solve(
        Problem(graph, budget), Limit.starting_now(seconds), lambda now: said.append(now.message)
    )
    return found, said


def between(graph: Graph, least: int, share: float) -> int:
    return max(1, least + int(share * max(0, peak_of(graph) - 1 - least)))


@thorough
@given(st.one_of(trainings(), graphs(most_values=8)), st.floats(0, 1))
def test_the_program_has_the_optimum_of_the_formulas(graph, share):
    assume(0 < graph.boundary_index < len(graph.ops))
    budget = between(graph, smallest(graph), share)
    best = fastest_of_monet(graph, budget)
    layout = Layout.of(Wiring.of(graph))
    formulation = formulate(layout, budget)
    answer = solve_program(formulation.program, seconds=NO_LIMIT)
    if best is None:
        assert answer.outcome is Outcome.INFEASIBLE
    else:
        assert answer.outcome is Outcome.SOLVED
        assert answer.value / TOTAL * graph.time == pytest.approx(best, rel=1e-6, abs=1e-6)


def test_what_is_read_again_later_is_not_overwritten():
    """To make `c` again with less than 40, `a` is overwritten, and made once more for `c`."""
    sizes = {"x": 1, "a": 10, "b": 10, "c": 10, "d": 10, "g": 5, "h": 1}
    backward = Stage.BACKWARD
    graph = Graph(
        tuple(Value(name, size) for name, size in sizes.items()),
        (
            Op("a", ("x",), ("a",), 1.0),
            Op("b", ("a",), ("b",), 1.0, workspace_bytes=15, overwrites=(("a", "b"),)),
            Op("c", ("a", "b"), ("c",), 1.0),
            Op("d", ("x",), ("d",), 1.0, workspace_bytes=25),
            Op("g", ("d",), ("g",), 1.0, stage=backward),
            Op("h", ("c", "g"), ("h",), 1.0, stage=backward),
        ),
        frozenset({"x"}),
        frozenset({"h"}),
        "g",
    )
    for budget, best in ((39, 10.0), (40, 9.0)):
        assert fastest_of_monet(graph, budget) == best
        found = solve_program(
            formulate(Layout.of(Wiring.of(graph)), budget).program, seconds=NO_LIMIT
        )
        assert found.value / TOTAL * graph.time == pytest.approx(best)


@thorough
@given(trainings_with_alternatives(), st.floats(0, 1))
def test_points_over_alternatives_are_schedules_within_the_budget(graph, share):
    """And what is read off such a schedule is a point again."""
    budget = between(graph, smallest(graph), share)
    wiring = Wiring.of(graph)
    layout = Layout.of(wiring)
    formulation = formulate(layout, budget)
    answer = solve_program(formulation.program, seconds=NO_LIMIT)
    if answer.outcome is Outcome.INFEASIBLE:
        return
    sequence = read_point(formulation.columns, answer.point).sequence(layout)
    timeline = simulate(graph, expand(wiring, sequence))
    assert timeline.peak_bytes <= budget
    assert timeline.time == pytest.approx(answer.value / TOTAL * graph.time, abs=1e-5)
    again = settle(formulation.columns, trace(wiring, sequence))
    point = embed(formulation.columns, again, len(formulation.program.cost))
    assert np.all(formulation.program.matrix @ point <= formulation.program.right + 1e-6)
    assert formulation.program.cost @ point <= answer.value + 1e-4


@thorough
@given(trainings_with_alternatives(), st.floats(0, 1))
def test_answers_over_alternatives_against_brute_force(graph, share):
    budget = between(graph, smallest(graph), share)
    best = fastest(graph, budget)
    found, _ = monet(graph, budget)
    assert found.status is not Status.INFEASIBLE
    assert found.lower_bound is None or found.lower_bound <= best * (1 + 1e-9)
    if found.schedule is not None:
        timeline = simulate(graph, found.schedule)
        assert timeline.peak_bytes <= budget
        assert timeline.time >= best * (1 - 1e-9)


def test_checkpoints_and_implementations_are_chosen_together():
    """Masks, where there is room for no more; with checkpoints alone it takes longer."""
    graph = packable(5)
    packed, said = monet(graph, 240)
    alone, _ = monet(graph.without_alternatives(), 310)
    assert "MONeT's program solved" in said[-1]
    assert packed.time == pytest.approx(graph.time + 0.4)
    assert packed.time == fastest(graph, 240)
    assert alone.time > graph.time + 4
    assert {f"mask{i}" for i in range(4)} <= {
        step.op for step in packed.schedule if isinstance(step, Compute)
    }


def test_optimal_is_claimed_of_no_restricted_optimum():
    found, said = monet(unit_chain(6), 5)
    assert "MONeT's program solved" in said[-1]
    assert (found.status, found.lower_bound) == (Status.FEASIBLE, None)
    assert solve(unit_chain(6), 5, solver="refine", limit_seconds=NO_LIMIT).status is Status.OPTIMAL


def test_no_time_is_no_crash():
    graph = gpt2(layers=1)
    found, said = monet(graph, int(0.8 * peak_of(graph)), 0.0)
    assert said[-1] == "MONeT's program is out of time"
    assert found.status in (Status.FEASIBLE, Status.LIMIT)


@pytest.mark.sweep
def test_a_limit_leaves_the_schedule_that_there_is():
    graph = gpt2(layers=2)
    budget = int(0.8 * peak_of(graph))
    found, said = monet(graph, budget, 1.5)
    assert found.status is (Status.FEASIBLE if found.schedule else Status.LIMIT)
    assert ("began without a program" in said) <= (found.schedule is not None)
    if found.schedule is not None:
        assert simulate(graph, found.schedule).peak_bytes <= budget
        assert math.isfinite(found.time)


@pytest.mark.sweep
def test_below_what_one_op_needs_nothing_fits():
    with pytest.raises(BudgetTooSmall) as caught:
        solve(packable(5), 150, solver="monet")
    assert caught.value.status is Status.INFEASIBLE


def test_what_it_does_not_take_is_said():
    values = (Value("a", 1),)
    forward = Graph(values, (Op("f", (), ("a",), 1.0),), results=frozenset({"a"}))
    with pytest.raises(UnsuitableSolver, match="no forward or no backward half"):
        solve(forward, 5, solver="monet")
    graph = packable(5)
    columns = count_columns(Layout.of(Wiring.of(graph)))
    assert Monet(most_columns=columns).can_solve(Problem(graph, 300)) is None
    reason = Monet(most_columns=columns - 1).can_solve(Problem(graph, 300))
    assert reason.startswith(f"its program would have {columns:,} columns, more than")
    assert "pip install" in Monet(back_end="SCIP").can_solve(Problem(graph, 300))
    with pytest.raises(InvalidProblem, match="gap=-1"):
        Monet(gap=-1)
    with pytest.raises(InvalidProblem, match=r"most_columns=1\.5"):
        Monet(most_columns=1.5)
