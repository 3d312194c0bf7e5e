"""The chain of blocks that a training graph is, if it is one.

HiRemate, appendix C.1.3: the forward ops are cut where one value alone goes on, parameters and
inputs (resident values) ignored. A stage is what lies between two cuts; a backward op goes to the
stage of its twin, or to the last stage where its inputs are there if that is earlier; where no op
has a twin, the last stage of which it reads a forward value stands for that of the twin. Stages
that the backward half ties together, because it reads a forward value of a stage that is neither
its own nor the carried value of the one before, or because its order contradicts theirs, are
merged. So are neighbours that both have no backward op, as there is nothing to record between them.

Some values need not hinder a cut, because they may be held from their first computation to their
last use: results; what carries no gradient, such as masks (nothing it comes from is the twin of a
backward op); what is read again only by ops that run once and have no gradient, such as the writing
of statistics; and what spans many ops, such as skip connections and what an encoder hands to a
decoder. How long a span must be is open, so there are several chains, all legal.
Limits: cuts are looked for in the execution order, so blocks whose ops alternate are one block.
(`remat_partition`'s `sequence` cuts at articulation ops, whatever the order, and asks by another
rule what makes a gradient: it needs no backward half that follows the cuts, as the programme does.)
Linear time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["Chain", "ChainStage", "find_chains", "merged"]


_LONG_SPANS = (math.inf, 1 / 2, 1 / 4, 1 / 8)


@dataclass(frozen=True, slots=True)
class ChainStage:
    """Op numbers in execution order, and the one value that later stages read (or none)."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    carried: int | None


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages in forward order; `held` values live from their first computation to their last use.

    They are results, outputs of ops that are not replayable, and what is read beyond the next
    stage, or by the backward of an earlier one.
    """

    stages: tuple[ChainStage, ...]
    held: frozenset[int]


def find_chains(wiring: Wiring) -> tuple[Chain, ...] | str:
    """Cut a graph into chains, the finest first, or say why it is none."""
    graph = wiring.graph
    if not graph.ops:
        return "the graph has no ops"
    boundary = graph.boundary_index
    if graph.boundary is None or boundary == 0:
        return "the graph does not say where its backward half begins, or has no forward half"
    free = _without_gradient(wiring, boundary)
    last = _last_forward_read(wiring, boundary)
    chains: dict[Chain, None] = {}
    most_blocks = 1
    for share in _LONG_SPANS:
        spanning = {
            v
            for v, read in enumerate(last)
            if read - wiring.producer_list[v] >= max(2.0, share * boundary)
        }
        stages = _cut(wiring, boundary, last, free | spanning)
        most_blocks = max(most_blocks, len(stages))
        stages = _with_backward(wiring, stages, boundary)
        if len(stages) > 1 or boundary == 1:
            chains[Chain(tuple(stages), _held(wiring, stages))] = None
    if chains:
        return tuple(sorted(chains, key=lambda chain: -len(chain.stages)))
    if most_blocks == 1:
        return "it is no chain of blocks: nowhere in its forward half does one value alone go on"
    return f"it is no chain of blocks: its backward half ties all {most_blocks} blocks together"


def merged(wiring: Wiring, chain: Chain, most_stages: int) -> Chain:
    """Merge neighbours, cheapest first, until at most `most_stages` are left."""
    stages = list(chain.stages)
    times = [sum(wiring.time_list[op] for op in stage.forward) for stage in stages]
    while len(stages) > most_stages:
        at = min(range(len(stages) - 1), key=lambda i: times[i] + times[i + 1])
        stages[at : at + 2] = [_join(stages[at : at + 2])]
        times[at : at + 2] = [times[at] + times[at + 1]]
    return Chain(tuple(stages), _held(wiring, stages))


def _cut(
    wiring: Wiring, boundary: int, last: list[int], free: frozenset[int] | set[int]
) -> list[ChainStage]:
    """Cut the forward half wherever at most one value made since the last cut goes on.

    Where more than one goes on, `free` values do not count.
    """
    results = set(wiring.results.tolist())
    passing = [v for v in range(len(last)) if last[v] > wiring.producer_list[v]]
    passing = [v for v in passing if v not in results]
    everything = _crossing(wiring, passing, last, boundary)
    others = _crossing(wiring, [v for v in passing if v not in free], last, boundary)
    stages: list[ChainStage] = []
    start = 0
    for position in range(boundary):
        carried: int | None = None
        if position < boundary - 1:
            count, total = next(
                (pair for pair in (everything[position], others[position]) if pair[0] <= 1), (2, 0)
            )
            if count > 1:
                continue
            carried = total if count else None
            if carried is not None and wiring.producer_list[carried] < start:
                continue
        stages.append(ChainStage(tuple(range(start, position + 1)), (), carried))
        start = position + 1
    return stages


def _last_forward_read(wiring: Wiring, boundary: int) -> list[int]:
    last = [-1] * wiring.value_count
    for op in range(boundary):
        for v in wiring.inputs[op]:
            last[v] = op
    return last


def _without_gradient(wiring: Wiring, boundary: int) -> frozenset[int]:
    """Find forward values without a gradient, and those that nothing with a gradient reads again.

    None are known without twins.
    """
    graph = wiring.graph
    twins = {graph.op_index[op.twin] for op in graph.ops if op.twin is not None}
    if not twins:
        return frozenset()
    constant: set[int] = set()
    rereads: set[int] = set()
    for op in range(boundary):
        if op not in twins and all(v in constant for v in wiring.inputs[op]):
            constant.update(wiring.outputs[op])
        if op in twins or wiring.replayable_list[op]:
            rereads.update(wiring.inputs[op])
    outputs = {v for op in range(boundary) for v in wiring.outputs[op]}
    return frozenset(constant | (outputs - rereads))


def _crossing(
    wiring: Wiring, values: list[int], last: list[int], boundary: int
) -> list[tuple[int, int]]:
    """Count the values that cross after each op, and add up their numbers: one value's is its."""
    change: Ints = np.zeros((2, boundary + 1), dtype=np.int64)
    for v in values:
        change[:, wiring.producer_list[v]] += (1, v)
        change[:, last[v]] -= (1, v)
    counts, totals = np.cumsum(change, axis=1).tolist()
    return list(zip(counts, totals, strict=True))


def _with_backward(wiring: Wiring, stages: list[ChainStage], boundary: int) -> list[ChainStage]:
    """Give each backward op to a stage, merging those that the backward half ties together."""
    count = len(stages)
    home = [0] * wiring.op_count
    for k, stage in enumerate(stages):
        for op in stage.forward:
            home[op] = k
    held = _held(wiring, stages)
    _assign(wiring, home, boundary, count, held)
    carried = {stage.carried for stage in stages}
    glued = [0] * (count + 1)
    for op in range(boundary, wiring.op_count):
        for earlier, v in _dependencies(wiring, op):
            low, high = sorted((home[earlier], home[op]))
            if earlier >= boundary:
                tied = home[earlier] < home[op]
            elif v is None or v in held:
                tied = False
            else:
                if v in carried and home[earlier] < home[op]:
                    low += 1
                tied = True
            if tied:
                glued[low] += 1
                glued[high] -= 1
    groups: list[list[ChainStage]] = [[]]
    members: list[list[int]] = [[] for _ in range(count)]
    for op in range(boundary, wiring.op_count):
        members[home[op]].append(op)
    depth = 0
    for k, stage in enumerate(stages):
        groups[-1].append(ChainStage(stage.forward, tuple(members[k]), stage.carried))
        depth += glued[k]
        if depth == 0 and k < count - 1:
            groups.append([])
    merged_stages: list[ChainStage] = []
    for stage in map(_join, groups):
        if merged_stages and not merged_stages[-1].backward and not stage.backward:
            merged_stages[-1] = _join([merged_stages[-1], stage])
        else:
            merged_stages.append(stage)
    return merged_stages


def _assign(
    wiring: Wiring, home: list[int], boundary: int, count: int, held: frozenset[int]
) -> None:
    """Say in which stage each backward op runs; the stages run backwards, last stage first."""
    graph = wiring.graph
    twins = any(op.twin is not None for op in graph.ops)
    unknown: list[int] = []
    placed: set[int] = set()
    for op in range(boundary, wiring.op_count):
        twin = graph.ops[op].twin
        pairs = list(_dependencies(wiring, op))
        latest = [home[e] for e, _ in pairs if e in placed]
        sources = [home[e] for e, v in pairs if e < boundary and v is not None and v not in held]
        if twin is not None:
            # Captured gradient sums name a twin of a later stage than that of what they add.
            home[op] = min([home[graph.op_index[twin]], *latest])
        elif sources and not (twins and latest):
            home[op] = min([max(sources), *latest])
        elif latest:
            home[op] = min(latest)
        else:
            unknown.append(op)
            continue
        placed.add(op)
    readers: dict[int, list[int]] = {op: [] for op in unknown}
    for op in range(boundary, wiring.op_count):
        for earlier, _ in _dependencies(wiring, op):
            if earlier in readers:
                readers[earlier].append(op)
    for op in reversed(unknown):
        home[op] = max((home[reader] for reader in readers[op]), default=count - 1)


def _dependencies(wiring: Wiring, op: int) -> list[tuple[int, int | None]]:
    """List the ops that must come before one, with the value that it reads of them, if any."""
    graph = wiring.graph
    after = [(graph.op_index[name], None) for name in graph.ops[op].order_after]
    return [*((wiring.producer_list[v], v) for v in wiring.inputs[op]), *after]


def _join(group: list[ChainStage]) -> ChainStage:
    forward = tuple(op for stage in group for op in stage.forward)
    backward = tuple(sorted(op for stage in group for op in stage.backward))
    return ChainStage(forward, backward, group[-1].carried)


def _held(wiring: Wiring, stages: list[ChainStage] | tuple[ChainStage, ...]) -> frozenset[int]:
    """Find the forward values that live on, whatever is recomputed."""
    home = {op: k for k, stage in enumerate(stages) for op in stage.forward}
    read = set(wiring.in_value.tolist())
    outputs = [v for op in home for v in wiring.outputs[op]]
    held = {v for v in outputs if v in read and not wiring.replayable_list[wiring.producer_list[v]]}
    held.update(set(outputs) & set(wiring.results.tolist()))
    carried = [stage.carried for stage in stages]
    for k, stage in enumerate(stages):
        for op in (*stage.forward, *stage.backward):
            for v in wiring.inputs[op]:
                source = home.get(wiring.producer_list[v], k)
                if source != k and not (source == k - 1 and carried[source] == v):
                    held.add(v)
    return frozenset(held)
