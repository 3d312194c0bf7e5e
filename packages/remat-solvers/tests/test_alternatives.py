"""Values that can be made in several ways: sequences, bounds and plans against brute force."""

import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases import NO_LIMIT
from solver_cases.alternatives import (
    packable,
    trainings_with_alternatives,
    with_kinds,
)
from solver_cases.answers import peak_of
from solver_cases.smallest_budgets import smallest

from remat_graph import Numerics, Stage, Status, simulate
from remat_solvers import (
    Limit,
    Problem,
    smallest_budget,
    store_all,
)
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.alternatives import Alternatives, is_in_order, least_time
from remat_solvers.core.milp import Outcome, solve_program
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.refine import Refine
from remat_solvers.refine.construct import construct
from remat_solvers.refine.point import embed, read_point
from remat_solvers.refine.relaxation import COST_OF_ONCE, relax
from remat_solvers.search.repair import prune_multi, repaired
from remat_solvers.search.swap_alternatives import swap_alternatives
from remat_solvers.search.unfolding import unfold
from remat_solvers.testing.brute_force import fastest

thorough = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def random_sequence(graph, random):
    """Make each group in its turn by whatever can make it, and others again or for nothing."""
    place = {op.name: i for i, op in enumerate(op for op in graph.ops if op.owed)}
    sequence, made = [], set(graph.resident)

    def run(i):
        sequence.append(i)
        made.update(graph.ops[i].outputs)

    def may_run(op, done):
        at = -1 if op.optional else place[op.alternative_of or op.name]
        return is_due(op, done) and (at < done if op.replayable or at < 0 else False)

    def is_due(op, done):
        after = all(place[earlier] < done for earlier in op.order_after)
        return after and made.issuperset(op.inputs)

    for done, owed in enumerate(op for op in graph.ops if op.owed):
        members = [i for i, op in enumerate(graph.ops) if owed.name in (op.name, op.alternative_of)]
        while True:
            for i, op in enumerate(graph.ops):
                if may_run(op, done) and random.random() < 0.2:
                    run(i)
            new = made.isdisjoint if not owed.replayable else lambda outputs: True
            able = [i for i in members if is_due(graph.ops[i], done) and new(graph.ops[i].outputs)]
            run(random.choice(able))
            if made.issuperset(owed.outputs):
                break
    return sequence


@settings(max_examples=80, deadline=None)
@given(trainings_with_alternatives(5, 6), st.data())
def test_every_sequence_is_a_point_of_the_relaxation(graph, data):
    """Any legal sequence, however wasteful, satisfies every row at its own peak."""
    wiring = Wiring.of(graph)
    sequence = np.array(random_sequence(graph, data.draw(st.randoms(use_true_random=False))))
    now = trace(wiring, sequence)
    assert simulate(graph, expand(wiring, sequence)).peak_bytes == now.peak_bytes
    makers = Alternatives.of(wiring)
    places = st.sampled_from(np.flatnonzero(makers.owed).tolist())
    checkpoints = data.draw(st.sets(places, min_size=1))
    running = {(c, op) for c in checkpoints for op in range(wiring.op_count)}
    relaxation = relax(
        wiring,
        max(1, now.peak_bytes),
        sorted(checkpoints),
        running=sorted(running) if data.draw(st.booleans()) else (),
        paired=data.draw(st.booleans()),
    )
    program = relaxation.program
    point = embed(wiring, relaxation, now)
    assert np.all(program.matrix @ point <= program.right + 1e-6)
    assert np.all(point >= program.lower)
    once = least_time(wiring)
    extra = math.fsum(wiring.time[sequence].tolist()) - once
    scale = COST_OF_ONCE / max(once, 1e-300)
    if once:
        assert program.cost @ point <= extra * scale * (1 + 1e-9) + 1e-6


@settings(max_examples=80, deadline=None)
@given(trainings_with_alternatives(5, 6), st.data())
def test_a_sequence_is_one_of_the_ordinary_graph_of_its_versions(graph, data):
    """Of the same time but for what is wasted; folded back it holds no more."""
    wiring = Wiring.of(graph)
    sequence = np.array(random_sequence(graph, data.draw(st.randoms(use_true_random=False))))
    now = trace(wiring, sequence)
    unfolded = unfold(wiring, now)
    assert not unfolded.wiring.graph.has_alternatives
    assert list(dict.fromkeys(unfolded.start.sequence.tolist())) == list(
        range(unfolded.wiring.op_count)
    )
    assert unfolded.start.peak_bytes <= now.peak_bytes
    assert sequence_time(unfolded.wiring, unfolded.start.sequence) <= sequence_time(
        wiring, sequence
    ) * (1 + 1e-9)
    repeated = trace(unfolded.wiring, np.repeat(unfolded.start.sequence, 2))
    if unfolded.wiring.replayable.all():
        folded = unfolded.fold(repeated)
        assert is_in_order(wiring, folded.sequence)
        assert folded.peak_bytes <= repeated.peak_bytes


@settings(max_examples=80, deadline=None)
@given(trainings_with_alternatives(5, 6), st.floats(0.3, 1.0), st.data())
def test_changes_of_makers_keep_a_schedule_legal_and_in_order(graph, share, data):
    wiring = Wiring.of(graph)
    sequence = np.array(random_sequence(graph, data.draw(st.randoms(use_true_random=False))))
    now = trace(wiring, sequence)
    budget = max(1, int(share * now.peak_bytes))
    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    kept = prune_multi(wiring, now, now.peak_bytes)
    assert kept.peak_bytes <= now.peak_bytes
    assert sequence_time(wiring, kept.sequence) <= sequence_time(wiring, sequence) * (1 + 1e-9)
    for found in (
        kept,
        repaired(wiring, now, budget),
        swap_alternatives(wiring, Alternatives.of(wiring), now, rng),
    ):
        assert is_in_order(wiring, found.sequence)
        timeline = simulate(graph, expand(wiring, found.sequence))
        assert timeline.peak_bytes == found.peak_bytes


def joint_bound(graph, budget, running=False):
    wiring = Wiring.of(graph)
    checkpoints = np.flatnonzero(Alternatives.of(wiring).owed).tolist()
    running = [(c, op) for c in checkpoints for op in range(wiring.op_count)] if running else []
    answer = solve_program(
        relax(wiring, budget, checkpoints, running=running).program, seconds=NO_LIMIT
    )
    if answer.outcome is Outcome.INFEASIBLE:
        return math.inf
    return least_time(wiring) * (1 + answer.bound / COST_OF_ONCE)


@thorough
@given(trainings_with_alternatives(), st.floats(0.3, 1.0))
def test_the_relaxation_bounds_brute_force(graph, fraction):
    everything = Wiring.of(graph.without_alternatives())
    peak = trace(everything, np.arange(everything.op_count)).peak_bytes
    budget = max(1, int(fraction * peak))
    best = fastest(graph, budget)
    bound = joint_bound(graph, budget)
    if best is not None:
        assert bound <= best * (1 + 1e-6) + 1e-6


def test_what_is_packed_before_the_first_checkpoint_is_paid():
    """No schedule of this graph fits that neither packs nor recomputes, so none is for nothing."""
    graph, budget = packable(), 330
    turn = next(i for i, op in enumerate(graph.ops) if op.owed and op.stage is Stage.BACKWARD)
    wiring = Wiring.of(graph)
    program = relax(wiring, budget, [turn]).program
    answer = solve_program(program, seconds=NO_LIMIT)
    assert answer.outcome is Outcome.SOLVED
    packs = min(op.time for op in graph.ops if op.optional)
    assert answer.bound >= packs / least_time(wiring) * COST_OF_ONCE * (1 - 1e-6)


@thorough
@given(trainings_with_alternatives(), st.floats(0.0, 1.0))
def test_plans_over_alternatives_against_brute_force(graph, fraction):
    least, most = smallest(graph), simulate(graph, store_all(graph)).peak_bytes
    budget = max(1, least + int(fraction * max(0, most - least)))
    best = fastest(graph, budget)
    found = Refine().solve(Problem(graph, budget), Limit.starting_now(2.0), lambda _: None)
    assert found.status is not Status.INFEASIBLE
    assert found.lower_bound <= best * (1 + 1e-6)
    if found.schedule is not None:
        timeline = simulate(graph, found.schedule)
        assert timeline.peak_bytes == found.peak_bytes <= budget
        assert timeline.time == found.time >= best * (1 - 1e-9)
    if found.status is Status.OPTIMAL:
        assert found.time <= best * (1 + 2e-6)


@settings(max_examples=24, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trainings_with_alternatives(), st.integers(0, 2**32 - 1), st.floats(0.3, 1.0))
def test_what_is_built_is_legal_whatever_the_point_says(graph, seed, share):
    wiring, rng = Wiring.of(graph), np.random.default_rng(seed)
    owed = np.flatnonzero(Alternatives.of(wiring).owed)
    checkpoints = sorted(rng.choice(owed, size=rng.integers(1, 4), replace=False).tolist())
    budget = max(1, int(share * peak_of(graph)))
    relaxation = relax(wiring, budget, checkpoints)
    program = relaxation.program
    for _ in range(3):
        point = np.clip(rng.random(relaxation.columns), program.lower, program.upper)
        built = construct(wiring, read_point(relaxation, point))  # raises what is not
        assert built is None or is_in_order(wiring, built)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trainings_with_alternatives(), st.floats(0.0, 1.0), st.booleans())
def test_a_wider_choice_is_never_slower(graph, fraction, exact_first):
    kinds = [Numerics.BITWISE, Numerics.LOSSY]
    graph = with_kinds(graph, kinds if exact_first else kinds[::-1])
    least, most = smallest(graph), simulate(graph, store_all(graph)).peak_bytes
    budget = max(1, least + int(fraction * max(0, most - least)))
    before = math.inf
    for wider in (graph.without_alternatives(), graph.with_numerics(Numerics.BITWISE), graph):
        found = Refine().solve(Problem(wider, budget), Limit.starting_now(3.0), lambda _: None)
        assert found.time <= before * (1 + 2e-6)
        before = found.time


@thorough
@given(trainings_with_alternatives())
def test_below_the_smallest_budget_nothing_is_planned(graph):
    budget = smallest(graph) - 1
    if budget > 0:
        found = Refine().solve(Problem(graph, budget), Limit.starting_now(1.0), lambda _: None)
        assert found.schedule is None


@thorough
@given(trainings_with_alternatives())
def test_least_bytes_is_below_what_brute_force_needs(graph):
    needed = smallest(graph)
    found = smallest_budget(graph, limit_seconds=0.5)
    assert (
        peak_bound(Wiring.of(graph)).peak_bytes <= found.least_bytes <= needed <= found.peak_bytes
    )
    assert simulate(graph, found.schedule).peak_bytes == found.peak_bytes


@thorough
@given(trainings_with_alternatives())
def test_the_least_time_is_that_without_a_budget(graph):
    """But for what it takes to pack what the cheapest ways read."""
    packs = sum(op.time for op in graph.ops if op.optional)
    least = least_time(Wiring.of(graph))
    assert least <= fastest(graph, 10**9) <= least + packs
