"""The program of H-ILP against brute force, and what the search finds by it."""

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.answers import check_staged, peak_of
from solver_cases.hilp_levels import small, solved, some_staged_schedule
from solver_cases.random_graphs import graphs, trainings
from solver_cases.random_hierarchies import branching, levels_of, nested
from solver_cases.random_hierarchies import store_all_peak as level_peak
from solver_cases.smallest_budgets import smallest
from solver_cases.staged_brute_force import fastest_staged

from remat_graph import Graph, Op, Stage, Status, Value, simulate
from remat_solvers.core.milp import BudgetedProgram, Outcome
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.published.hierarchical.blocks.compose import (
    compose,
    expand_nodes,
    picks_of,
    selections,
)
from remat_solvers.published.hierarchical.blocks.level import Layer, Level
from remat_solvers.published.hierarchical.hilp import RKCheckmate
from remat_solvers.published.hierarchical.hilp.formulation import formulate
from remat_solvers.published.hierarchical.hilp.search import search
from remat_solvers.testing.brute_force import fastest

thorough = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
cases = st.one_of(graphs(7, 8), trainings(), branching(3))
plain = cases.map(
    lambda graph: dataclasses.replace(
        graph, ops=tuple(dataclasses.replace(op, overwrites=()) for op in graph.ops)
    )
)
tiny = st.one_of(branching(4), trainings(4)).flatmap(nested)


def optimum(level, budget, *, corrected=True, back_end="HIGHS"):
    """Solve the program of a level; its picks, and their time in that of the graph."""
    formulation = formulate(level, corrected=corrected)
    program = BudgetedProgram(formulation.program, formulation.per_byte, back_end)
    answer = program.solve(budget, seconds=NO_LIMIT)
    if answer.outcome is Outcome.INFEASIBLE:
        return None, math.inf
    assert answer.outcome is Outcome.SOLVED
    once = float(level.wiring.time.sum())
    return formulation.read(answer.point), answer.value * max(once, 1e-300) / 1000


@thorough
@given(plain, st.floats(0, 1), st.booleans())
def test_without_layers_the_program_has_the_optimum_of_all_staged_schedules(
    graph, share, corrected
):
    low, high = smallest(graph), peak_of(graph)
    assume(low < high)
    budget = max(1, low + int(share * (high - 1 - low)))
    level = Level.of(Wiring.of(graph))
    picks, taken = optimum(level, budget, corrected=corrected)
    best = fastest_staged(graph, budget)
    assert (picks is None) == (best is None)
    if best is not None:
        assert taken == pytest.approx(best, rel=1e-6, abs=1e-9)
        sequence = np.array(expand_nodes(level, picks))
        timeline = simulate(graph, expand(level.wiring, sequence))
        assert timeline.peak_bytes <= budget
        assert timeline.time == pytest.approx(best, rel=1e-6)


@pytest.mark.sweep
@settings(thorough, max_examples=6)
@given(plain, st.floats(0, 1))
def test_rk_checkmate_against_brute_force(graph, share):
    low, high = smallest(graph), peak_of(graph)
    assume(low < high)
    budget = max(1, low + int(share * (high - 1 - low)))
    solution = solved(RKCheckmate(), graph, budget, seconds=3.0)
    check_staged(graph, budget, solution)
    if low > 1:
        below = solved(RKCheckmate(), graph, low - 1, seconds=1.0)
        assert below.status in (Status.INFEASIBLE, Status.LIMIT)


@settings(thorough, max_examples=6)
@given(cases, st.floats(0, 1))
def test_what_is_overwritten_makes_no_claim_of_rk_checkmate_wrong(graph, share):
    low, high = smallest(graph), peak_of(graph)
    assume(low < high)
    budget = max(1, low + int(share * (high - 1 - low)))
    solution = solved(RKCheckmate(), graph, budget, seconds=3.0)
    best = fastest(graph, budget)
    assert solution.status is not Status.INFEASIBLE
    assert solution.lower_bound <= best * (1 + 1e-9)
    if solution.schedule is not None:
        assert solution.peak_bytes <= budget
        assert solution.time >= best * (1 - 1e-9)
    if solution.status is Status.OPTIMAL:
        assert solution.time == pytest.approx(best, rel=2e-6)


@pytest.mark.parametrize("corrected", [False, True])
def test_a_result_is_not_freed_after_its_last_reader(corrected):
    """In the last phase `b` and `c` may run again, but not with `a2` gone in between."""
    values = (Value("a1", 0), Value("a2", 1), Value("b", 1), Value("c", 1))
    ops = (
        Op("a", (), ("a1", "a2"), 1.0),
        Op("b", ("a1", "a2"), ("b",), 0.0, workspace_bytes=1),
        Op("c", (), ("c",), 0.0, workspace_bytes=1),
    )
    graph = Graph(values, ops, results=frozenset({"a2", "b", "c"}))
    assert fastest_staged(graph, 3) == 2
    assert optimum(Level.of(Wiring.of(graph)), 3, corrected=corrected)[1] == pytest.approx(2)


@thorough
@given(small, st.floats(0.3, 1), st.booleans())
def test_a_point_of_the_program_is_a_schedule_within_the_budget(hierarchy, share, corrected):
    for level in levels_of(hierarchy):
        budget = max(1, int(share * level_peak(level)))
        picks, taken = optimum(level, budget, corrected=corrected)
        if picks is None:
            continue
        sequence = np.array(expand_nodes(level, picks))
        timeline = simulate(level.wiring.graph, expand(level.wiring, sequence))
        assert timeline.peak_bytes <= budget
        assert timeline.time == pytest.approx(taken, rel=1e-6, abs=1e-9)


@thorough
@given(small, st.randoms(use_true_random=False), st.booleans())
def test_staged_schedules_of_a_level_are_points_and_need_what_they_hold(
    hierarchy, random, corrected
):
    for level in levels_of(hierarchy):
        selection = random.choice(selections(level))
        composed = compose(level, selection)
        now = some_staged_schedule(Stages.of(composed), random)
        picks = picks_of(level, selection, now.sequence.tolist())
        formulation = formulate(level, corrected=corrected)
        point = formulation.embed(picks)
        assert point is not None
        assert formulation.read(point) == picks
        program = formulation.program
        lower, upper = program.lower.copy(), program.upper.copy()
        whole = program.integral
        assert np.all((point >= lower)[whole] & (point <= upper)[whole])
        lower[whole] = upper[whole] = point[whole]
        fixed = dataclasses.replace(program, lower=lower, upper=upper)
        budgeted = BudgetedProgram(fixed, formulation.per_byte)
        answer = budgeted.solve(max(1, now.peak_bytes), seconds=NO_LIMIT)
        assert answer.outcome is Outcome.SOLVED
        ops = np.array(expand_nodes(level, picks))
        needed = trace(level.wiring, ops).peak_bytes
        if needed > 1:
            assert budgeted.solve(needed - 1, seconds=NO_LIMIT).outcome is Outcome.INFEASIBLE
        taken = sequence_time(level.wiring, ops)
        once = float(level.wiring.time.sum())
        assert answer.value * once / 1000 == pytest.approx(taken, rel=1e-6, abs=1e-9)


@pytest.mark.sweep
@thorough
@given(tiny, st.floats(0, 1))
def test_the_optimum_beats_every_selection_and_corrections_help(hierarchy, share):
    for level in levels_of(hierarchy, most_options=4):
        counts = [len(layer.options) for layer in level.layers]
        assume(math.prod(counts) <= 12)
        every = [compose(level, each) for each in itertools.product(*map(range, counts))]
        assume(all(composed.value_count <= 14 for composed in every))
        high = level_peak(level)
        budget = max(1, int((0.4 + 0.6 * share) * high))
        best = min(
            (t for c in every if (t := fastest_staged(c.graph, budget)) is not None),
            default=math.inf,
        )
        _, corrected = optimum(level, budget)
        _, plain = optimum(level, budget, corrected=False)
        assert corrected <= plain * (1 + 1e-6) + 1e-9
        assert plain <= best * (1 + 1e-6) + 1e-9
        least = fastest_of_any_order(level, budget)
        assert least is None or corrected >= least * (1 - 1e-6) - 1e-9


def fastest_of_any_order(level, budget):
    """Bound by brute force over the ops in the order of the level, where that is small enough."""
    graph = level.wiring.graph
    order = []
    for node in level.nodes:
        layer = None if node.layer is None else level.layers[node.layer]
        if layer is None:
            order += node.choices[0].first.ops
        else:
            order += layer.backward if node.backward else layer.forward
    if order != sorted(order) or level.wiring.value_count > 11:
        return None
    return fastest(graph, budget)


def plain_op(name, inputs, outputs, time=1.0, workspace=0, back=False, once=False):
    stage = Stage.BACKWARD if back else Stage.FORWARD
    return Op(name, inputs, outputs, time, workspace, stage, replayable=not once)


def level_of(sizes, ops, results, forward, backward, options):
    boundary = next(op.name for op in ops if op.stage is Stage.BACKWARD)
    values = tuple(Value(name, size) for name, size in sizes.items())
    graph = Graph(values, tuple(ops), frozenset({"x"}), frozenset(results), boundary)
    index = graph.op_index

    def numbers(names):
        return tuple(index[name] for name in names.split())

    pairs = tuple((numbers(ahead), numbers(back)) for ahead, back in options)
    layer = Layer("layer", numbers(forward), numbers(backward), pairs)
    return Level.of(Wiring.of(graph), [layer])


def with_choices(level, change):
    """Change the choices of the halves of a level."""
    nodes = [
        node if node.layer is None else dataclasses.replace(node, choices=change(node))
        for node in level.nodes
    ]
    return dataclasses.replace(level, nodes=tuple(nodes))


@pytest.mark.parametrize("corrected", [False, True])
def test_dependencies_are_those_of_the_option(corrected):
    """`v` leaves the block and is too large to keep: made again in the backward half, alone."""
    level = level_of(
        {"x": 1, "v": 4, "y": 1, "z": 1, "w": 1, "gy": 1, "g": 1},
        [
            plain_op("f", ("x",), ("v",)),
            plain_op("g", ("v",), ("y",), 5.0),
            plain_op("q", ("v", "y"), ("z",)),
            plain_op("h", ("z",), ("w",), workspace=6),
            plain_op("loss", ("w",), ("gy",), back=True),
            plain_op("b", ("v", "gy"), ("g",), back=True),
        ],
        {"g"},
        "f g",
        "b",
        [("f g", "b"), ("f g", "f b")],
    )
    picks, taken = optimum(level, 8, corrected=corrected)
    assert taken == pytest.approx(10 + 1)
    assert (5, 4, 1) not in picks
    assert [o for _, k, o in picks if level.nodes[k].backward] == [1]

    def all_read(node):
        reads = frozenset().union(*(choice.first.reads for choice in node.choices))
        runs = [dataclasses.replace(choice.first, reads=reads) for choice in node.choices]
        return tuple(
            dataclasses.replace(choice, first=run, later=run)
            for choice, run in zip(node.choices, runs, strict=True)
        )

    blunt = with_choices(level, lambda node: all_read(node) if node.backward else node.choices)
    assert optimum(blunt, 8, corrected=corrected)[1] == pytest.approx(10 + 6)


@pytest.mark.parametrize("corrected", [False, True])
def test_a_forward_half_may_forget(corrected):
    """`y` cannot be kept along `p`; beside `q` it must be made without what is saved."""
    level = level_of(
        {"x": 1, "a": 5, "y": 2, "p": 0, "z": 1, "gz": 1, "gy": 1, "g": 1},
        [
            plain_op("f1", ("x",), ("a",)),
            plain_op("f2", ("a",), ("y",)),
            plain_op("p", ("x",), ("p",), workspace=7),
            plain_op("q", ("y",), ("z",), workspace=5),
            plain_op("loss", ("z",), ("gz",), back=True),
            plain_op("bq", ("gz",), ("gy",), back=True),
            plain_op("b", ("a", "gy"), ("g",), back=True),
        ],
        {"g", "p"},
        "f1 f2",
        "b",
        [("f1 f2", "b")],
    )
    _, taken = optimum(level, 8, corrected=corrected)
    assert taken == pytest.approx(7 + 2 + 2)
    mindful = with_choices(level, lambda node: node.choices[:1])
    assert optimum(mindful, 8, corrected=corrected)[0] is None


@pytest.mark.parametrize("corrected", [False, True])
def test_a_phantom_may_be_made_again_with_another_option(corrected):
    """`g` is needed before and after `k`, beside which nothing but `m` fits; then `m` is in the
    way of the option that is faster, which the first time there was room for."""
    ops = [
        plain_op("f1", ("x",), ("a1",)),
        plain_op("f2", ("x",), ("a2",)),
        plain_op("f3", ("a1", "a2"), ("y",)),
        plain_op("loss", ("y",), ("gy",), back=True),
        plain_op("b2", ("a2", "gy"), ("h",), workspace=2, back=True),
        plain_op("b1", ("a1", "h"), ("g",), back=True),
        plain_op("m", ("g",), ("m",), back=True, once=True),
        plain_op("k", ("x",), ("k",), workspace=7, back=True),
        plain_op("n", ("g", "m"), ("end",), back=True),
    ]
    sizes = {"x": 1, "a1": 3, "a2": 3, "y": 1, "gy": 1, "h": 1, "g": 2, "m": 3, "k": 0, "end": 1}
    fast, small = ("f1 f2 f3", "b2 b1"), ("f1 f2 f3", "f2 b2 f1 b1")

    def of(*options):
        return level_of(sizes, ops, {"end", "k"}, "f1 f2 f3", "b2 b1", options)

    picks, taken = optimum(of(fast, small), 10, corrected=corrected)
    assert taken == pytest.approx(9 + 3 + 1 + 4)
    assert [o for _, k, o in picks if k == 2] == [0, 1]
    assert optimum(of(fast), 10, corrected=corrected)[0] is None
    assert optimum(of(small), 10, corrected=corrected)[1] == pytest.approx(9 + 2 + 3 + 1 + 4)


@pytest.mark.parametrize("corrected", [False, True])
def test_what_is_freed_inside_a_run_is_seen_by_the_corrections_alone(corrected):
    """`u`, read by the first op of the forward half alone, is in the way of its second."""
    level = level_of(
        {"x": 1, "u": 4, "a": 1, "y": 4, "gy": 1, "g": 1},
        [
            plain_op("u", ("x",), ("u",)),
            plain_op("f1", ("u",), ("a",)),
            plain_op("f2", ("a",), ("y",), workspace=2),
            plain_op("loss", ("y",), ("gy",), back=True),
            plain_op("b", ("a", "gy"), ("g",), back=True),
        ],
        {"g"},
        "f1 f2",
        "b",
        [("f1 f2", "b")],
    )
    needed = 7 if corrected else 11
    assert optimum(level, needed, corrected=corrected)[1] == pytest.approx(5)
    assert optimum(level, needed - 1, corrected=corrected)[0] is None


@pytest.mark.sweep
@settings(thorough, max_examples=6)
@given(small, st.floats(0.3, 1), st.booleans())
def test_what_the_search_finds_fits_and_is_no_slower_than_the_program(hierarchy, share, corrected):
    level = levels_of(hierarchy)[-1]
    budget = max(1, int(share * level_peak(level)))
    told = []
    found = search(
        level,
        budget,
        deadline=time.perf_counter() + 3,
        gap=0.0,
        corrected=corrected,
        back_end="HIGHS",
        tell=told.append,
    )
    _, value = optimum(level, budget, corrected=corrected)
    assert (found.outcome is Outcome.INFEASIBLE) <= (value == math.inf)
    assert (found.sequence is None) == (not told)
    if found.sequence is None:
        assert value == math.inf
        return
    times = [sequence_time(level.wiring, sequence) for sequence in told]
    assert times == sorted(times, reverse=True)
    timeline = simulate(level.wiring.graph, expand(level.wiring, found.sequence))
    assert timeline.peak_bytes <= budget
    assert timeline.time == pytest.approx(times[-1])
    assert timeline.time <= value * (1 + 1e-6) + 1e-9


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(tiny, st.floats(0.4, 1))
def test_gurobi_has_the_optimum_of_highs(hierarchy, share):
    level = levels_of(hierarchy)[-1]
    budget = max(1, int(share * level_peak(level)))
    _, here = optimum(level, budget)
    _, there = optimum(level, budget, back_end="GUROBI")
    assert here == pytest.approx(there, rel=1e-6, abs=1e-9)
