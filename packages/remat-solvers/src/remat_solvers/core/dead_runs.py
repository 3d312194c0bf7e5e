"""Runs of which nothing is needed, by liveness, and sequences without them.

A run is needed if something reads, before it is made again, what it makes; at the end of a schedule
the results are read. Linear in the runs and what they touch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["drop_dead_runs", "live_runs", "repeats", "without_dead_runs"]


def live_runs(
    wiring: Wiring,
    ops: Sequence[int],
    wanted: Iterable[int],
    owed: Collection[int] = (),
    there: Collection[int] = (),
) -> tuple[tuple[int, ...], frozenset[int]]:
    """List the ops that lead to the values `wanted` at the end, and what must be there before them.

    The positions in `owed` stay in any case; the values in `there` need not be made.
    """
    needed = set(wanted).difference(there)
    live: list[int] = []
    for position in range(len(ops) - 1, -1, -1):
        op = ops[position]
        if position in owed or not needed.isdisjoint(wiring.outputs[op]):
            live.append(op)
            needed.difference_update(wiring.outputs[op])
            needed.update(v for v in wiring.inputs[op] if v not in there)
    return tuple(reversed(live)), frozenset(needed)


def without_dead_runs(wiring: Wiring, sequence: Ints) -> Ints:
    """Leave out computations that make nothing that is read, nor anything owed a first time."""
    order: list[int] = sequence.tolist()
    ops = wiring.graph.ops
    available: set[int] = set()
    owed: set[int] = set()
    for position, op in enumerate(order):
        outputs = wiring.outputs[op] or (-1 - op,)
        if not ops[op].optional and not available.issuperset(outputs):
            owed.add(position)
        available.update(outputs)
    return np.array(live_runs(wiring, order, wiring.results.tolist(), owed)[0], dtype=np.int64)


def drop_dead_runs(wiring: Wiring, now: Trace, gone: Sequence[int] | Ints = ()) -> Trace:
    """Leave out the computations at the positions `gone`, and what nothing needs then.

    None of `gone` may be the first to make something. Vectorised where each value has one
    implementation.
    """
    if wiring.graph.has_alternatives:
        left = without_dead_runs(wiring, np.delete(now.sequence, gone))
        return now if len(left) == now.steps else trace(wiring, left)
    position_of = now.key % (now.steps + 1)
    dead = np.zeros(now.steps + 1, dtype=np.bool_)
    dead[list(gone)] = True
    # What read a computation that is left out reads the last one of its op before that stays.
    stays = np.maximum.accumulate(np.where(dead[position_of], 0, np.arange(now.steps)))
    rank = np.repeat(np.arange(now.steps), np.diff(now.first_copy))[now.use_copy]
    read_at = position_of[stays[rank]]
    again = np.zeros(now.steps + 1, dtype=np.bool_)
    again[position_of[repeats(now)]] = True
    while True:
        again[dead] = False
        idle = again.copy()
        idle[read_at[~dead[now.use_position]]] = False
        if not idle.any():
            break
        dead |= idle
    return trace(wiring, now.sequence[~dead[:-1]]) if dead.any() else now


def repeats(now: Trace) -> NDArray[np.bool_]:
    """Say of each computation, in the order of `key`, whether it is a recomputation."""
    ops = now.key // (now.steps + 1)
    return np.concatenate([[False], ops[1:] == ops[:-1]]) if now.steps else np.zeros(0, np.bool_)
