"""The fastest schedule within one sequence, and schedules crossed through it."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from solver_cases.random_graphs import graphs
from solver_cases.synthetic import gpt2

from remat_graph import simulate
from remat_solvers.baselines.store_all import store_all
from remat_solvers.core.milp import Outcome, solve_program
from remat_solvers.core.trace import first_runs, sequence_time, trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.refine import crossover
from remat_solvers.refine.crossover import Crossover, merge
from remat_solvers.refine.subsequence import Subsequences
from remat_solvers.search.evict import EvictionPerturbation, evict
from remat_solvers.search.local_search import away

FAR = 1e9  # a deadline


@st.composite
def sequences(draw, wiring, most=6):
    """Draw a legal sequence in the order of the graph, with runs that nothing may need."""
    order = list(range(wiring.op_count))
    ops = [op for op in order if wiring.replayable_list[op]]
    for _ in range(draw(st.integers(1, most)) if ops else 0):
        op = draw(st.sampled_from(ops))
        order.insert(draw(st.integers(order.index(op) + 1, len(order))), op)
    return np.array(order)


def peak_where_it_stands(wiring, sequence, positions):
    """Peak of some runs of a sequence; `None` if an op runs before what it reads is made."""
    made = set()
    for op in sequence[positions].tolist():
        if not made.issuperset(wiring.inputs[op]):
            return None
        made.update(wiring.outputs[op])
    return trace(wiring, sequence[positions]).peak_bytes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_program_finds_the_fastest_of_all_subsequences(data):
    graph = data.draw(graphs(uneven=data.draw(st.booleans())))
    wiring = Wiring.of(graph)
    sequence = data.draw(sequences(wiring))
    now = trace(wiring, sequence)
    certain = np.zeros(len(sequence), dtype=np.bool_)
    certain[first_runs(wiring, now)] = True
    more = data.draw(st.lists(st.sampled_from(range(len(sequence))), max_size=2))
    certain[more] = True
    free = np.flatnonzero(~certain)
    assume(len(free))
    choices = [
        np.sort(np.concatenate([np.flatnonzero(certain), np.array(some, dtype=np.int64)]))
        for count in range(len(free) + 1)
        for some in itertools.combinations(free.tolist(), count)
    ]
    peaks = [peak_where_it_stands(wiring, sequence, choice) for choice in choices]
    budget = max(1, data.draw(st.sampled_from(peaks)))
    fastest = min(
        sequence_time(wiring, sequence[choice])
        for choice, peak in zip(choices, peaks, strict=True)
        if peak <= budget
    )

    program = Subsequences(wiring, budget, sequence, certain)
    for choice, peak in zip(choices, peaks, strict=True):
        point = program.embed(choice)
        np.testing.assert_array_equal(program.read(point), sequence[choice])
        over = program.program.matrix @ point - program.program.right
        assert (over.max(initial=0.0) <= 1e-6) == (peak <= budget)
    answer = solve_program(program.program, seconds=20)
    assert answer.outcome is Outcome.SOLVED
    found = program.read(answer.point)
    assert sequence_time(wiring, found) == pytest.approx(fastest)
    assert trace(wiring, found).peak_bytes <= budget


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_merged_sequence_has_both_as_parts(data):
    wiring = Wiring.of(data.draw(graphs(12, 16)))
    one, other = (trace(wiring, data.draw(sequences(wiring))) for _ in range(2))
    sequence, of_one, of_other = merge(wiring, one, other)
    np.testing.assert_array_equal(sequence[of_one], one.sequence)
    np.testing.assert_array_equal(sequence[of_other], other.sequence)
    assert set(of_one) | set(of_other) == set(range(len(sequence)))
    assert set(of_one) & set(of_other) >= set(of_one[first_runs(wiring, one)])


@settings(max_examples=30, deadline=None)
@given(graphs(20, 30), st.floats(0.3, 1.0), st.integers(0, 3))
def test_what_is_crossed_fits_and_is_no_slower(graph, fraction, seed):
    wiring = Wiring.of(graph)
    peak = simulate(graph, store_all(graph)).peak_bytes
    now = evict(wiring, np.arange(wiring.op_count), int(fraction * peak))
    budget = max(1, now.peak_bytes)
    crossing = Crossover(budget, seed)
    for _ in range(3):
        found = crossing.step(wiring, now, FAR)
        timeline = simulate(graph, expand(wiring, found.sequence))
        assert timeline.peak_bytes == found.peak_bytes <= budget
        assert timeline.time <= sequence_time(wiring, now.sequence) * (1 + 1e-12)
        now = found


@pytest.fixture
def evicted():
    graph = gpt2(layers=3)
    wiring = Wiring.of(graph)
    budget = int(0.35 * simulate(graph, store_all(graph)).peak_bytes)
    now = evict(wiring, np.arange(wiring.op_count), budget)
    assert now.peak_bytes <= budget
    return wiring, budget, now


def test_two_schedules_have_a_faster_one_among_their_runs(evicted):
    wiring, budget, now = evicted
    prices = EvictionPerturbation(cover=0.0, crowding=8.0, hold=0.5, noise=0.3, seed=1)
    other = evict(wiring, np.arange(wiring.op_count), budget, perturbation=prices)
    assert other.peak_bytes <= budget
    found = Crossover(budget).cross(wiring, now, other, FAR)
    assert found.peak_bytes <= budget
    best = min(sequence_time(wiring, one.sequence) for one in (now, other))
    assert sequence_time(wiring, found.sequence) < 0.999 * best


def test_steps_improve_what_eviction_found(evicted):
    wiring, budget, first = evicted
    crossing = Crossover(budget)
    now = first
    for _ in range(5):
        now = crossing.step(wiring, now, FAR)
    assert sequence_time(wiring, now.sequence) < 0.999 * sequence_time(wiring, first.sequence)


def test_too_much_choice_is_left_alone(evicted, monkeypatch):
    wiring, budget, now = evicted
    mate = away(wiring, now, budget, 0.5, rng=np.random.default_rng(0), deadline=FAR)
    assert mate is not None
    monkeypatch.setattr(crossover, "_MOST_ENTRIES", 1)
    faster = min(now, mate, key=lambda one: sequence_time(wiring, one.sequence))
    assert Crossover(budget).cross(wiring, now, mate, FAR) is faster
