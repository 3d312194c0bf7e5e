import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.random_graphs import graphs, trainings
from solver_cases.synthetic import gpt2

from remat_graph import Graph, Op, Stage, Value, simulate
from remat_solvers import store_all
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.dead_runs import drop_dead_runs
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.search.descent import minimal_peak_trace
from remat_solvers.search.evict import evict
from remat_solvers.search.one_pass import evict_in_one_pass
from remat_solvers.search.perturbations import OnePassPerturbation
from remat_solvers.search.prune import prune

thorough = settings(max_examples=32, deadline=None, suppress_health_check=[HealthCheck.too_slow])
perturbations = st.builds(
    OnePassPerturbation,
    span=st.sampled_from([0.0, 0.5, 1.0]),
    deep=st.booleans(),
    hold=st.booleans(),
    noise=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 9),
)


@thorough
@given(graphs() | trainings(), st.floats(0.3, 1.0), perturbations, st.booleans())
def test_a_sequence_is_legal_and_within_the_budget(graph, fraction, perturbation, planned):
    wiring = Wiring.of(graph)
    budget = int(fraction * simulate(graph, store_all(graph)).peak_bytes)
    plan = (lambda op, value: (op + value) % 2 == 0) if planned else None
    sequence = evict_in_one_pass(wiring, budget, perturbation=perturbation, plan=plan)
    if sequence is None:
        return
    timeline = simulate(graph, expand(wiring, sequence))
    assert timeline.peak_bytes <= budget
    firsts = list(dict.fromkeys(sequence.tolist()))
    assert firsts == sorted(firsts)


@thorough
@given(graphs() | trainings())
def test_with_room_for_everything_nothing_is_computed_twice(graph):
    wiring = Wiring.of(graph)
    room = sum(v.size_bytes for v in graph.values) + max(op.workspace_bytes for op in graph.ops)
    sequence = evict_in_one_pass(wiring, room)
    assert sequence is not None
    assert sequence.tolist() == list(range(wiring.op_count))


@pytest.mark.parametrize("fraction", [0.5, 0.25])
def test_a_transformer_fits_in_one_pass(fraction):
    graph = gpt2(layers=6)
    wiring = Wiring.of(graph)
    budget = int(fraction * simulate(graph, store_all(graph)).peak_bytes)
    sequence = evict_in_one_pass(wiring, budget)
    assert sequence is not None
    assert trace(wiring, sequence).peak_bytes <= budget


def test_what_the_plan_keeps_is_kept():
    """Of two values alike, the one that the plan gives up is dropped."""
    graph = gpt2(layers=4)
    wiring = Wiring.of(graph)
    budget = int(0.8 * simulate(graph, store_all(graph)).peak_bytes)
    free = evict_in_one_pass(wiring, budget)
    assert free is not None
    dropped = set(np.flatnonzero(np.bincount(free) > 1).tolist())
    kept = evict_in_one_pass(
        wiring, budget, plan=lambda _op, value: wiring.producer_list[value] in dropped
    )
    assert kept is not None
    again = set(np.flatnonzero(np.bincount(kept) > 1).tolist())
    assert len(again & dropped) < len(dropped) / 2


def test_below_what_an_op_needs_there_is_nothing():
    wiring = Wiring.of(gpt2(layers=1))
    assert evict_in_one_pass(wiring, peak_bound(wiring).peak_bytes - 1) is None


def test_a_deadline_that_has_passed_ends_it():
    graph = gpt2(layers=12)
    wiring = Wiring.of(graph)
    assert evict_in_one_pass(wiring, 10**15, deadline=time.perf_counter() - 1) is None


@thorough
@given(graphs() | trainings(), st.floats(0.3, 1.0), st.floats(0.0, 1.0))
def test_pruning_never_slows_nor_leaves_the_budget_and_is_done_after_once(graph, low, share):
    wiring = Wiring.of(graph)
    room = simulate(graph, store_all(graph)).peak_bytes
    sequence = evict_in_one_pass(wiring, int(low * room))
    if sequence is None:
        return
    tight = trace(wiring, sequence)
    budget = int(tight.peak_bytes + share * (room - tight.peak_bytes))
    pruned = prune(wiring, tight, budget)
    assert pruned.peak_bytes <= max(budget, tight.peak_bytes)
    assert sequence_time(wiring, pruned.sequence) <= sequence_time(wiring, sequence)
    again = prune(wiring, pruned, budget)
    assert again.sequence.tolist() == pruned.sequence.tolist()
    assert drop_dead_runs(wiring, pruned).steps == pruned.steps


@thorough
@given(graphs() | trainings(), st.floats(0.3, 1.0))
def test_with_room_for_everything_pruning_leaves_no_recomputation(graph, low):
    wiring = Wiring.of(graph)
    sequence = evict_in_one_pass(wiring, int(low * simulate(graph, store_all(graph)).peak_bytes))
    if sequence is None:
        return
    room = sum(v.size_bytes for v in graph.values) + max(op.workspace_bytes for op in graph.ops)
    assert prune(wiring, trace(wiring, sequence), room).steps == wiring.op_count


@pytest.mark.sweep
def test_the_smallest_peak_found_is_near_the_bound():
    wiring = Wiring.of(gpt2(layers=4))
    found = minimal_peak_trace(wiring, time.perf_counter() + 2)
    assert found.peak_bytes <= 1.25 * peak_bound(wiring).peak_bytes


def test_several_evictions_at_once_are_about_as_good_as_one_by_one(monkeypatch):
    graph = gpt2(layers=12)
    wiring = Wiring.of(graph)
    budget = simulate(graph, store_all(graph)).peak_bytes // 2
    everything = np.arange(wiring.op_count)
    extra = []
    for ops_per_eviction in (10**9, 20):
        monkeypatch.setattr("remat_solvers.search.evict._OPS_PER_EVICTION", ops_per_eviction)
        found = prune(wiring, evict(wiring, everything, budget), budget)
        assert found.peak_bytes <= budget
        extra.append(sequence_time(wiring, found.sequence) - graph.time)
    assert extra[1] <= 1.2 * extra[0]


def drawn_once(layers: int) -> Graph:
    """Of each draw, which cannot be made again, two values are made over it and read later."""
    values, ops, before = [Value("x", 10), Value("loss", 1)], [], "x"
    for i in range(layers):
        values += [Value(f"{kind}{i}", 10) for kind in ("draw", "scaled", "bent", "grad")]
        draw, scaled, bent = f"draw{i}", f"scaled{i}", f"bent{i}"
        ops += [
            Op(draw, (before,), (draw,), 1e-6, replayable=False),
            Op(scaled, (draw,), (scaled,), 1e-6, overwrites=((draw, scaled),)),
            Op(bent, (draw,), (bent,), 1e-6, overwrites=((draw, bent),)),
        ]
        before = bent
    ops.append(Op("loss", (before,), ("loss",), 1e-6, stage=Stage.BACKWARD))
    before = "loss"
    for i in reversed(range(layers)):
        read = (before, f"scaled{i}", f"bent{i}")
        ops.append(Op(f"grad{i}", read, (f"grad{i}",), 1e-6, stage=Stage.BACKWARD))
        before = f"grad{i}"
    results = frozenset({"loss", before})
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), results, "loss")


@pytest.mark.parametrize("seconds", [None, 1.0])
def test_what_cannot_be_made_again_is_held_for_what_is_made_of_it(seconds):
    wiring = Wiring.of(drawn_once(8))
    if seconds is not None:  # of each op, as where only the peak counts
        times = np.full(wiring.op_count, seconds)
        wiring = replace(wiring, time=times, time_list=tuple(times.tolist()))
    assert trace(wiring, np.arange(wiring.op_count)).peak_bytes == 171
    sequence = evict_in_one_pass(wiring, 120)
    assert sequence is not None
    assert trace(wiring, sequence).peak_bytes <= 120
