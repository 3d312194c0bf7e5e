"""A level as a graph, each smaller block by one of its options, for solvers of plain graphs.

The ops of the composed graph are the nodes of the level, in their order; a phantom is a value that
the forward half makes and the backward half reads, once, as it ends it. What a run frees early is
not seen, so the figures are never too small. A sequence of nodes, found by any means, is expanded
to the ops inside. Linear in the level.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat_graph import Graph, Op, Stage, Value
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.hierarchical.blocks.level import Level, Node

__all__ = ["Pick", "compose", "expand_nodes", "picks_of", "selections"]

# A run in phases: phase, node, choice. Phase t ends with the first run of node t.
Pick = tuple[int, int, int]


def compose(level: Level, selection: Sequence[int]) -> Wiring:
    """Make the graph of a level with `selection[j]` the option of layer j; op k is node k."""
    wiring, names = level.wiring, level.wiring.values
    values: list[Value] = []
    ops: list[Op] = []
    after = _order(level)
    for k, node in enumerate(level.nodes):
        choice = node.choices[_choice(node, selection)]
        leaving = sorted(choice.first.makes)
        outputs = [names[v] for v in leaving]
        inputs = [names[v] for v in sorted(choice.first.reads)]
        values += [Value(names[v], int(wiring.size[v])) for v in leaving]
        inside = sum(int(wiring.size[v]) for v in leaving)
        if node.layer is not None and choice.option is not None:
            phantom = f"phantom of {node.layer}"
            if node.backward:
                inputs.append(phantom)
            else:
                weight = int(wiring.size[sorted(choice.saved)].sum())
                values.append(Value(phantom, weight))
                outputs.append(phantom)
                inside += weight
        later = None if node.backward else choice.later
        ops.append(
            Op(
                name=f"{k}",
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                time=choice.first.time,
                workspace_bytes=max(0, choice.first.peak_bytes - inside),
                stage=Stage.FORWARD,
                replayable=later is not None and later.makes == choice.first.makes,
                order_after=after[k],
            )
        )
    results = frozenset(names[v] for v in wiring.results.tolist())
    return Wiring.of(Graph(tuple(values), tuple(ops), results=results))


def picks_of(level: Level, selection: Sequence[int], sequence: Sequence[int]) -> list[Pick]:
    """Say in which phase and with which choice each node of a sequence runs.

    A forward half whose phantom is not used before it runs again forgets. Where first runs are out
    of order, so are the phases, which `expand_nodes` does not need.
    """
    wanted: set[int] = set()
    chosen: list[int] = []
    for k in reversed(sequence):
        node = level.nodes[k]
        choice = _choice(node, selection)
        if node.layer is not None and node.backward:
            wanted.add(node.layer)
        elif node.layer is not None:
            if node.layer not in wanted:
                choice = len(node.choices) - 1
            wanted.discard(node.layer)
        chosen.append(choice)
    picks: list[Pick] = []
    phase = 0
    for k, choice in zip(sequence, reversed(chosen), strict=True):
        picks.append((phase, k, choice))
        phase += k == phase
    return picks


def expand_nodes(level: Level, picks: Sequence[Pick]) -> list[int]:
    """List the ops inside runs of nodes, in order.

    Raises:
        ValueError: if a node is run again that cannot be.
    """
    ops: list[int] = []
    seen: set[int] = set()
    for _, k, choice in picks:
        chosen = level.nodes[k].choices[choice]
        run = chosen.later if k in seen else chosen.first
        seen.add(k)
        if run is None:
            raise ValueError(f"{level.nodes[k].name!r} cannot be run again")
        ops += run.ops
    return ops


def selections(level: Level) -> list[tuple[int, ...]]:
    """Select for every layer the option that is cheapest at some price of a byte.

    The price is the same for all layers; it runs from nothing to so much that time does not count.
    The bytes are those that an option saves, with or without the most that its backward half adds.
    """
    size = level.wiring.size
    times, saved, peaks = ([np.zeros(len(layer.options)) for layer in level.layers] for _ in "tsp")
    for node in level.nodes:
        for choice in node.choices:
            if node.layer is not None and choice.option is not None:
                times[node.layer][choice.option] += choice.first.time
                saved[node.layer][choice.option] = size[sorted(choice.saved)].sum()
                peaks[node.layer][choice.option] = choice.first.peak_bytes
    unit = float(level.wiring.time.sum()) / max(1.0, sum(row.max(initial=0.0) for row in saved))
    cheapest: dict[tuple[int, ...], None] = {}
    for weight in (0.0, 1.0):
        for price in (0.0, *(unit * 2.0**power for power in range(-6, 7))):
            costs = [
                time + price * (kept + weight * peak)
                for time, kept, peak in zip(times, saved, peaks, strict=True)
            ]
            cheapest[tuple(int(row.argmin()) if len(row) else 0 for row in costs)] = None
    return list(cheapest)


def _order(level: Level) -> list[tuple[str, ...]]:
    """List for each node those that have to run before it, though it reads nothing of them."""
    graph = level.wiring.graph
    home: dict[str, int] = {}
    for k, node in enumerate(level.nodes):
        ops = node.choices[0].first.ops
        if node.layer is not None:
            layer = level.layers[node.layer]
            ops = layer.backward if node.backward else layer.forward
        home.update((graph.ops[op].name, k) for op in ops)
    after: list[set[int]] = [set() for _ in level.nodes]
    for op in graph.ops:
        after[home[op.name]].update(home[earlier] for earlier in op.order_after)
    return [tuple(f"{j}" for j in sorted(row - {k})) for k, row in enumerate(after)]


def _choice(node: Node, selection: Sequence[int]) -> int:
    return 0 if node.layer is None else min(selection[node.layer], len(node.choices) - 1)
