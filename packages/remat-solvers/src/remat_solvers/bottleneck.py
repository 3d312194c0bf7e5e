"""A lower bound on every peak, from the last time that one of the large ops runs.

Take any set of ops, here all that need at least some bytes while they run. In every schedule there
is a last time that one of them runs, say op j. Alive then are its inputs and outputs, its
workspace, and besides values from which all results follow without any of the set: those that are
not alive are computed later, by other ops, from what is alive. So a cut of the paths from the
results back to the set is alive, and the peak is at least, for the best j, what j needs plus the
least such cut, where what j reads and makes is free. Ops that must not run again and come before
the last of the set belong to what must not run. The bound holds for any set; the best of some
thresholds is taken.
Complexity: a maximum flow (scipy, Dinic) per threshold and op of the set, most of them skipped: an
op whose bound without a flow of its own is above another's. Source: our own; min-cut duality.
"""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import maximum_flow

from remat_solvers.least import Least, least, while_running
from remat_solvers.wiring import Ints, Wiring

__all__ = ["bottleneck"]

_THRESHOLDS = 12
_MOST_CAPACITY = 1 << 30  # scipy counts in 32 bits


def bottleneck(wiring: Wiring, deadline: float = math.inf) -> Least:
    """Prove a lower bound on the peak, never below that of `least`.

    `deadline` is a moment of `time.perf_counter`; what was proved by then is returned.
    """
    best = least(wiring)
    if not len(wiring.results):
        return best
    needs = while_running(wiring)
    network = _Network(wiring)
    for threshold in _thresholds(needs):
        if time.perf_counter() > deadline:
            break
        found = network.bound(needs, needs >= threshold, best.peak_bytes, deadline)
        if found is not None and found.peak_bytes > best.peak_bytes:
            best = found
    return best


def _thresholds(needs: Ints) -> list[int]:
    """Choose some needs, from the largest down, each a share below the one before."""
    chosen: list[int] = []
    for need in np.unique(needs)[::-1].tolist():
        if not chosen or need < 0.93 * chosen[-1]:
            chosen.append(need)
    return chosen[:_THRESHOLDS]


class _Network:
    """Values as arcs, from the results back to what they are computed from.

    Arc `v` runs from node `2 v` to `2 v + 1`, at the cost of keeping `v`; capacities are rounded
    down to whole units, so that a cut never costs more than in bytes.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        count = wiring.value_count
        total = int(wiring.size.sum())
        self._unit = max(1, -(-total // _MOST_CAPACITY))
        self._size: Ints = wiring.size // self._unit
        self._endless = int(self._size.sum()) + 1
        self._source, self._sink = 2 * count, 2 * count + 1
        inputs = np.diff(wiring.in_start)[wiring.producer]
        reader = np.repeat(np.arange(count), inputs)
        read = np.array(
            [u for op in wiring.producer_list for u in wiring.inputs[op]], dtype=np.int64
        )
        own = np.arange(count)
        self._tails = np.concatenate(
            [2 * own, 2 * reader + 1, np.full(len(wiring.results), self._source), 2 * own + 1]
        )
        self._heads = np.concatenate(
            [2 * own + 1, 2 * read, 2 * wiring.results, np.full(count, self._sink)]
        )
        self._between = len(read) + len(wiring.results)

    def bound(
        self, needs: Ints, chosen: NDArray[np.bool_], beat: int, deadline: float
    ) -> Least | None:
        """Bound the peak by a set of ops; `None` if that is no more than `beat`."""
        wiring = self._wiring
        members = np.flatnonzero(chosen)
        never = chosen | (~wiring.replayable & (np.arange(wiring.op_count) < members[-1]))
        ends = np.where(never[wiring.producer], self._endless, 0)
        free = self._cut(self._size, ends)
        own = needs[members] - wiring.workspace[members]
        floors = needs[members] + np.maximum(0, free - own)
        least_bytes, at = math.inf, int(members[0])
        for i in np.argsort(floors, kind="stable").tolist():
            if floors[i] >= least_bytes:
                break
            op = int(members[i])
            there = [*wiring.inputs[op], *wiring.outputs[op]]
            if time.perf_counter() > deadline:
                bytes_here = int(floors[i])
            else:
                size = self._size.copy()
                size[there] = 0
                bytes_here = int(needs[op]) + self._cut(size, ends)
            if bytes_here < least_bytes:
                least_bytes, at = bytes_here, op
            if least_bytes <= beat:
                return None
        return Least(int(least_bytes), wiring.graph.ops[at].name)

    def _cut(self, size: Ints, ends: Ints) -> int:
        """Find the bytes of the least set of values without which no end is reached."""
        capacity = np.concatenate([size, np.full(self._between, self._endless), ends])
        there = capacity > 0
        nodes = self._sink + 1
        arcs = sparse.csr_array(
            (
                capacity[there].astype(np.int32),
                (self._tails[there].astype(np.int32), self._heads[there].astype(np.int32)),
            ),
            shape=(nodes, nodes),
        )
        flow = maximum_flow(sparse.csr_matrix(arcs), self._source, self._sink)
        return int(flow.flow_value) * self._unit
