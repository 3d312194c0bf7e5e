import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.answers import check_staged, peak_of
from solver_cases.bounding import direct_program
from solver_cases.random_graphs import graphs, trainings
from solver_cases.smallest_budgets import smallest
from solver_cases.staged_brute_force import fastest_staged
from solver_cases.synthetic import gpt2

from remat_graph import Graph, Op, Status, Value, simulate
from remat_graph.testing import unit_chain
from remat_solvers import BudgetTooSmall, Limit, Problem, UnsuitableSolver, solve
from remat_solvers.core.milp import BudgetedProgram, Outcome, relaxed, solve_program
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.errors import InvalidProblem
from remat_solvers.published.checkmate import Checkmate, CheckmateRounding, Form
from remat_solvers.published.checkmate.bound import bounding_program
from remat_solvers.published.checkmate.formulation import count_columns, formulate
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.testing.brute_force import fastest

thorough = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
cases = st.one_of(graphs(), graphs(most_ops=10, most_values=9), trainings())


def silent(progress):
    pass


def checkmate(graph, budget, seconds=NO_LIMIT, **options):
    return Checkmate(**options).solve(Problem(graph, budget), Limit.starting_now(seconds), silent)


def rounded(graph, budget, seconds=NO_LIMIT, **options):
    solver = CheckmateRounding(**options)
    return solver.solve(Problem(graph, budget), Limit.starting_now(seconds), silent)


def tight_budget(graph: Graph, share: float) -> int:
    """Lie between what brute force needs and what storing everything needs."""
    low, high = smallest(graph), peak_of(graph)
    assume(low < high)
    return max(1, low + int(share * (high - 1 - low)))


@pytest.mark.parametrize("form", Form)
def test_the_back_end_does_not_cut_off_the_optimum(form):
    """HiGHS 1.13 to 1.15 do where FREE is continuous: docs/decisions/0014."""
    sizes = {"x": 5, "v0": 2, "v1": 1, "v2": 4, "w2": 0, "v3": 0, "v4": 5, "v5": 1}
    graph = Graph(
        tuple(Value(name, size) for name, size in sizes.items()),
        (
            Op("op0", (), ("v0",), 0.0),
            Op("op1", ("v0",), ("v1",), 1.0),
            Op("op2", ("x", "v0", "v1"), ("v2", "w2"), 1.0),
            Op("op3", ("v1",), ("v3",), 0.0),
            Op("op4", ("v1",), ("v4",), 0.0),
            Op("op5", ("x", "v1", "v2"), ("v5",), 0.0, workspace_bytes=1),
        ),
        resident=frozenset({"x"}),
        results=frozenset({"v5"}),
    )
    formulation = formulate(Stages.of(Wiring.of(graph)), form)
    answer = BudgetedProgram(formulation.program, formulation.per_byte).solve(9, seconds=NO_LIMIT)
    assert answer.bound == pytest.approx(500)  # the time of one op more, of two


@thorough
@given(cases, st.floats(0, 1), st.sampled_from(Form))
def test_the_program_has_the_optimum_of_all_staged_schedules(graph, share, form):
    budget = tight_budget(graph, share)
    best = fastest_staged(graph, budget)
    stages = Stages.of(Wiring.of(graph))
    formulation = formulate(stages, form)
    assert len(formulation.program.cost) <= count_columns(stages)
    answer = BudgetedProgram(formulation.program, formulation.per_byte).solve(
        budget, seconds=NO_LIMIT
    )
    if best is None:
        assert answer.outcome is Outcome.INFEASIBLE
        return
    kept = formulation.read(answer.point)[1] > 0.5
    schedule = expand(stages.wiring, stages.sequence(stages.least_run(kept)))
    timeline = simulate(graph, schedule)
    assert timeline.peak_bytes <= budget
    assert timeline.time == pytest.approx(best, rel=1e-6)


@thorough
@given(cases, st.floats(0, 1))
def test_checkmate_against_brute_force(graph, share):
    budget = tight_budget(graph, share)
    solution = checkmate(graph, budget)
    check_staged(graph, budget, solution)


@thorough
@given(cases)
def test_infeasible_is_proved(graph):
    needed = smallest(graph)
    assume(needed > 1)
    assert checkmate(graph, needed - 1).status in (Status.INFEASIBLE, Status.LIMIT)
    assert rounded(graph, needed - 1).status in (Status.INFEASIBLE, Status.LIMIT)
    assert checkmate(graph, needed).status is not Status.INFEASIBLE


@thorough
@given(graphs(), st.randoms(use_true_random=False))
def test_every_sequence_satisfies_the_bounding_program(graph, random):
    """The bound of all schedules is below the time of any, however wasteful."""
    wiring = Wiring.of(graph)
    sequence = []
    for op in range(wiring.op_count):
        again = [i for i in range(op) if wiring.replayable_list[i] and random.random() < 0.3]
        random.shuffle(again)
        sequence += [*again, op]
    now = trace(wiring, np.array(sequence))
    answer = solve_program(bounding_program(wiring, max(1, now.peak_bytes)), seconds=NO_LIMIT)
    assert answer.outcome is Outcome.SOLVED
    bound = graph.time * (1 + answer.bound / 1000)
    assert bound <= sequence_time(wiring, now.sequence) * (1 + 1e-6) + 1e-9


@thorough
@given(cases, st.integers(0, 100))
def test_the_bounding_program_proves_what_it_does_written_by_itself(graph, share):
    wiring = Wiring.of(graph)
    least_bytes, most_bytes = smallest(graph), peak_of(graph)
    budget = max(1, least_bytes + (most_bytes - least_bytes) * share // 100 - (share < 10))
    ours, direct = bounding_program(wiring, budget), direct_program(Stages.of(wiring), budget)
    for one, other in ((ours, direct), (relaxed(ours), relaxed(direct))):
        found, wanted = (solve_program(program, seconds=NO_LIMIT) for program in (one, other))
        assert found.outcome is wanted.outcome is not Outcome.STOPPED
        assert found.bound == pytest.approx(wanted.bound, rel=1e-6, abs=1e-6)


def some_staged_schedule(stages: Stages, random):
    """Draw R and S such that all that is computed again is read or kept, and its trace."""
    kept = np.array([[random.random() < 0.4 for _ in row] for row in stages.may_keep()])
    run = stages.least_run(kept)
    while True:
        now = trace(stages.wiring, stages.sequence(run))
        kept = stages.read_off(now)
        less = stages.least_run(kept)
        if np.array_equal(run, less):
            return run, kept, now
        run = less


@thorough
@given(
    graphs(most_ops=10, most_values=14), st.randoms(use_true_random=False), st.sampled_from(Form)
)
def test_every_staged_schedule_is_a_point(graph, random, form):
    stages = Stages.of(Wiring.of(graph))
    run, kept, now = some_staged_schedule(stages, random)
    formulation = formulate(stages, form)
    program, point = formulation.program, formulation.embed(run, kept)
    right = program.right + now.peak_bytes * formulation.per_byte
    assert np.all(program.matrix @ point <= right + 1e-9)
    assert np.all((point >= program.lower) & (point <= program.upper))
    extra = sequence_time(stages.wiring, now.sequence) - graph.time
    assert program.cost @ point == pytest.approx(extra * 1000 / max(graph.time, 1e-300), abs=1e-6)


@thorough
@given(
    graphs(most_ops=10, most_values=14), st.randoms(use_true_random=False), st.sampled_from(Form)
)
def test_the_program_asks_for_the_memory_that_the_simulator_sees(graph, random, form):
    stages = Stages.of(Wiring.of(graph))
    run, kept, now = some_staged_schedule(stages, random)
    assume(now.peak_bytes > 1)
    formulation = formulate(stages, form)
    point = formulation.embed(run, kept)
    check_memory(formulation, point, now.peak_bytes)


def check_memory(formulation, point, peak_bytes):
    """With R and S of a point, the program has a point at its peak, and none below."""
    lower, upper = formulation.program.lower.copy(), formulation.program.upper.copy()
    fixed = slice(0, formulation.used_start)
    lower[fixed] = upper[fixed] = point[fixed]
    program = dataclasses.replace(formulation.program, lower=lower, upper=upper)
    budgeted = BudgetedProgram(program, formulation.per_byte)
    assert budgeted.solve(peak_bytes, seconds=NO_LIMIT).outcome is Outcome.SOLVED
    assert budgeted.solve(peak_bytes - 1, seconds=NO_LIMIT).outcome is Outcome.INFEASIBLE


@pytest.mark.parametrize("form", Form)
def test_what_is_read_twice_again_is_freed_after_the_second_time(form):
    values = (Value("a", 4), Value("b", 1), Value("c", 1), Value("d", 3), Value("end", 1))
    ops = (
        Op("a", (), ("a",), 1.0),
        Op("b", ("a",), ("b",), 1.0),
        Op("c", ("a",), ("c",), 1.0, workspace_bytes=6),
        Op("d", (), ("d",), 1.0, workspace_bytes=9),
        Op("end", ("b", "c", "d"), ("end",), 1.0),
    )
    stages = Stages.of(Wiring.of(Graph(values, ops, results=frozenset({"end"}))))
    kept = np.zeros((6, 5), dtype=np.bool_)
    kept[1:3, 0] = kept[4, 3] = kept[5, 4] = True
    run = stages.least_run(kept)
    assert run[4].tolist() == [True, True, True, False, True, False]
    assert trace(stages.wiring, stages.sequence(run)).peak_bytes == 15
    formulation = formulate(stages, form)
    check_memory(formulation, formulation.embed(run, kept), 15)


def out_of_order() -> Graph:
    """Only a schedule that computes op 2 again before op 1 fits into 9 bytes."""
    values = [Value("x", 1), Value("z0", 5), Value("z1", 5), Value("u", 2), Value("v", 2)]
    values += [Value("w", 1), Value("end", 1)]
    ops = (
        Op("0", ("x",), ("z0",), 1.0),
        Op("1", ("x",), ("z1",), 1.0),
        Op("2", ("z0",), ("u",), 1.0),
        Op("3", ("z1",), ("v",), 1.0),
        Op("4", ("x",), ("w",), 1.0, workspace_bytes=7),
        Op("5", ("u", "v"), ("end",), 1.0),
    )
    return Graph(tuple(values), ops, frozenset({"x"}), frozenset({"end"}))


def test_what_only_the_stages_exclude_is_not_called_infeasible():
    graph = out_of_order()
    assert fastest_staged(graph, 9) is None
    best = fastest(graph, 9)
    assert best is not None
    for solution in (checkmate(graph, 9), rounded(graph, 9)):
        assert solution.status in (Status.LIMIT, Status.FEASIBLE, Status.OPTIMAL)
        assert solution.lower_bound <= best


@pytest.mark.sweep
@thorough
@given(cases, st.floats(0, 1))
def test_rounding_fits_or_says_limit(graph, share):
    budget = tight_budget(graph, share)
    best = fastest(graph, budget)
    for solution in (rounded(graph, budget), rounded(graph, budget, draws=3, seed=1)):
        assert solution.status is not Status.INFEASIBLE
        assert solution.lower_bound <= best * (1 + 1e-9)
        if solution.schedule is None:
            assert solution.status is Status.LIMIT
            continue
        timeline = simulate(graph, solution.schedule)
        assert timeline.peak_bytes <= budget
        assert timeline.time >= best * (1 - 1e-9)
        if solution.status is Status.OPTIMAL:
            assert timeline.time == pytest.approx(best, rel=2e-6)


@pytest.mark.sweep
def test_a_transformer_layer():
    graph = gpt2(layers=1)
    peak = peak_of(graph)
    exact, near = checkmate(graph, int(0.9 * peak)), rounded(graph, int(0.9 * peak))
    assert exact.status is Status.OPTIMAL
    assert graph.time < exact.time <= near.time <= 1.06 * exact.time
    assert exact.lower_bound <= exact.time


def test_randomised_rounding_depends_on_the_seed_alone():
    graph = unit_chain(14)
    options = {"thresholds": (), "draws": 1, "pruned": False}
    first, second, other = (rounded(graph, 8, seed=seed, **options) for seed in (0, 0, 3))
    assert first.schedule == second.schedule
    assert first.schedule != other.schedule
    with pytest.raises(InvalidProblem, match="needs a seed"):
        CheckmateRounding(draws=2)
    with pytest.raises(InvalidProblem, match=r"thresholds=\(\) and draws=0"):
        CheckmateRounding(thresholds=())


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("draws", (-1, "x", None, 1.5, True)),
        ("seed", (-1, "x", 1.5)),
        ("most_columns", ("x", None)),
        ("thresholds", (0.5, None, "ab", ("a",), (math.nan,), (2.0,))),
    ],
)
def test_bad_settings_of_the_rounding_are_refused(option, wrong):
    for given_ in wrong:
        with pytest.raises(InvalidProblem, match=f"{option}=.*(whole number, 0 or more|from 0 to)"):
            CheckmateRounding(**{option: given_})


def test_pruning_and_more_thresholds_help_the_rounding():
    graph = unit_chain(12)
    printed = rounded(graph, 6, thresholds=(0.5,), pruned=False)
    more = rounded(graph, 6)
    exact = checkmate(graph, 6)
    assert exact.status is Status.OPTIMAL
    assert exact.time <= more.time <= min(printed.time, 1.06 * exact.time)


@pytest.mark.parametrize("solver", ["checkmate", "checkmate-rounding"])
def test_too_large_a_graph_is_refused_with_the_figure(solver):
    graph = gpt2(layers=12)
    with pytest.raises(UnsuitableSolver, match=r"would have [\d,]+ columns, more than 200,000"):
        solve(graph, 10**9, solver=solver)


@pytest.mark.parametrize("make", [Checkmate, CheckmateRounding])
@pytest.mark.parametrize(
    ("name", "help_"),
    [
        ("GUROBI", "pip install remat-solvers[gurobi]"),
        ("SCIP", "pip install cvxpy[scip]"),
        ("NOSUCH", "see cvxpy.org for how to install it"),
    ],
)
def test_a_back_end_that_is_not_there_is_named(make, name, help_, monkeypatch):
    monkeypatch.setattr("cvxpy.installed_solvers", lambda: ["HIGHS", "SCIPY"])
    problem = Problem(gpt2(layers=1), 10**12)
    reason = make(back_end=name).can_solve(problem)
    assert f"{name!r} installed; {help_}, or use one of HIGHS, SCIPY" in reason
    assert "installed" not in (make(back_end="HIGHS").can_solve(problem) or "")


@pytest.mark.parametrize("back_end", ["SCIPY", "GUROBI"])
def test_another_back_end_by_name(back_end):
    graph = out_of_order()
    there = checkmate(graph, 14, back_end=back_end)
    assert there.time == checkmate(graph, 14).time == graph.time
    assert checkmate(graph, 10, back_end=back_end).time == fastest_staged(graph, 10)


@pytest.mark.sweep
@settings(max_examples=8, deadline=None)
@given(trainings(), st.floats(0, 1))
def test_gurobi_has_the_optimum_of_highs(graph, share):
    budget = tight_budget(graph, share)
    here, there = checkmate(graph, budget), checkmate(graph, budget, back_end="GUROBI")
    assert here.status is there.status
    staged = fastest_staged(graph, budget)  # None where only other schedules fit
    assert here.time == there.time
    assert staged is None or here.time <= staged * (1 + 1e-6)
    assert there.lower_bound == pytest.approx(here.lower_bound, rel=1e-5)


@pytest.mark.parametrize("solver", ["checkmate", "checkmate-rounding"])
def test_graphs_at_the_edge(solver):
    one = Graph((Value("a", 3),), (Op("f", (), ("a",), 0.0),), results=frozenset({"a"}))
    assert solve(one, 3, solver=solver).status is Status.OPTIMAL
    with pytest.raises(BudgetTooSmall) as caught:
        solve(one, 2, solver=solver)
    assert caught.value.status is Status.INFEASIBLE
    apart = Graph(
        (Value("a", 3), Value("b", 0), Value("c", 3)),
        (Op("f", (), ("a",), 1.0), Op("g", (), ("b",), 0.0), Op("h", (), ("c",), 2.0)),
        results=frozenset({"c"}),
    )
    assert solve(apart, 3, solver=solver).time == 3.0
    empty = Graph((), ())
    with pytest.raises(UnsuitableSolver, match="no ops"):
        solve(empty, 3, solver=solver)


def test_no_time_is_no_crash():
    graph = gpt2(layers=1)
    peak = peak_of(graph)
    for solution in (checkmate(graph, int(0.7 * peak), 0.0), rounded(graph, int(0.7 * peak), 0.0)):
        fits = solution.schedule is not None
        assert solution.status is (Status.FEASIBLE if fits else Status.LIMIT)
        assert math.isfinite(solution.time) is fits


def test_a_sweep_reuses_the_program():
    graph = unit_chain(8)
    formulation = formulate(Stages.of(Wiring.of(graph)))
    program = BudgetedProgram(formulation.program, formulation.per_byte)
    values = [program.solve(budget, seconds=NO_LIMIT).value for budget in (7, 5, 7)]
    assert values[0] == pytest.approx(values[2])
    assert 0 < values[0] < values[1]
