import dataclasses
import math
from collections import Counter
from math import comb

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.answers import check_of_chain, peak_of
from solver_cases.chains import chain, chains, fastest_persistent
from solver_cases.random_graphs import graphs
from solver_cases.synthetic import gpt2

from remat_graph import Compute, Graph, Op, Stage, Status, Value
from remat_solvers import (
    BudgetTooSmall,
    InvalidProblem,
    Limit,
    Problem,
    UnsuitableSolver,
    solve,
)
from remat_solvers.chains.chain import find_chains, merged
from remat_solvers.chains.costs import measure_stages
from remat_solvers.chains.program import fastest as fastest_sequence
from remat_solvers.chains.program import least_bytes
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.hierarchical.rk_rotor import RKRotor
from remat_solvers.published.rotor import Rotor
from remat_solvers.testing.brute_force import fastest

UNIT = {
    "size": 1,
    "grad": 1,
    "time": 1.0,
    "back": 1.0,
    "workspace": 0,
    "back_workspace": 0,
    "reads": "both",
    "weight": None,
    "result": False,
}

thorough = settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rotor(graph, budget, slots=500, most_stages=200):
    solver = Rotor(slots=slots, most_stages=most_stages)
    return solver.solve(Problem(graph, budget), Limit.starting_now(None), lambda progress: None)


@thorough
@given(chains(), st.data())
def test_equals_the_enumeration_of_its_class(graph, data):
    peak = max(1, peak_of(graph))
    budgets = sorted(data.draw(st.sets(st.integers(1, peak + 2), min_size=1, max_size=4)))
    for budget, best in zip(budgets, fastest_persistent(graph, budgets), strict=True):
        solution = rotor(graph, budget, slots=budget)
        check_of_chain(graph, budget, solution)
        assert (best is None) == (solution.schedule is None)
        if best is not None:
            assert solution.time == pytest.approx(best)


@thorough
@given(chains(most_stages=4))
def test_least_bytes_is_that_of_the_enumeration(graph):
    wiring = Wiring.of(graph)
    least = least_bytes(measure_stages(wiring, find_chains(wiring)[0]))
    budgets = [max(1, least), max(1, least - 1)]
    enough, less = fastest_persistent(graph, budgets)
    assert enough is not None
    assert less is None or least <= 1


@thorough
@given(chains(most_stages=4, results=True), st.floats(0.3, 1.1), st.sampled_from([3, 7, 500]))
def test_never_over_budget_and_never_below_the_truth(graph, fraction, slots):
    budget = max(1, int(peak_of(graph) * fraction))
    solution = rotor(graph, budget, slots=slots)
    check_of_chain(graph, budget, solution)
    best = fastest(graph, budget)
    if solution.schedule is not None:
        assert best is not None
        assert solution.time >= best * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(graphs(most_ops=9), st.floats(0.3, 1.1))
def test_what_it_takes_it_schedules(graph, fraction):
    budget = max(1, int(peak_of(graph) * fraction))
    if Rotor().can_solve(Problem(graph, budget)) is None:
        check_of_chain(graph, budget, rotor(graph, budget))
        roomy = 3 * sum(v.size_bytes for v in graph.values) + 100
        assert rotor(graph, roomy, slots=roomy).schedule is not None


@pytest.mark.parametrize(("steps", "snapshots"), [(5, 1), (6, 2), (10, 3), (20, 3), (31, 4)])
def test_unit_chains_take_the_binomial_number_of_steps(steps, snapshots):
    """Griewank and Walther: r * l - binom(c + r, r - 1) advances, c snapshots with the input."""
    step = {**UNIT, "grad": 0, "back": 0.0, "back_workspace": 1, "reads": "input"}
    graph = chain([*[step] * (steps - 1), {**step, "size": 0, "time": 0.0}])
    sweeps = next(r for r in range(steps) if comb(snapshots + r, snapshots) >= steps)
    expected = sweeps * steps - comb(snapshots + sweeps, sweeps - 1)
    assert rotor(graph, snapshots + 1).time == expected


def test_blocks_of_a_transformer_are_found():
    graph = gpt2(layers=3)
    chains = find_chains(Wiring.of(graph))
    counts = [len(found.stages) for found in chains]
    assert counts == sorted(counts, reverse=True)
    inner = [(len(stage.forward), len(stage.backward)) for stage in chains[-1].stages[2:-4]]
    assert inner == [(14, 18), (6, 10)] * 3
    for found in chains:
        ops = [op for stage in found.stages for op in (*stage.forward, *stage.backward)]
        assert sorted(ops) == list(range(len(graph.ops)))


@pytest.mark.parametrize("fraction", [0.7, 0.4])
def test_a_transformer_is_scheduled_above_the_certified_bound(fraction):
    graph = gpt2(layers=3)
    budget = int(peak_of(graph) * fraction)
    solution = solve(graph, budget, solver="rotor")
    bound = solve(graph, budget, solver="refine", limit_seconds=3).lower_bound
    assert bound <= solution.time <= bound + 0.2 * graph.time


def test_finer_slots_are_never_slower_and_coarse_ones_fit():
    graph = gpt2(layers=2)
    budget = peak_of(graph) // 2
    times = [rotor(graph, budget, slots=slots).time for slots in (100, 400)]
    assert times == sorted(times, reverse=True)
    few = rotor(graph, budget, most_stages=4)
    check_of_chain(graph, budget, few)
    wiring = Wiring.of(graph)
    coarse = merged(wiring, find_chains(wiring)[0], 4)
    assert len(coarse.stages) == 4
    assert sorted(op for s in coarse.stages for op in (*s.forward, *s.backward)) == list(
        range(len(graph.ops))
    )


def test_too_small_names_what_fits():
    graph = chain([{**UNIT, "size": 4, "grad": 4}] * 6)
    wiring = Wiring.of(graph)
    least = least_bytes(measure_stages(wiring, find_chains(wiring)[0]))
    assert solve(graph, least, solver="rotor").peak_bytes == least
    assert rotor(graph, least - 1).status is Status.LIMIT
    with pytest.raises(BudgetTooSmall):
        solve(graph, least - 1, solver="rotor")


def test_what_is_not_replayable_runs_once_and_is_held():
    graph = chain([UNIT] * 9)
    ops = tuple(dataclasses.replace(op, replayable=op.name != "f4") for op in graph.ops)
    graph = Graph(graph.values, ops, graph.resident, graph.results, graph.boundary)
    peak = peak_of(graph)
    found = []
    for budget in range(1, peak + 1):
        solution = rotor(graph, budget)
        check_of_chain(graph, budget, solution)
        if solution.schedule is not None:
            found.append(Counter(s.op for s in solution.schedule if isinstance(s, Compute)))
    assert found[0]["f3"] > 1 == found[0]["f4"]
    assert found[0]["f5"] > 1
    assert set(found[-1].values()) == {1}


def test_masks_do_not_hinder_a_chain():
    values = [Value("x", 1), Value("mask", 1), *(Value(f"a{i}", 5) for i in range(6))]
    ops = [Op("make_mask", ("x",), ("mask",), 1.0)]
    ops += [Op(f"f{i}", (f"a{i - 1}" if i else "x", "mask"), (f"a{i}",), 1.0) for i in range(6)]
    grad = "a5"
    for i in reversed(range(6)):
        values.append(Value(f"g{i}", 5))
        reads = dict.fromkeys((grad, f"a{i}", "mask"))
        ops.append(Op(f"b{i}", tuple(reads), (f"g{i}",), 1.0, stage=Stage.BACKWARD, twin=f"f{i}"))
        grad = f"g{i}"
    graph = Graph(tuple(values), tuple(ops), frozenset({"x"}), frozenset({grad}), "b5")
    solution = solve(graph, peak_of(graph) - 8, solver="rotor")
    assert graph.time < solution.time <= 2 * graph.time


def skip_over_everything():
    values = [Value("x", 1), *(Value(v, 2) for v in ("a", "b", "c", "d", "g"))]
    ops = (
        Op("f", ("x",), ("a",), 1.0),
        Op("h", ("a",), ("b",), 1.0),
        Op("i", ("b",), ("c",), 1.0),
        Op("j", ("a", "c"), ("d",), 1.0),
        Op("k", ("d", "b"), ("g",), 1.0, stage=Stage.BACKWARD, twin="f"),
    )
    return Graph(tuple(values), ops, frozenset({"x"}), frozenset({"g"}), "k")


def test_graphs_that_are_no_chain_are_refused_with_the_reason():
    tied = skip_over_everything()
    values = (Value("x", 1), *(Value(v, 2) for v in "abcg"))
    ops = (
        Op("f", ("x",), ("a",), 1.0),
        Op("h", ("x",), ("b",), 1.0),
        Op("i", ("a", "b"), ("c",), 1.0),
        Op("j", ("a", "c", "b"), ("g",), 1.0, stage=Stage.BACKWARD, twin="f"),
    )
    crossed = Graph(values, (*ops[:3], ops[3]), frozenset({"x"}), frozenset({"g"}), "j")
    whole = Graph(values[:2], ops[:1], frozenset({"x"}), frozenset({"a"}))
    empty = Graph((), (), frozenset(), frozenset())
    for graph, reason in (
        (tied, "backward half ties all"),
        (crossed, "backward half ties all"),
        (whole, "where its backward half begins"),
        (empty, "no ops"),
    ):
        with pytest.raises(UnsuitableSolver, match=reason):
            solve(graph, 100, solver="rotor")


def test_two_values_that_always_go_on_together_are_no_chain():
    values = (Value("x", 1), *(Value(v, 2) for v in ("a", "b", "d", "g")))
    ops = (
        Op("f", ("x",), ("a", "b"), 1.0),
        Op("i", ("a", "b"), ("d",), 1.0),
        Op("j", ("d",), ("g",), 1.0, stage=Stage.BACKWARD, twin="f"),
    )
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"g"}), "j")
    with pytest.raises(UnsuitableSolver, match="one value alone"):
        solve(graph, 100, solver="rotor")


def test_one_stage_and_no_cost_at_all():
    values = (Value("x", 1), Value("a", 0), Value("g", 0))
    ops = (
        Op("f", ("x",), ("a",), 0.0),
        Op("b", ("a",), ("g",), 0.0, stage=Stage.BACKWARD, twin="f"),
    )
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"g"}), "b")
    solution = solve(graph, 1, solver="rotor")
    assert (solution.time, solution.peak_bytes, solution.status) == (0.0, 0, Status.OPTIMAL)


def test_chains_side_by_side_are_one_chain():
    first = [Value("a", 3), Value("b", 3), Value("c", 3), Value("g", 1), Value("h", 1)]
    ops = (
        Op("f", (), ("a",), 1.0),
        Op("k", ("a",), ("b",), 1.0),
        Op("l", (), ("c",), 1.0),
        Op("m", ("c",), ("g",), 1.0, stage=Stage.BACKWARD, twin="l"),
        Op("n", ("b", "a"), ("h",), 1.0, stage=Stage.BACKWARD, twin="k"),
    )
    graph = Graph(tuple(first), ops, frozenset(), frozenset({"g", "h"}), "m")
    assert peak_of(graph) == 10
    assert solve(graph, 8, solver="rotor").time == 6.0


@pytest.mark.parametrize(
    ("solver", "option"),
    [(Rotor, "slots"), (Rotor, "most_stages"), (RKRotor, "slots"), (RKRotor, "most_options")],
)
@pytest.mark.parametrize("wrong", [0, -1, "x", None, 2.5, True])
def test_bad_settings_are_refused(solver, option, wrong):
    with pytest.raises(InvalidProblem, match=f"{option}=.*whole number, 1 or more"):
        solver(**{option: wrong})


def test_without_time_it_says_limit():
    graph = chain([UNIT] * 5)
    limit = Limit.starting_now(0)
    solution = Rotor().solve(Problem(graph, peak_of(graph)), limit, lambda progress: None)
    assert solution.status is Status.LIMIT


def test_a_twin_too_late_ties_no_more_than_it_must():
    graph = chain([UNIT] * 5)
    ops = [dataclasses.replace(op, twin="f4" if op.name == "b1" else op.twin) for op in graph.ops]
    late = Graph(graph.values, tuple(ops), graph.resident, graph.results, graph.boundary)
    assert [len(stage.forward) for stage in find_chains(Wiring.of(late))[0].stages] == [1, 2, 1, 1]


@pytest.mark.parametrize("reads", ["input", "output", "both"])
def test_twins_need_not_be_named(reads):
    graph = chain([{**UNIT, "reads": reads}] * 8)
    ops = tuple(dataclasses.replace(op, twin=None) for op in graph.ops)
    bare = dataclasses.replace(graph, ops=ops)
    assert len(find_chains(Wiring.of(bare))[0].stages) == 8
    budget = peak_of(graph) * 6 // 10
    assert rotor(bare, budget).time == rotor(graph, budget).time < math.inf


def test_what_the_backward_of_an_earlier_stage_reads_is_held():
    """However stages are merged: here b1 reads what f2 makes, and merging hides why it is held."""
    values = [Value("x", 1), Value("a2", 5), *(Value(v, 1) for v in ("a0", "a1", "a3", "a4"))]
    values += [Value(f"g{i}", 1) for i in range(5)]
    forward = [Op(f"f{i}", (f"a{i - 1}" if i else "x",), (f"a{i}",), 1.0) for i in range(5)]
    forward[4] = dataclasses.replace(forward[4], inputs=("a3", "a2"))
    backward = [
        Op(
            f"b{i}",
            (*(() if i == 4 else (f"g{i + 1}",)), *(("a2",) if i == 1 else ())),
            (f"g{i}",),
            1.0,
            stage=Stage.BACKWARD,
            twin=f"f{i}",
        )
        for i in reversed(range(5))
    ]
    ops = (*forward, *backward)
    graph = Graph(tuple(values), ops, frozenset({"x"}), frozenset({"g0"}), "b4")
    wiring = Wiring.of(graph)
    spanning = wiring.values.index("a2")
    for found in find_chains(wiring):
        for most in range(2, len(found.stages) + 1):
            coarse = merged(wiring, found, most)
            home = {op: k for k, s in enumerate(coarse.stages) for op in (*s.forward, *s.backward)}
            assert spanning in coarse.held or home[graph.op_index["b1"]] == home[2]
            costs = measure_stages(wiring, coarse)
            least = least_bytes(costs)
            sequence = fastest_sequence(costs, least, least, math.inf)
            assert sequence is not None
            assert trace(wiring, np.array(sequence)).peak_bytes <= least


def test_neighbours_without_backward_are_one_stage():
    """The writing of statistics after the loss, say, is no chain of its own."""
    graph = chain([UNIT] * 4)
    tail = [Op(f"s{i}", ("a-1",), (f"n{i}",), 0.0, replayable=False) for i in range(3)]
    ops = (*graph.ops[:4], *tail, *graph.ops[4:])
    values = (*graph.values, *(Value(f"n{i}", 1) for i in range(3)))
    results = graph.results | {"n0", "n1", "n2"}
    longer = Graph(values, ops, graph.resident, results, graph.boundary)
    counts = [len(stage.forward) for stage in find_chains(Wiring.of(longer))[0].stages]
    assert counts == [1, 1, 1, 1, 3]
    for budget in range(peak_of(graph) - 1, peak_of(graph) + 4):
        check_of_chain(longer, budget, rotor(longer, budget))
