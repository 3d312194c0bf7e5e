"""The relaxations of refine: below every schedule, with segments, pairs and checkpoints."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.random_graphs import graphs
from solver_cases.relaxations import first_schedule, refine
from solver_cases.synthetic import gpt2

from remat_graph import Graph, Op, Value, simulate
from remat_graph.testing import unit_chain
from remat_solvers import Limit, store_all
from remat_solvers.bounds.peak import while_running
from remat_solvers.core.milp import Outcome, relaxed, solve_program
from remat_solvers.core.problem import silent
from remat_solvers.core.trace import first_runs, trace
from remat_solvers.core.wiring import Wiring, expand, sequence_of
from remat_solvers.refine.construct import construct
from remat_solvers.refine.heuristics import Heuristics
from remat_solvers.refine.point import Stagewise, embed, read_point
from remat_solvers.refine.programs import Programs
from remat_solvers.refine.refinements import Refinement, fullest, nearly_full, tightest
from remat_solvers.refine.relaxation import COST_OF_ONCE, relax
from remat_solvers.refine.state import State
from remat_solvers.search.repair import repaired
from remat_solvers.testing.brute_force import fastest


@settings(max_examples=60, deadline=None)
@given(graphs(most_ops=10, most_values=14), st.data())
def test_every_sequence_is_a_point_of_the_relaxation(graph, data):
    """Any legal sequence, however wasteful, satisfies every row at its own peak."""
    wiring = Wiring.of(graph)
    sequence = np.array(random_sequence(wiring, data.draw(st.randoms(use_true_random=False))))
    now = trace(wiring, sequence)
    assert simulate(graph, expand(wiring, sequence)).peak_bytes == now.peak_bytes
    places = st.integers(0, wiring.op_count - 1)
    everywhere = st.just(set(range(wiring.op_count)))
    checkpoints = data.draw(st.one_of(everywhere, st.sets(places, min_size=1)))
    running = {(c, op) for c in checkpoints for op in range(c + 1)}
    relaxation = relax(
        wiring,
        max(1, now.peak_bytes),
        sorted(checkpoints),
        running=sorted(running),
        splits=sorted(running),
        paired=data.draw(st.booleans()),
    )
    program = relaxation.program
    point = embed(wiring, relaxation, now)
    assert np.all(program.matrix @ point <= program.right + 1e-6)
    assert np.all(point >= program.lower)
    extra = math.fsum(wiring.time[sequence].tolist()) - graph.time
    scale = 1000 / max(graph.time, 1e-300)
    assert program.cost @ point <= extra * scale * (1 + 1e-9) + 1e-9


def test_what_cannot_be_made_again_may_be_overwritten_at_a_checkpoint():
    values = (Value("once", 1), Value("out", 1))
    ops = (
        Op("once", (), ("once",), 1.0, replayable=False),
        Op("over", ("once",), ("out",), 1.0, overwrites=(("once", "out"),)),
    )
    wiring = Wiring.of(Graph(values, ops, results=frozenset({"out"})))
    program = relax(wiring, 1, [1], running=[(1, 1)]).program
    assert solve_program(program, seconds=NO_LIMIT).outcome is Outcome.SOLVED


def test_a_segment_that_is_cut_counts_what_runs_twice_in_it():
    """Seven layers in room for two: 23, where 22 is all that checkpoints and running rows prove."""
    chain = unit_chain(7)
    wiring = Wiring.of(chain)
    least = fastest(chain, 2)
    everywhere = range(wiring.op_count)
    running = [(c, op) for c in everywhere for op in range(c + 1)]
    cut = (chain.op_index["b6"], chain.op_index["f4"])
    bounds = []
    for splits in ((), (cut,)):
        relaxation = relax(wiring, 2, list(everywhere), running=running, splits=splits)
        assert len(relaxation.splits) == len(splits)
        answer = solve_program(relaxation.program, seconds=NO_LIMIT)
        assert answer.outcome is Outcome.SOLVED
        bounds.append(chain.time * (1 + answer.bound / COST_OF_ONCE))
    assert bounds == pytest.approx([22, 23], rel=1e-5)
    assert least == 23
    built = construct(wiring, read_point(relaxation, answer.point))
    assert simulate(chain, expand(wiring, built)).time == 23


def test_what_runs_on_both_sides_of_a_cut_for_nothing_is_a_point():
    values = (Value("unread", 0), Value("result", 1))
    ops = (Op("one", (), ("unread",), 0.0), Op("two", (), ("result",), 0.0))
    wiring = Wiring.of(Graph(values, ops, results=frozenset({"result"})))
    relaxation = relax(wiring, 1, [0, 1], running=[(1, 1)], splits=[(1, 1)])
    point = embed(wiring, relaxation, trace(wiring, np.array([0, 1, 0, 1, 0])))
    assert len(relaxation.splits) == 1
    assert np.all(relaxation.program.matrix @ point <= relaxation.program.right + 1e-6)


def test_no_segment_with_first_computations_in_it_is_cut():
    wiring = Wiring.of(unit_chain(4))
    relaxation = relax(wiring, 3, [3, 5], running=[(3, 2), (5, 2)], splits=[(3, 2), (5, 2)])
    assert relaxation.splits == ()


def linear_bound(wiring, budget, checkpoints, *, paired):
    program = relaxed(relax(wiring, budget, checkpoints, paired=paired).program)
    return solve_program(program, seconds=NO_LIMIT).bound


@settings(max_examples=24, deadline=None)
@given(graphs(most_ops=16, most_values=20), st.floats(0.3, 0.9), st.data())
def test_pairs_bound_as_well_as_fewer_checkpoints(graph, fraction, data):
    """The program without every other checkpoint is implied by the one with pairs of segments."""
    wiring = Wiring.of(graph)
    budget = max(1, int(fraction * simulate(graph, store_all(graph)).peak_bytes))
    places = st.integers(0, wiring.op_count - 1)
    checkpoints = sorted(data.draw(st.sets(places, min_size=1, max_size=6)))
    fine = linear_bound(wiring, budget, checkpoints, paired=True)
    assert fine >= linear_bound(wiring, budget, checkpoints[::2], paired=False) - 1e-4


def test_pairs_bound_better_than_without():
    graph = gpt2(layers=2)
    wiring = Wiring.of(graph)
    budget = int(0.275 * simulate(graph, store_all(graph)).peak_bytes)
    checkpoints = [56, 77, 78, 93, 98, 110]
    loose = linear_bound(wiring, budget, checkpoints, paired=False)
    assert linear_bound(wiring, budget, checkpoints, paired=True) > loose * 1.05


def test_a_checkpoint_is_tried_in_place_of_its_neighbours_and_beside_them():
    now = Refinement(frozenset({10, 50}), frozenset({(10, 3), (50, 4)}))
    near, far = Refinement(frozenset({12}), frozenset()), Refinement(frozenset({90}), frozenset())
    moves = now.moves([near, far], 3)
    assert [sorted(move.checkpoints) for move in moves] == [
        [12, 50, 90], [10, 12, 50, 90], [12, 50], [10, 12, 50], [10, 50, 90],
    ]  # fmt: skip
    assert moves[0].running == {(50, 4)}
    assert moves[1].running == now.running
    assert now.moves([], 3) == []


def test_the_fullest_moments_of_a_schedule_are_apart():
    graph = gpt2(layers=3)
    wiring = Wiring.of(graph)
    budget = int(0.35 * simulate(graph, store_all(graph)).peak_bytes)
    now = trace(wiring, sequence_of(wiring, first_schedule(graph, budget)))
    during = now.during[first_runs(wiring, now)]
    ways = fullest(wiring, now, budget)
    assert len({way.checkpoints for way in ways}) == len(ways)
    for way in ways:
        chosen = sorted(way.checkpoints)
        assert int(during.argmax()) in chosen
        assert (during[chosen] >= 0.9 * budget).all()
        assert 2 <= len(chosen) <= 6
        assert np.diff(chosen).min() > wiring.op_count // 50
    assert [way.checkpoints for way in fullest(wiring, now, 2 * budget)] == [frozenset()]


@pytest.mark.sweep
def test_checkpoints_are_grown_by_what_their_relaxations_prove():
    graph = gpt2(layers=3)
    wiring = Wiring.of(graph)
    budget = int(0.275 * simulate(graph, store_all(graph)).peak_bytes)
    now = repaired(wiring, trace(wiring, np.arange(wiring.op_count)), budget)
    limit = Limit.starting_now(NO_LIMIT)
    state = State(wiring, budget, time.perf_counter() + NO_LIMIT, limit, silent)
    programs = Programs(state, Heuristics(state))
    assert programs.grow() is None  # without a schedule no place is known
    assert state.offer(now)
    candidates = nearly_full(wiring, now, budget)
    during = now.during[first_runs(wiring, now)]
    assert 2 <= len(candidates) <= 60
    assert (during[candidates] >= 0.9 * budget).all()

    def proved(checkpoints):
        program = relaxed(relax(wiring, budget, sorted(checkpoints), paired=True).program)
        return solve_program(program, seconds=NO_LIMIT).bound

    first, second = programs.grow(), programs.grow()
    assert first.checkpoints <= second.checkpoints <= set(candidates)
    assert len(first.checkpoints) <= 4
    alone = {op: proved({op}) for op in candidates}
    assert max(alone, key=alone.get) in first.checkpoints
    assert max(alone.values()) < proved(first.checkpoints) < proved(second.checkpoints)
    assert state.bound == pytest.approx(state.time_of(proved(second.checkpoints)))
    assert state.bound <= refine(graph, budget).time
    state.bound = state.best_time
    assert programs.grow() is None  # near the bound nothing is to be gained


def test_the_tightest_ops_leave_the_least_room_and_are_apart():
    graph = gpt2(layers=3)
    wiring = Wiring.of(graph)
    everything = trace(wiring, np.arange(wiring.op_count))
    budget = everything.peak_bytes // 2
    need = while_running(wiring)
    chosen = tightest(wiring, budget)
    over = everything.during > 1.1 * budget
    assert need[over].max() - need[chosen[0]] <= budget / 100
    assert over[chosen].all()
    room = 100 * need[chosen] // budget
    assert (np.diff(room) <= 0).all()
    assert np.diff(sorted(chosen)).min() > wiring.op_count // 20
    assert tightest(wiring, everything.peak_bytes) == []


def heavy_gradients(layers: int, workspace: int) -> Graph:
    """A chain and its gradients, every other one with a workspace."""
    values, ops = [Value("h0", 10)], []
    for i in range(layers):
        values.append(Value(f"h{i + 1}", 10))
        ops.append(Op(f"f{i}", (f"h{i}",), (f"h{i + 1}",), 1.0))
    values.append(Value(f"g{layers}", 10))
    ops.append(Op("loss", (f"h{layers}",), (f"g{layers}",), 1.0))
    for i in reversed(range(layers)):
        values.append(Value(f"g{i}", 10))
        heavy = workspace if i % 2 else 0
        ops.append(Op(f"b{i}", (f"g{i + 1}", f"h{i}"), (f"g{i}",), 1.0, workspace_bytes=heavy))
    return Graph(tuple(values), tuple(ops), frozenset({"h0"}), frozenset({"g0"}), None)


@pytest.mark.sweep
def test_the_tightest_ops_prove_more_than_the_fullest_moment():
    wiring = Wiring.of(heavy_gradients(16, workspace=60))
    budget = 110
    fullest_moment = int(trace(wiring, np.arange(wiring.op_count)).during.argmax())

    def bound(checkpoints: list[int]) -> float:
        return solve_program(relax(wiring, budget, checkpoints).program, seconds=NO_LIMIT).bound

    assert bound(sorted(tightest(wiring, budget))) > 1.2 * bound([fullest_moment])


def random_sequence(wiring, random):
    """Compute ops again at random, also twice in a row and at the end, in any order."""
    sequence: list[int] = []
    for op in range(wiring.op_count + 1):
        able = [again for again in range(op) if wiring.replayable_list[again]]
        some = random.sample(able, min(len(able), random.choice([1, 2, 8])))
        sequence += [random.choice(some) for _ in range(random.choice([0, 0, 2, 5])) if some]
        sequence += [op] if op < wiring.op_count else []
    return sequence


def test_a_point_keeps_what_it_keeps_at_the_next_checkpoint():
    point = Stagewise((3, 7), (frozenset({1}), frozenset({2})), (frozenset(), frozenset()))
    assert [point.keeps(op, 1) for op in (0, 3, 4, 7, 8)] == [True, True, False, False, True]
