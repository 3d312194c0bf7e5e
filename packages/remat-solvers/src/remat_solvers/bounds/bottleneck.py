"""A lower bound on every peak, from the last time that one of the large ops runs.

Take any set of ops. In every schedule there is a last time that one of them runs, say op j. Alive
then are its inputs (but for those that it overwrites) and outputs, its workspace, and besides
values from which all results follow without any of the set: those that are not alive are computed
later, by other ops, from what is alive. So a cut of the paths from the results back to the set is
alive, and the peak is at least, for the best j, what j needs plus the least such cut, where what j
makes is free, and what it reads and cannot overwrite. Ops that must not run again and come before
the last of the set belong to what must not run.

That run is of use, which makes the cut larger. Runs that are not first ones and of which nothing is
read, nor left as a result, can be taken out of a schedule; so assume there is none. (1) If j ran
before, an output of this run is left as a result, or read by an op that runs later, hence is not of
the set; if that op comes before the last of the set, it ran before too (first runs are in order)
and is of use likewise. So an op on all such ways from j, to one that makes a result or comes after
the last of the set, runs later, and what it reads must follow from what is alive as the results do.
(2) If j runs for the first time, it is the last of the set in the order, all ops after it are still
to run, and what they make is not alive: what they read must follow from values made up to j. The
lesser of the cuts holds, in (1) only for ops that may run again and have such a way.

The bound holds for any set. Of an op of a set it does not rise if the set loses another. So for a
target, an op whose own bound is below it is in no subset that proves the target; without those ops
(taken out in turn, from some sets of ops that need much) the rest proves it, or nothing is left.
Complexity: some maximum flows (`core.cuts`, or scipy's Dinic) per op and target, fewer where one
cut for all ops shows that a bound is below the target. Source: our own; min-cut duality; taking out
in turn, Lawler (1973, one machine, least greatest cost); dominators, Cooper, Harvey and Kennedy
(2001).
"""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from remat_solvers.bounds.common_core import common_core
from remat_solvers.bounds.peak import PeakBound, peak_bound, while_running
from remat_solvers.core.cuts import FEW_ARCS, least_cut
from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["bottleneck"]

_MOST_CAPACITY = 1 << 30  # scipy counts in 32 bits
_THRESHOLDS = 12
_STEPS = (0.02, 0.002)  # of the bound, by which more is tried to be proved
_AFTER_REMOVAL = 10
_MOST_FORCED = 200  # ops that are followed after the last of a set
_MOST_SETS = 3  # of which what is known is kept
_END, _NONE = -1, -2  # instead of the next op
_NEVER = 2**63 - 1


def bottleneck(wiring: Wiring, deadline: float = math.inf) -> PeakBound:
    """Prove a lower bound on the peak, never below that of `peak_bound`.

    `deadline` is a time of `time.perf_counter`; what was proved by then is returned.
    """
    best = peak_bound(wiring)
    wiring = common_core(wiring)
    if not len(wiring.results):
        return best
    network = _Network(wiring, deadline)
    needs = while_running(wiring)
    for threshold in _thresholds(needs):
        chosen = needs >= threshold
        for step in _STEPS:
            while time.perf_counter() < deadline:
                target = best.peak_bytes + max(1, int(step * best.peak_bytes))
                left = network.peel(chosen, target)
                bound = network.bound(left, best.peak_bytes) if left.any() else None
                if bound is None or bound.peak_bytes <= best.peak_bytes:
                    break
                chosen, best = left, bound
    return best


def _thresholds(needs: Ints) -> list[int]:
    """Choose some needs, from the largest down, each a share below the one before."""
    chosen: list[int] = []
    for need in np.unique(needs)[::-1].tolist():
        if not chosen or need < 0.93 * chosen[-1]:
            chosen.append(need)
    return chosen[:_THRESHOLDS]


def _own(wiring: Wiring, op: int) -> set[int]:
    """List what an op needs while it runs: what it makes, and reads and cannot overwrite."""
    return {*wiring.inputs[op], *wiring.outputs[op]} - set(wiring.overwritten[op])


class _Network:
    """Values as arcs, from the results back to what they are computed from.

    Arc `v` runs from node `2 v` to `2 v + 1`, at the cost of keeping `v`; capacities are rounded
    down to whole units, so that a cut never costs more than in bytes.
    """

    def __init__(self, wiring: Wiring, deadline: float) -> None:
        self.wiring = wiring
        self._deadline = deadline
        self._needs = while_running(wiring)
        count = wiring.value_count
        self._unit = max(1, -(-int(wiring.size.sum()) // _MOST_CAPACITY))
        self._size: Ints = wiring.size // self._unit
        self._endless = int(self._size.sum()) + 1
        self._source, self._sink = 2 * count, 2 * count + 1
        inputs = np.diff(wiring.in_start)[wiring.producer]
        reader = np.repeat(np.arange(count), inputs)
        read = np.array(
            [u for op in wiring.producer_list for u in wiring.inputs[op]], dtype=np.int64
        )
        own = np.arange(count)
        tails = np.concatenate([2 * own, 2 * reader + 1, np.full(count, self._source), 2 * own + 1])
        heads = np.concatenate([2 * own + 1, 2 * read, 2 * own, np.full(count, self._sink)])
        self._order = np.lexsort((heads, tails))
        self._tails = tails[self._order]
        self._heads = heads[self._order].astype(np.int32)
        self._rows = np.searchsorted(tails[self._order], np.arange(2 * count + 3))
        self._between: Ints = np.full(len(read), self._endless)
        self._results = set(wiring.results.tolist())
        readers: list[list[int]] = [[] for _ in range(wiring.op_count)]
        for op, values in enumerate(wiring.inputs):
            for producer in {wiring.producer_list[v] for v in values}:
                readers[producer].append(op)
        self._readers = readers
        self._latest_sets: list[_Last] = []

    def last_of(self, chosen: NDArray[np.bool_]) -> _Last:
        """Say what is known after the last run of a set of ops, once for those asked of lately."""
        for last in self._latest_sets:
            if np.array_equal(last.chosen, chosen):
                return last
        last = _Last(self, chosen)
        self._latest_sets = [last, *self._latest_sets[: _MOST_SETS - 1]]
        return last

    def peel(self, chosen: NDArray[np.bool_], target: int) -> NDArray[np.bool_]:
        """Take out ops whose own bound is below a target until none is left, or time is up."""
        chosen = chosen.copy()
        bounds = np.full(self.wiring.op_count, _NEVER)
        removed = True
        while removed and chosen.any() and not self.late():
            last = self.last_of(chosen)
            members, floors = self._floors(last)
            rough = self._rough(members, last)
            removed = bool((rough < target).any())
            if removed:
                chosen[members[rough < target]] = False
                continue
            since = 0
            for i in np.argsort(np.minimum(bounds[members], rough), kind="stable").tolist():
                if floors[i] >= target:
                    continue
                if self.late():
                    return chosen
                op = int(members[i])
                bounds[op] = self._at(op, last)
                since += 1
                if bounds[op] < target:
                    chosen[op] = False
                    removed = True
                    since = 0
                elif removed and since > _AFTER_REMOVAL:
                    break
        return chosen

    def _rough(self, members: Ints, last: _Last) -> Ints:
        """Say, for each op of a set, what its bound is at most, from one cut for all."""
        wiring, size = self.wiring, self.wiring.size
        kept = last.kept
        follows = self._follows(kept, last.over)
        total = int(size[kept].sum())
        rough: list[int] = []
        for op in members.tolist():
            if self.late():
                break
            forced = last.forced(op)
            if forced is None:
                rough.append(_NEVER)
                continue
            free = _own(wiring, op)
            more = {v for reader in forced for v in wiring.inputs[reader] if not follows[v]} - free
            less = sum(int(size[v]) for v in free if kept[v])
            rough.append(int(self._needs[op]) + total - less + sum(int(size[v]) for v in more))
        return np.array(rough + [_NEVER] * (len(members) - len(rough)), dtype=np.int64)

    def _follows(self, kept: NDArray[np.bool_], over: NDArray[np.bool_]) -> list[bool]:
        """Say of each value whether it is kept, or computed from what is by ops that may run."""
        follows: list[bool] = kept.tolist()
        gone = over.tolist()
        for op, values in enumerate(self.wiring.inputs):
            if not gone[op] and all(follows[v] for v in values):
                for v in self.wiring.outputs[op]:
                    follows[v] = True
        return follows

    def bound(self, chosen: NDArray[np.bool_], beat: int) -> PeakBound | None:
        """Bound the peak by a set of ops; `None` if that is no more than `beat`."""
        last = self.last_of(chosen)
        members, floors = self._floors(last)
        least_bytes, at = _NEVER, int(members[0])
        for i in np.argsort(floors, kind="stable").tolist():
            if floors[i] >= least_bytes:
                break
            op = int(members[i])
            late = self.late()
            bytes_here = int(floors[i]) if late else self._at(op, last)
            if bytes_here < least_bytes:
                least_bytes, at = bytes_here, op
            if least_bytes <= beat:
                return None
        return PeakBound(least_bytes, self.wiring.graph.ops[at].name)

    def _floors(self, last: _Last) -> tuple[Ints, Ints]:
        """Find the ops of a set and for each a bound without a cut of its own."""
        members = np.flatnonzero(last.chosen)
        needs = self._needs[members]
        own = needs - self.wiring.workspace[members]
        cut = int(self._size[last.kept].sum()) * self._unit
        return members, needs + np.maximum(0, cut - own)

    def _at(self, op: int, last: _Last) -> int:
        """Bound what is alive if an op is the last of a set that runs."""
        if op not in last.bounds:
            last.bounds[op] = self._least_alive(op, last)
        return last.bounds[op]

    def _least_alive(self, op: int, last: _Last) -> int:
        wiring = self.wiring
        size = self._size.copy()
        size[list(_own(wiring, op))] = 0
        bounds = []
        forced = last.forced(op)
        if forced is not None:
            wanted = [v for reader in forced for v in wiring.inputs[reader]]
            bounds.append(self._cut(size, [*wiring.results, *wanted], last.over))
        if op == last.latest:
            size[wiring.producer > op] = self._endless
            wanted = [*wiring.results, *wiring.in_value[wiring.in_start[op + 1] :]]
            bounds.append(self._cut(size, wanted, last.over))
        return int(self._needs[op]) + min(bounds) if bounds else _NEVER

    def _cut(self, size: Ints, wanted: Ints | list[int], over: NDArray[np.bool_]) -> int:
        """Find the bytes of the least set of values from which all that is wanted follows."""
        capacity = self._capacity(size, wanted, over)
        if len(capacity) <= FEW_ARCS:
            return self._least_cut(capacity)[0] * self._unit
        flow = maximum_flow(self._arcs(capacity), self._source, self._sink)
        return int(flow.flow_value) * self._unit

    def least_set(self, over: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Find a least set of values from which all results follow."""
        capacity = self._capacity(self._size, self.wiring.results, over)
        side = np.zeros(self._sink + 1, dtype=np.bool_)
        if len(capacity) <= FEW_ARCS:
            side[self._least_cut(capacity)[1]] = True
        else:
            arcs = self._arcs(capacity)
            left = arcs - maximum_flow(arcs, self._source, self._sink).flow
            left.data[left.data < 0] = 0
            left.eliminate_zeros()
            side[breadth_first_order(left, self._source, return_predecessors=False)] = True
        return side[: self._source : 2] & ~side[1 : self._source : 2]

    def _capacity(self, size: Ints, wanted: Ints | list[int], over: NDArray[np.bool_]) -> Ints:
        """Give what each arc takes, from what is wanted to what ops made that are over."""
        starts = np.zeros(len(size), dtype=np.int64)
        starts[wanted] = self._endless
        ends = np.where(over[self.wiring.producer], self._endless, 0)
        capacity: Ints = np.concatenate([size, self._between, starts, ends])[self._order]
        return capacity

    def _least_cut(self, capacity: Ints) -> tuple[int, list[int]]:
        ends = zip(self._tails.tolist(), self._heads.tolist(), capacity.tolist(), strict=True)
        return least_cut((arc for arc in ends if arc[2]), self._source, self._sink)

    def _arcs(self, capacity: Ints) -> sparse.csr_matrix:
        there = capacity > 0
        row = np.concatenate([[0], np.cumsum(there)])[self._rows].astype(np.int32)
        return sparse.csr_matrix(
            (capacity[there].astype(np.int32), self._heads[there], row),
            shape=(self._sink + 1, self._sink + 1),
        )

    def late(self) -> bool:
        """Say whether the time is up."""
        return time.perf_counter() > self._deadline

    def onwards(self, op: int, over: list[bool]) -> list[int]:
        """List the readers of an op that may still run; -1 if it makes a result."""
        readers = [reader for reader in self._readers[op] if not over[reader]]
        if not self._results.isdisjoint(self.wiring.outputs[op]):
            readers.append(_END)
        return readers


class _Last:
    """What is known to run, and not to run, after the last run of a set of ops."""

    def __init__(self, network: _Network, chosen: NDArray[np.bool_]) -> None:
        wiring = network.wiring
        self.chosen = chosen.copy()
        self.latest = int(np.flatnonzero(chosen)[-1])
        before = np.arange(wiring.op_count) < self.latest
        self.over: NDArray[np.bool_] = chosen | (~wiring.replayable & before)
        self.kept = network.least_set(self.over)
        self.bounds: dict[int, int] = {}
        self._network = network
        self._next = self._dominators()

    def forced(self, op: int) -> list[int] | None:
        """List what runs after an op that ran before, for it to be of use; `None` if it cannot be.

        Of a long list only the beginning.
        """
        at = self._next[op]
        if at == _NONE or not self._network.wiring.replayable_list[op]:
            return None
        ops: list[int] = []
        while at != _END and len(ops) < _MOST_FORCED:
            ops.append(at)
            at = self._next[at]
        return ops

    def _dominators(self) -> list[int]:
        """Find the next op on all ways from an op to a result or to an op after the set."""
        over = self.over.tolist()
        following = [_END] * len(over)
        depth = [1] * len(over)
        for op in range(self.latest, -1, -1):
            if self._network.late():
                break
            at = _NONE
            for reader in self._network.onwards(op, over):
                if reader == _END or following[reader] != _NONE:
                    at = reader if at == _NONE else _meet(at, reader, following, depth)
            following[op] = at
            if at >= 0:
                depth[op] = depth[at] + 1
        return following


def _meet(one: int, other: int, following: list[int], depth: list[int]) -> int:
    """Find the first op on the ways from both."""
    while one != other:
        if _END in {one, other}:
            return _END
        if depth[one] >= depth[other]:
            one = following[one]
        else:
            other = following[other]
    return one
