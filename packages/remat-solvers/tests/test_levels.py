"""Levels made of blocks: legal, never smaller than they stand for, equal blocks planned once."""

import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_cases.feed_forward import feed_forward
from solver_cases.levels import hierarchies, thorough
from solver_cases.networks_in_blocks import transformer_in_blocks
from solver_cases.random_hierarchies import Recorder, levels_of, quick

from remat_graph import Block, Graph, Hierarchy, Op, Value, simulate
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.published.hierarchical.blocks.adopt import follow
from remat_solvers.published.hierarchical.blocks.bottom_up import Blocks
from remat_solvers.published.hierarchical.blocks.compose import (
    compose,
    expand_nodes,
    picks_of,
    selections,
)
from remat_solvers.published.hierarchical.blocks.level import Layer, Level
from remat_solvers.search.evict import evict
from remat_solvers.search.perturbations import EvictionPerturbation
from remat_solvers.search.prune import prune


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
