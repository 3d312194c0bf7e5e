"""TW-Remat inside a hierarchy."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.answers import peak_of
from solver_cases.feed_forward import feed_forward
from solver_cases.networks_in_blocks import feed_forward_in_blocks, transformer_in_blocks
from solver_cases.random_graphs import graphs, trainings
from solver_cases.random_hierarchies import branching, levels_of, nested, store_all_peak

from remat_graph import Status, simulate
from remat_solvers import InvalidProblem, Limit, Problem
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.published.decompositions.decomposition import Precedence
from remat_solvers.published.decompositions.recursion import sequences
from remat_solvers.published.decompositions.tw_remat import TreeRecursion, TWRemat
from remat_solvers.published.hierarchical.blocks.closed import close
from remat_solvers.published.hierarchical.blocks.compose import (
    compose,
    expand_nodes,
    picks_of,
    selections,
)
from remat_solvers.published.hierarchical.h_tw_remat import HTWRemat, sequences_within

thorough = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
hierarchies = st.one_of(branching(8), trainings(6), graphs(10, 16)).flatmap(nested)


def solved(hierarchy, budget, seconds=30.0, executor=None, report=lambda progress: None, **options):
    problem = Problem(hierarchy.graph, budget, hierarchy, executor)
    return HTWRemat(**options).solve(problem, Limit.starting_now(seconds), report)


def check(hierarchy, budget, solution):
    graph = hierarchy.graph
    if solution.schedule is None:
        proved = peak_bound(Wiring.of(graph), any_order=True).peak_bytes > budget
        assert solution.status is (Status.INFEASIBLE if proved else Status.LIMIT)
        return
    timeline = simulate(graph, solution.schedule)
    assert timeline.peak_bytes == solution.peak_bytes <= budget
    assert timeline.time == solution.time >= solution.lower_bound
    assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    if solution.status is Status.OPTIMAL:
        assert timeline.time == pytest.approx(graph.time)


@thorough
@given(hierarchies, st.floats(0.3, 1.1), st.sampled_from([1, 8, 28]))
def test_whatever_comes_out_holds(hierarchy, share, most_nodes):
    budget = max(1, int(share * peak_of(hierarchy.graph)))
    check(hierarchy, budget, solved(hierarchy, budget, most_nodes=(most_nodes,)))


@thorough
@given(hierarchies)
def test_the_recursion_gives_legal_sequences_of_every_composed_level(hierarchy):
    """Also where its order is not that of the graph, soft dependencies and what runs once."""
    for level in levels_of(hierarchy):
        for selection in selections(level):
            composed = compose(level, selection)
            found = sequences(composed, TreeRecursion(Precedence.of(composed)), np.inf)
            for _, nodes in found:
                ops = expand_nodes(level, picks_of(level, selection, nodes.tolist()))
                flat = np.array(ops, dtype=np.int64)
                simulate(level.wiring.graph, expand(level.wiring, flat))
                assert trace(level.wiring, flat).peak_bytes <= trace(composed, nodes).peak_bytes


@thorough
@given(hierarchies, st.floats(0.4, 1))
def test_what_is_swept_is_within_the_budget(hierarchy, share):
    for level in levels_of(hierarchy):
        budget = max(1, int(share * store_all_peak(level)))
        for sequence in sequences_within(level, budget, np.inf):
            timeline = simulate(level.wiring.graph, expand(level.wiring, sequence))
            assert timeline.peak_bytes <= budget


def test_what_the_halves_of_a_block_owe_each_other_is_kept_by_any_order():
    """A forward op that only the backward half reads still runs before the rest of the step."""
    hierarchy = transformer_in_blocks(1)
    graph = close(hierarchy.subgraph("h0"))
    wiring = Wiring.of(graph)
    middle = graph.boundary_index
    for _, sequence in sequences(wiring, TreeRecursion(Precedence.of(wiring)), np.inf):
        at = sequence.tolist().index(middle)
        assert set(range(middle)) <= set(sequence[:at].tolist())
        assert all(op < middle for op in sequence[:at])


@pytest.mark.sweep
def test_blocks_make_it_far_faster_than_the_recursion_on_all_ops():
    hierarchy = transformer_in_blocks(4)
    graph = hierarchy.graph
    budget = int(0.75 * peak_of(graph))
    inside = solved(hierarchy, budget)
    check(hierarchy, budget, inside)
    alone = TWRemat().solve(Problem(graph, budget), Limit.starting_now(30), lambda progress: None)
    assert graph.time < inside.time < alone.time
    assert inside.time < 1.3 * graph.time


@pytest.mark.sweep
def test_every_level_of_the_sweep_counts():
    hierarchy = feed_forward_in_blocks(24, 4)
    peak = peak_of(hierarchy.graph)
    times = []
    for budget in (peak - 1, int(0.7 * peak), int(0.5 * peak)):
        solution = solved(hierarchy, budget)
        check(hierarchy, budget, solution)
        times.append(solution.time)
    assert hierarchy.graph.time < times[0] < times[1] < times[2] < 2 * hierarchy.graph.time


def test_more_sizes_of_the_top_level_are_never_worse():
    hierarchy = feed_forward_in_blocks(12, 3)
    budget = int(0.5 * peak_of(hierarchy.graph))
    both = solved(hierarchy, budget, most_nodes=(1, 60)).time
    alone = [solved(hierarchy, budget, most_nodes=(nodes,)).time for nodes in (1, 60)]
    assert both == min(alone)


@pytest.mark.sweep
def test_processes_find_what_one_finds(processes):
    hierarchy = feed_forward_in_blocks(12, 3)
    budget = int(0.5 * peak_of(hierarchy.graph))
    here, there = solved(hierarchy, budget), solved(hierarchy, budget, executor=processes)
    assert here.schedule is not None
    assert dataclasses.replace(there, solve_seconds=here.solve_seconds) == here


def test_progress_is_told_and_the_best_is_never_lost():
    hierarchy, told = feed_forward_in_blocks(12, 3), []
    budget = int(0.6 * peak_of(hierarchy.graph))
    solution = solved(hierarchy, budget, report=told.append)
    assert any("kinds of blocks" in progress.message for progress in told)
    assert told[-1].incumbent_time == solution.time
    times = [p.incumbent_time for p in told if p.incumbent_time is not None]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_little_time_is_no_crash(seconds):
    hierarchy = feed_forward_in_blocks(12, 3)
    check(hierarchy, 14, solved(hierarchy, 14, seconds))


def test_too_little_memory_is_told_apart_from_nothing_found():
    hierarchy = feed_forward_in_blocks(6, 2)
    assert solved(hierarchy, 1).status is Status.INFEASIBLE
    floor = peak_bound(Wiring.of(hierarchy.graph)).peak_bytes
    assert solved(hierarchy, floor).status is Status.LIMIT


def test_bad_settings_are_refused():
    for options in ({"most_options": 0}, {"most_nodes": ()}, {"most_nodes": (4, 0)}):
        with pytest.raises(InvalidProblem, match=next(iter(options))):
            HTWRemat(**options)
    problem = Problem(feed_forward(2), 5)
    with pytest.raises(InvalidProblem, match="needs a hierarchy"):
        HTWRemat().solve(problem, Limit.starting_now(1), lambda progress: None)


def test_both_papers_are_cited():
    assert "NeurIPS 2019" in HTWRemat.citation
    assert "HiRemate" in HTWRemat.citation
