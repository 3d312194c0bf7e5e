"""Hypothesis strategies for trainings with branches and hierarchies over them, and quick plans."""

from __future__ import annotations

import os
import time

import numpy as np
from hypothesis import strategies as st

from remat_graph import Block, Graph, Hierarchy, Op, Stage, Value
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Ints
from remat_solvers.published.hierarchical.blocks.bottom_up import Blocks
from remat_solvers.published.hierarchical.blocks.level import Level
from remat_solvers.search.evict import evict


@st.composite
def branching(draw, most_ops: int = 6, least_ops: int = 2) -> Graph:
    """A joint training graph: ops with one or two outputs, skips, sums of gradients, a loss."""
    sizes, times = st.integers(0, 6), st.integers(0, 9).map(float)
    values, ops = [Value("x", 3)], []
    reads: list[tuple[str, ...]] = []
    makes: list[tuple[str, ...]] = []

    def op(name, inputs, outputs, stage=Stage.FORWARD, twin=None):
        values.extend(Value(v, draw(sizes)) for v in outputs)
        once = draw(st.integers(0, 9)) == 0
        workspace = draw(st.sampled_from([0, 0, 3]))
        ops.append(
            Op(name, inputs, outputs, draw(times), workspace, stage, twin, replayable=not once)
        )

    count = draw(st.integers(least_ops, most_ops))
    made = ["x"]
    for i in range(count):
        some = draw(st.lists(st.sampled_from(made[-4:]), min_size=1, max_size=2, unique=True))
        reads.append(tuple(some))
        makes.append(tuple(f"v{i}.{slot}" for slot in range(draw(st.sampled_from([1, 1, 1, 2])))))
        op(f"f{i}", reads[i], makes[i])
        made += makes[i]
    unread = {v for v in made if v != "x"}.difference(*reads)
    grads: dict[str, list[str]] = {v: [f"s.{v}"] for v in sorted(unread)}
    op("seed", tuple(sorted(unread)), tuple(f"s.{v}" for v in sorted(unread)), Stage.BACKWARD)
    results = set()
    for i in reversed(range(count)):
        arriving = []
        for v in makes[i]:
            parts = grads.get(v, [])
            if len(parts) > 1:
                op(f"sum.{v}", tuple(parts), (f"g.{v}",), Stage.BACKWARD)
                parts = [f"g.{v}"]
            arriving += parts
        if not arriving:
            continue
        saved = draw(st.lists(st.sampled_from([*reads[i], *makes[i]]), max_size=2, unique=True))
        given = [v for v in reads[i] if v != "x"]
        outputs = [f"d{i}.{v}" for v in given]
        if draw(st.booleans()) or not outputs:
            outputs.append(f"w{i}")
            results.add(f"w{i}")
        op(f"b{i}", (*arriving, *saved), tuple(outputs), Stage.BACKWARD, f"f{i}")
        for v in given:
            grads.setdefault(v, []).append(f"d{i}.{v}")
    if draw(st.booleans()):
        results.add(draw(st.sampled_from(sorted(unread))))
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), frozenset(results), "seed")


@st.composite
def nested(draw, graph: Graph, deepest: int = 3) -> Hierarchy:
    """A tree of convex blocks, over any order of the forward ops that they may run in."""
    forward = graph.ops[: graph.boundary_index]
    before = {
        op.name: {
            *(graph.ops[graph.producer[v]].name for v in op.inputs if v in graph.producer),
            *op.order_after,
        }
        for op in forward
    }
    order: list[str] = []
    while len(order) < len(forward):
        ready = [n for n in before if n not in order and before[n] <= set(order)]
        order.append(draw(st.sampled_from(ready)))
    count = 0

    def members(names: list[str], depth: int) -> tuple[str | Block, ...]:
        nonlocal count
        found: list[str | Block] = []
        while names:
            size = draw(st.integers(1, len(names)))
            part, names = names[:size], names[size:]
            if depth < deepest and draw(st.integers(0, 2)):
                count += 1
                found.append(Block(f"block{count}", members(part, depth + 1)))
            else:
                found += part
        return tuple(found)

    return Hierarchy(graph, Block("root", members(order, 0)))


def quick(level: Level, budget_bytes: int, seconds: float) -> list[Ints]:
    """Plan a level by eviction alone."""
    found = evict(level.wiring, np.arange(level.wiring.op_count), budget_bytes)
    return [found.sequence] if found.peak_bytes <= budget_bytes else []


class Recorder:
    """A planner that keeps the levels it was given, and plans quickly."""

    def __init__(self) -> None:
        self.levels: list[Level] = []

    def __call__(self, level: Level, budget_bytes: int, seconds: float) -> list[Ints]:
        self.levels.append(level)
        return quick(level, budget_bytes, seconds)


def levels_of(hierarchy: Hierarchy, most_options: int = 12, most_nodes: int = 1) -> list[Level]:
    """Plan the blocks of a hierarchy quickly: its levels, with the options found, the top last."""
    blocks, recorder = Blocks(hierarchy, most_options), Recorder()
    blocks.plan(recorder, None, time.perf_counter() + 60, lambda message: None)
    return [
        *{level.wiring.values: level for level in recorder.levels}.values(),
        blocks.top(most_nodes),
    ]


def store_all_peak(level: Level) -> int:
    return trace(level.wiring, np.arange(level.wiring.op_count)).peak_bytes


def fatal(level: Level, budget_bytes: int, seconds: float) -> list[Ints]:
    """Plan nothing: end the process."""
    os._exit(1)
