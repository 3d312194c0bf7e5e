"""Bytes below which no schedule in the order of the graph can go, proved without search.

While an op runs for the first time, these are alive: its inputs, but for those that it overwrites,
all its outputs, its workspace, and whatever cannot be made again but is still to be read by a first
computation, or is a result. And when the last computation of any result runs, all other results are
there. Where a value has several implementations, the one of least need counts. Linear time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat_solvers.bounds.common_core import at_places, common_core
from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["PeakBound", "peak_bound", "while_running"]


@dataclass(frozen=True, slots=True)
class PeakBound:
    """A proved lower bound on every peak, and the op that cannot run with less.

    No op if it is what is alive at the end that needs as much.
    """

    peak_bytes: int
    op: str | None


def peak_bound(wiring: Wiring, *, any_order: bool = False) -> PeakBound:
    """Find the op that needs most whatever the schedule; with `any_order`, whatever its order."""
    if not wiring.op_count:
        return PeakBound(0, None)
    if wiring.graph.has_alternatives:
        needs = at_places(wiring, while_running(wiring))
        at = int(needs.argmax())
        floor = peak_bound(common_core(wiring), any_order=any_order)
        mine = PeakBound(int(needs[at]), wiring.graph.ops[at].name)
        return max(floor, mine, key=lambda one: one.peak_bytes)
    need = while_running(wiring)
    if not any_order:
        need = need + _pinned(wiring)
    at = int(need.argmax())
    bound, where = int(need[at]), wiring.graph.ops[at].name
    at_end = _at_last_result(wiring)
    if at_end is not None and at_end > bound:
        return PeakBound(at_end, None)
    return PeakBound(bound, where)


def while_running(wiring: Wiring) -> Ints:
    """Sum, for each op, its inputs that it cannot overwrite, its outputs and its workspace."""
    reader = wiring.in_op
    need: Ints = wiring.workspace + np.array(wiring.output_bytes, dtype=np.int64)
    read = np.where(wiring.in_overwritten, 0, wiring.size[wiring.in_value])
    np.add.at(need, reader, read)
    return need


def _pinned(wiring: Wiring) -> Ints:
    """Sum what cannot be made again, is needed after the op, and is not counted as its own."""
    last = wiring.producer.copy()
    reader = wiring.in_op
    np.maximum.at(last, wiring.in_value, reader)
    last[wiring.results] = wiring.op_count
    once = np.flatnonzero(~wiring.replayable[wiring.producer])
    change = np.zeros(wiring.op_count + 2, dtype=np.int64)
    np.add.at(change, wiring.producer[once] + 1, wiring.size[once])
    np.subtract.at(change, np.maximum(last[once], wiring.producer[once] + 1), wiring.size[once])
    held: Ints = np.cumsum(change)[: wiring.op_count]
    for v in once.tolist():
        for op in set(reader[(wiring.in_value == v) & ~wiring.in_overwritten].tolist()):
            if op < last[v]:
                held[op] -= wiring.size[v]
    return held


def _at_last_result(wiring: Wiring) -> int | None:
    """Bound the memory of whichever computation of a result comes last."""
    results = set(wiring.results.tolist())
    if not results:
        return None
    total = int(wiring.size[wiring.results].sum())
    bounds: list[int] = []
    for op in sorted({wiring.producer_list[v] for v in results}):
        others = set(wiring.inputs[op]) - set(wiring.overwritten[op]) | set(wiring.outputs[op])
        more = sum(int(wiring.size[v]) for v in others - results)
        bounds.append(total + more + wiring.workspace_list[op])
    return min(bounds)
