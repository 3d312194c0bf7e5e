"""Blocks as training graphs of their own, their options, and levels made of them."""

import math
import time
from collections import Counter

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_cases.feed_forward import feed_forward
from solver_cases.networks_in_blocks import transformer_in_blocks
from solver_cases.random_graphs import graphs, trainings
from solver_cases.random_hierarchies import Recorder, branching, levels_of, nested, quick

from remat_graph import Block, Graph, Hierarchy, Op, Stage, Value, simulate
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.published.hierarchical.blocks.adopt import follow
from remat_solvers.published.hierarchical.blocks.bottom_up import Blocks
from remat_solvers.published.hierarchical.blocks.closed import close
from remat_solvers.published.hierarchical.blocks.compose import (
    compose,
    expand_nodes,
    picks_of,
    selections,
)
from remat_solvers.published.hierarchical.blocks.level import Layer, Level
from remat_solvers.published.hierarchical.blocks.options import (
    BlockOption,
    choose,
    read_option,
    shares,
)
from remat_solvers.published.hierarchical.blocks.runs import again, measure_run
from remat_solvers.published.hierarchical.blocks.targets import targets_of
from remat_solvers.search.evict import evict
from remat_solvers.search.perturbations import EvictionPerturbation
from remat_solvers.search.prune import prune

thorough = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
any_graph = st.one_of(branching(), branching(most_ops=9), trainings(), graphs())
hierarchies = any_graph.flatmap(nested)


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


@st.composite
def runs(draw):
    """A stretch of ops in order, some of them run again in it, and some values at its border."""
    graph = draw(st.one_of(branching(most_ops=8), graphs(most_ops=10, most_values=16)))
    wiring = Wiring.of(graph)
    first = draw(st.integers(0, wiring.op_count - 1))
    ops: list[int] = []
    for op in range(first, draw(st.integers(first + 1, wiring.op_count))):
        ops += [i for i in range(first, op) if wiring.replayable_list[i] and draw(st.booleans())]
        ops.append(op)
    made = sorted({v for op in ops for v in wiring.outputs[op]})
    leaving = draw(st.sets(st.sampled_from(made))) if made else set()
    saved = {v for v in made if v not in leaving and draw(st.booleans())}
    return wiring, ops, leaving, saved


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


@thorough
@given(hierarchies)
def test_a_level_has_every_op_once_in_a_legal_order(hierarchy):
    for level in levels_of(hierarchy):
        wiring = level.wiring
        layers = [
            Layer(layer.name, layer.forward, layer.backward, ((layer.forward, layer.backward),))
            for layer in level.layers
        ]
        rank = [op for node in level.nodes for op in node.choices[-1].first.ops]
        again_level = Level.of(wiring, layers)
        halves = [
            (node.layer, op)
            for node in again_level.nodes
            for op in node.choices[0].first.ops
        ]  # fmt: skip
        assert sorted(op for _, op in halves) == list(range(wiring.op_count))
        simulate(wiring.graph, expand(wiring, np.array([op for _, op in halves])))
        assert set(rank) == set(range(wiring.op_count))
        home = {op: ("layer", j) if j is not None else op for j, op in halves}
        wanted = set(wiring.results.tolist())
        for op, row in enumerate(wiring.inputs):
            wanted.update(v for v in row if home[wiring.producer_list[v]] != home[op])
        for node, mine in zip(level.nodes, _groups(level), strict=True):
            made = {v for op in mine for v in wiring.outputs[op]}
            for choice in node.choices:
                assert choice.first.makes == made & wanted
                assert choice.later is None or choice.later.makes <= choice.first.makes


def _groups(level):
    for node in level.nodes:
        if node.layer is None:
            yield node.choices[0].first.ops
        else:
            layer = level.layers[node.layer]
            yield layer.backward if node.backward else layer.forward


@thorough
@given(hierarchies, st.lists(st.floats(0, 1), min_size=2, max_size=2), st.integers(0, 5))
def test_a_composed_level_is_never_smaller_than_what_it_stands_for(hierarchy, budgets, seed):
    for level in levels_of(hierarchy):
        for selection in selections(level):
            composed = compose(level, selection)
            everything = np.arange(composed.op_count)
            peak = trace(composed, everything).peak_bytes
            for share in budgets:
                perturbation = EvictionPerturbation(noise=0.5, seed=seed)
                nodes = evict(composed, everything, int(share * peak), perturbation=perturbation)
                picks = picks_of(level, selection, nodes.sequence.tolist())
                ops = np.array(expand_nodes(level, picks), dtype=np.int64)
                flat = trace(level.wiring, ops)
                simulate(level.wiring.graph, expand(level.wiring, ops))
                assert flat.peak_bytes <= nodes.peak_bytes
                taken = sequence_time(level.wiring, ops)
                assert taken <= sequence_time(composed, nodes.sequence) * (1 + 1e-9)
                runs_taken = math.fsum(_run(level, pick).time for pick in picks)
                assert taken == pytest.approx(runs_taken)
                if all(_run(level, (k, k, 0)) == _run(level, (-1, k, 0)) for _, k, _ in picks):
                    every = [level.nodes[k].choices[o].option for _, k, o in picks]
                    plain = [level.nodes[k].layer is None for _, k, _ in picks]
                    if all(p or o is not None for p, o in zip(plain, every, strict=True)):
                        assert taken == pytest.approx(sequence_time(composed, nodes.sequence))


def _run(level, pick):
    phase, k, o = pick
    choice = level.nodes[k].choices[o]
    return choice.first if phase == k else choice.later


def test_identical_blocks_are_planned_once_and_all_get_the_options():
    calls = {}
    for layers in (2, 5):
        hierarchy = transformer_in_blocks(layers)
        kinds = len(hierarchy.unique_blocks) - 1
        recorder = Recorder()
        blocks = Blocks(hierarchy, 20)
        told = []
        blocks.plan(recorder, None, time.perf_counter() + 60, told.append)
        assert told[-1] == f"planned {kinds} of {kinds} kinds of blocks"
        calls[layers] = kinds, len(recorder.levels)
        seen = {op.name for level in recorder.levels for op in level.wiring.graph.ops}
        first = {name for u in hierarchy.unique_blocks for name in u.representative.op_names()}
        assert {name for name in seen if name in hierarchy.graph.op_index} & {
            op.name for op in hierarchy.graph.ops[: hierarchy.graph.boundary_index]
        } <= first
        top = blocks.top(1)
        assert len(top.layers) == layers
        times = {
            tuple(
                sequence_time(top.wiring, np.array(ahead + back)) for ahead, back in layer.options
            )
            for layer in top.layers
        }
        assert len(times) == kinds < 2
        assert all(len(layer.options) > 2 for layer in top.layers)
    assert calls[2] == calls[5]


def test_every_half_is_made_of_ops_of_its_own_block():
    top = levels_of(transformer_in_blocks(3))[-1]
    names = [op.name for op in top.wiring.graph.ops]
    for layer in top.layers:
        for ahead, back in layer.options:
            assert {names[op].split(".")[0] for op in ahead} == {layer.name}
            assert set(back) >= set(layer.backward)
            assert set(ahead) == set(layer.forward)


def test_a_backward_half_ends_its_phantom():
    """Run twice, it would need its phantom twice, which its figures say is freed inside."""
    hierarchy = transformer_in_blocks(1)
    level = levels_of(hierarchy)[-1]
    composed = compose(level, (0,))
    for node, op in zip(level.nodes, composed.graph.ops, strict=True):
        if node.layer is not None:
            assert op.replayable is not node.backward


def test_blocks_without_a_backward_half_have_one_option():
    values = tuple(Value(f"v{i}", 2) for i in range(4))
    ops = tuple(Op(f"f{i}", (f"v{i - 1}",) if i else (), (f"v{i}",), 1.0) for i in range(4))
    graph = Graph(values, ops, results=frozenset({"v3"}))
    hierarchy = Hierarchy(graph, Block("root", (Block("a", ("f0", "f1")), "f2", "f3")))
    blocks = Blocks(hierarchy, 10)
    blocks.plan(quick, None, time.perf_counter() + 1, lambda message: None)
    top = blocks.top(1)
    assert [len(layer.options) for layer in top.layers] == [1]
    assert [node.name for node in top.nodes] == ["a", "f2", "f3"]


def some_staged_sequence(stages, random):
    kept = np.array([[random.random() < 0.4 for _ in row] for row in stages.may_keep()])
    return stages.sequence(stages.least_run(kept))


@thorough
@given(hierarchies, st.randoms(use_true_random=False))
def test_what_a_schedule_does_in_a_block_is_an_option_of_it(hierarchy, random):
    graph, wiring = hierarchy.graph, Wiring.of(hierarchy.graph)
    sequence = some_staged_sequence(Stages.of(wiring), random)
    blocks = Blocks(hierarchy, 12)
    blocks.plan(quick, None, time.perf_counter() + 60, lambda _: None)
    level = blocks.top(1, [sequence])
    selection = follow(level, sequence)
    times = Counter(sequence.tolist())
    for layer, option in zip(level.layers, selection, strict=True):
        runs = Counter(op for half in layer.options[option] for op in half)
        assert set(runs) == {*layer.forward, *layer.backward}
        assert all(count <= times[op] for op, count in runs.items())
    first = [
        (k, k, 0 if node.layer is None else selection[node.layer])
        for k, node in enumerate(level.nodes)
    ]
    simulate(graph, expand(wiring, np.array(expand_nodes(level, first))))
    less = blocks.top(1)
    for layer, option in zip(less.layers, follow(less, sequence), strict=True):
        assert 0 <= option < len(layer.options)


def test_a_schedule_of_a_single_block_is_followed_to_the_letter():
    graph = feed_forward(6)
    forward = [op.name for op in graph.ops[: graph.boundary_index]]
    hierarchy = Hierarchy(graph, Block("root", (Block("all", tuple(forward[:-1])), forward[-1])))
    wiring = Wiring.of(graph)
    start = prune(wiring, evict(wiring, np.arange(wiring.op_count), 8), 8)
    assert len(start.sequence) - wiring.op_count > 0
    blocks = Blocks(hierarchy, 12)
    blocks.plan(quick, None, time.perf_counter() + 60, lambda _: None)
    level = blocks.top(1, [start.sequence])
    (option,) = follow(level, start.sequence)
    picks = [(k, k, 0 if node.layer is None else option) for k, node in enumerate(level.nodes)]
    assert expand_nodes(level, picks) == start.sequence.tolist()
