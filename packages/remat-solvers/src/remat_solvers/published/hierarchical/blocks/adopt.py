"""Options and selections of a level that follow a schedule of the whole graph.

What a schedule computes of a block, in its order, is a schedule of the block: the first runs of the
forward ops are its forward half; the rest, but for what only other blocks read, is its backward
half. So it can be an option of the block. What is lost is that a value which leaves a block can be
made again by a few ops: a level runs the whole forward half for it.
Linear in the schedule and its reads, for each block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_solvers.core.dead_runs import live_runs
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.published.hierarchical.blocks.level import Layer, Level
from remat_solvers.published.hierarchical.blocks.runs import saved_between

__all__ = ["adopt", "follow"]

# Op numbers of the forward half and of the backward half, as in `Layer.options`.
Halves = tuple[tuple[int, ...], tuple[int, ...]]


def adopt(wiring: Wiring, layer: Layer, sequences: Sequence[Ints]) -> Layer:
    """Add what legal sequences of ops do in a layer to its options, last, where it is new."""
    options = dict.fromkeys(layer.options)
    options.update(dict.fromkeys(_halves(wiring, layer, sequence) for sequence in sequences))
    return dataclasses.replace(layer, options=tuple(options))


def follow(level: Level, sequence: Ints) -> tuple[int, ...]:
    """Select for every layer the option that does what a legal sequence of ops does.

    Where there is none, the fastest that keeps no more between the halves, or if all keep more, the
    one that keeps least.
    """
    leaving = {n.layer: n.choices[0].first.makes for n in level.nodes if not n.backward}
    chosen: list[int] = []
    for number, layer in enumerate(level.layers):
        wanted = _halves(level.wiring, layer, sequence)
        costs = [_cost(level.wiring, option, leaving[number]) for option in layer.options]
        most, _ = _cost(level.wiring, wanted, leaving[number])
        above = [(max(0, kept - most), duration) for kept, duration in costs]
        exact = layer.options.index(wanted) if wanted in layer.options else above.index(min(above))
        chosen.append(exact)
    return tuple(chosen)


def _cost(wiring: Wiring, option: Halves, leaving: frozenset[int]) -> tuple[int, float]:
    """Give the bytes that an option keeps between the halves, and its time."""
    kept = saved_between(wiring, *option, leaving)
    return int(wiring.size[sorted(kept)].sum()), sum(
        wiring.time_list[op] for half in option for op in half
    )


def _halves(wiring: Wiring, layer: Layer, sequence: Ints) -> Halves:
    """Read what a sequence does in a layer."""
    forward, inside = frozenset(layer.forward), frozenset((*layer.forward, *layer.backward))
    runs = [op for op in sequence.tolist() if op in inside]
    ahead = [op for op in dict.fromkeys(runs) if op in forward]
    left = set(ahead)
    rest: list[int] = []
    for op in runs:
        if op in left:
            left.discard(op)
        else:
            rest.append(op)
    first = {op: place for place, op in reversed(list(enumerate(rest)))}
    owed = {place for op, place in first.items() if op in layer.backward}
    return tuple(ahead), live_runs(wiring, rest, (), owed)[0]
