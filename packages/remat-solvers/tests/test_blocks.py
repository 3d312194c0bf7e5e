"""Blocks as training graphs of their own, their options, and levels made of them."""

import time

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases.levels import hierarchies, runs, thorough

from remat_graph import Block, Graph, Hierarchy, Op, Stage, Value, simulate
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.published.hierarchical.blocks.closed import close
from remat_solvers.published.hierarchical.blocks.options import (
    BlockOption,
    choose,
    read_option,
    shares,
)
from remat_solvers.published.hierarchical.blocks.runs import again, measure_run
from remat_solvers.published.hierarchical.blocks.targets import targets_of


def inner_blocks(hierarchy):
    return [block for block in hierarchy.root.blocks() if block is not hierarchy.root]


@thorough
@given(hierarchies, st.integers(1, 20))
def test_a_closed_block_has_the_rest_of_the_step_between_its_halves(hierarchy, withheld):
    for block in inner_blocks(hierarchy):
        subgraph = hierarchy.subgraph(block)
        plain, closed = close(subgraph), close(subgraph, withheld_bytes=withheld)
        at = closed.boundary_index
        assert at == len(subgraph.forward)
        assert [op.name for op in closed.ops if op is not closed.ops[at]] == [
            op.name for op in subgraph.graph.ops
        ]
        needs = nx.DiGraph()
        needs.add_nodes_from(op.name for op in closed.ops)
        for op in closed.ops:
            makers = (
                closed.ops[closed.producer[v]].name for v in op.inputs if v in closed.producer
            )
            needs.add_edges_from((source, op.name) for source in (*makers, *op.order_after))
        middle = closed.ops[at].name
        assert nx.ancestors(needs, middle) == {op.name for op in closed.ops[:at]}
        assert nx.descendants(needs, middle) == {op.name for op in closed.ops[at + 1 :]}
        everything = np.arange(len(closed.ops))
        simulate(closed, expand(Wiring.of(closed), everything))
        more = trace(Wiring.of(closed), everything).during
        more -= trace(Wiring.of(plain), everything).during
        assert more.tolist() == [withheld * (i == at) for i in range(len(closed.ops))]


def test_what_the_user_wants_of_a_block_is_not_freed_by_the_rest():
    graph = Graph(
        (Value("x", 1), Value("a", 2), Value("b", 4), Value("g", 8)),
        (
            Op("fa", ("x",), ("a",), 1.0),
            Op("fb", ("a",), ("b",), 1.0),
            Op("bb", ("b",), ("g",), 1.0, stage=Stage.BACKWARD, twin="fb"),
        ),
        frozenset({"x"}),
        frozenset({"a", "g"}),
        "bb",
    )
    hierarchy = Hierarchy(graph, Block("root", (Block("one", ("fa",)), "fb")))
    closed = close(hierarchy.subgraph("one"))
    assert closed.results == {"a"}
    assert closed.ops[1].inputs == ("a",)


def recount(wiring, ops, staying, given_values):
    """Count, op by op, what a run holds on top of what was there, copy by copy."""
    held = []
    for i in range(len(ops)):
        total = wiring.workspace_list[ops[i]]
        for start, maker in enumerate(ops[: i + 1]):
            for v in wiring.outputs[maker]:
                end = next((j for j in range(start + 1, len(ops)) if ops[j] == maker), len(ops))
                uses = [j for j in range(start + 1, end) if v in wiring.inputs[ops[j]]]
                if end == len(ops) and v in staying:
                    uses.append(len(ops))
                if start == i or any(j >= i for j in uses):
                    total += wiring.size[v]
        for v in given_values:
            if not any(v in wiring.inputs[op] for op in ops[i:]):
                total -= wiring.size[v]
        held.append(int(total))
    return held


@settings(thorough, max_examples=40)
@given(runs(), st.data())
def test_a_run_holds_what_a_recount_finds_whatever_is_freed_or_there(case, data):
    wiring, ops, leaving, saved = case
    inside = {v for op in ops for v in wiring.outputs[op]}
    outside = sorted({v for op in ops for v in wiring.inputs[op]} - inside)
    given_values = data.draw(st.sets(st.sampled_from(outside))) if outside else set()
    run = measure_run(wiring, ops, leaving, saved, given_values)
    assert run.reads == set(outside) - given_values
    assert run.makes == leaving
    assert run.time == pytest.approx(sum(wiring.time_list[op] for op in ops))
    assert len(run.peaks) <= min(len(ops), len(run.reads) + len(run.makes) + 1)
    held = recount(wiring, ops, leaving | saved, given_values)
    assert run.peak_bytes == max(0, *held)
    freed = data.draw(st.sets(st.sampled_from(sorted(run.reads)))) if run.reads else set()
    there = data.draw(st.sets(st.sampled_from(sorted(leaving)))) if leaving else set()

    def less(values):
        return sum(int(wiring.size[v]) for v in values)

    seen = [
        extra
        - less(v for v in freed if not any(v in wiring.inputs[op] for op in ops[i:]))
        - less(v for v in there if i >= _last_made(wiring, ops, v))
        for i, extra in enumerate(held)
    ]
    told = [m.extra_bytes - less(m.freed & freed) - less(m.outputs & there) for m in run.peaks]
    assert max([0, *told]) == max([0, *seen])


def _last_made(wiring, ops, v):
    return max(i for i, op in enumerate(ops) if v in wiring.outputs[op])


@settings(thorough, max_examples=24)
@given(runs())
def test_what_is_run_again_may_be_and_makes_what_it_promises(case):
    wiring, ops, leaving, saved = case
    inside = {v for op in ops for v in wiring.outputs[op]}
    possible: set[int] = set()
    for _ in ops:
        for op in ops:
            inputs = set(wiring.inputs[op]) & inside
            if wiring.replayable_list[op] and inputs <= possible | leaving:
                possible.update(wiring.outputs[op])
    for keeping in (saved, set()):
        chosen = again(wiring, ops, leaving, keeping)
        if not keeping <= possible or not (keeping | leaving & possible):
            assert chosen is None
            continue
        rest = iter(ops)
        assert all(op in rest for op in chosen)  # in the order of the run
        made: set[int] = set()
        for op in chosen:
            assert wiring.replayable_list[op]
            for v in set(wiring.inputs[op]) & inside - made:
                assert v in leaving - possible  # read from outside
            made.update(wiring.outputs[op])
        assert made >= keeping | leaving & possible
        run = measure_run(wiring, chosen, leaving, keeping)
        assert run.makes >= leaving & possible


def test_what_runs_once_is_read_from_outside_when_the_rest_runs_again():
    values = (Value("x", 1), Value("mask", 1), Value("y", 1), Value("z", 1))
    ops = (
        Op("draw", ("x",), ("mask",), 1.0, replayable=False),
        Op("apply", ("x", "mask"), ("y",), 1.0),
        Op("next", ("y",), ("z",), 1.0),
    )
    wiring = Wiring.of(Graph(values, ops, frozenset({"x"}), frozenset({"z"})))
    mask, y, z = range(3)
    assert again(wiring, (0, 1, 2), {mask, z}) == (1, 2)
    assert again(wiring, (0, 1, 2), {mask, z}, {y}) == (1, 2)
    assert again(wiring, (0, 1, 2), {mask, y, z}) == (1, 2)
    assert again(wiring, (0, 1, 2), {mask, z}, {mask}) is None
    assert again(wiring, (0, 1, 2), {y, z}) == (2,)
    assert again(wiring, (0, 1, 2), {z}) is None
    assert measure_run(wiring, (1, 2), {mask, z}).reads == {mask}


@thorough
@given(hierarchies)
def test_storing_everything_is_an_option_that_keeps_what_the_halves_share(hierarchy):
    for block in inner_blocks(hierarchy):
        subgraph = hierarchy.subgraph(block)
        wiring = Wiring.of(close(subgraph))
        everything = np.arange(wiring.op_count)
        option = read_option(wiring, everything)
        count = len(subgraph.forward)
        assert option.forward == tuple(range(count))
        assert option.backward == tuple(range(count, wiring.op_count - 1))
        assert option.time == pytest.approx(subgraph.graph.time)
        assert option.peak_bytes == trace(wiring, everything).peak_bytes
        sizes = {value.name: value.size_bytes for value in subgraph.graph.values}
        assert option.saved_bytes == sum(sizes[v] for v in subgraph.saved)
        found, targets = targets_of(wiring, time.perf_counter() + 60)
        assert found[0] == option
        assert (
            peak_bound(wiring).peak_bytes <= min(o.peak_bytes for o in found) <= option.peak_bytes
        )
        assert max(target.peak_bytes for target in targets) == option.peak_bytes
        if subgraph.backward:
            early = [*range(count), count + 1, count, *range(count + 2, wiring.op_count)]
            assert read_option(wiring, np.array(early)) is None or count == 0


options = st.lists(
    st.builds(
        BlockOption,
        forward=st.tuples(st.integers(0, 3)),
        backward=st.just(()),
        time=st.integers(0, 5).map(float),
        peak_bytes=st.integers(0, 9),
        saved_bytes=st.integers(0, 9),
    ),
    max_size=12,
)


def figures(option):
    return option.time, option.saved_bytes, option.peak_bytes


@settings(max_examples=80, deadline=None)
@given(options, st.integers(1, 6))
def test_chosen_options_are_unbeaten_and_far_apart(given_options, most):
    every = {figures(option) for option in given_options}
    front = {
        one
        for one in every
        if not any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in every
        )
    }
    chosen = choose(given_options, most)
    assert len(chosen) == min(most, len(front))
    assert {figures(option) for option in chosen} <= front
    saved = [option.saved_bytes for option in chosen]
    assert saved == sorted(saved, reverse=True)
    if front:
        assert saved[0] == max(one[1] for one in front)
        assert most == 1 or saved[-1] == min(one[1] for one in front)
    assert {figures(option) for option in choose(given_options, 12)} == front


def test_the_middle_is_chosen_third_and_equal_figures_once():
    row = [BlockOption((i,), (), float(i), 0, 10 - i) for i in range(11)]
    assert [option.saved_bytes for option in choose(row, 3)] == [10, 5, 0]
    assert choose([row[0], BlockOption((9,), (), 0.0, 0, 10)], 5) == (row[0],)
    assert shares([10, 30, 1], 40) == [10, 29, 2]
