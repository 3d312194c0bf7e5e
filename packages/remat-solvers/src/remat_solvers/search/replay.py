"""Lower a peak that is near the least: give up idle copies, and replay what makes them again.

At a time step over the target, a value that is alive but idle is given up, and right before its
next use a part of the sequence so far is run again. Which part is a minimum cut: of every value
that the replay reads and that is gone by then, either the life is extended or the computation is
replayed too. Both cost what they add to the excess, the bytes over the target summed over all time
steps; what stays under the target counts a thousandth. Unlike `evict`, which makes again all that
is gone, this keeps the small values between two large ones, and gives up results, that is,
parameter gradients; values that are next used at the same time step are also given up together.
The cut leaves out what the replayed values hold of one another, so the best few by its estimate are
traced, in the order of the sequence, which is known to run at a low peak, and in that of the graph.
Where no small step helps, a value is given up at any cost, to descend from there (`give_up`).
Guarantee: the peak never rises, but by `give_up`. Complexity: per step of the descent, a maximum
flow (`core.cuts`, or scipy's Dinic) for each of some values and about ten traces. Source: our own;
min-cut duality.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from remat_solvers.bounds.peak import while_running
from remat_solvers.core.cuts import FEW_ARCS, least_cut
from remat_solvers.core.dead_runs import drop_dead_runs
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Floats, Ints, Wiring
from remat_solvers.search.evict import Closures, idle_copies
from remat_solvers.search.perturbations import random_factors

__all__ = ["give_up", "replay"]

_POSITIONS, _QUICK_POSITIONS = 8, 1  # over the target, tried until one can be lowered
_VALUES, _QUICK_VALUES = 10, 3  # given up at one time step
_MOST_STEPS = 60  # per op of the graph, in all
_MOST_REPLAYED = 2000  # computations, for one value
_PATIENCE = 30  # replays until the peak must be lower
_NOISE = 0.5
_HIGH = 0.995  # of the peak
_UNDER = 1e-3  # what a byte under the target counts
_CAPACITY = 1 << 28  # scipy counts in 32 bits

Replay = tuple[int, Ints]  # before which position, and which positions run again


def replay(
    wiring: Wiring,
    now: Trace,
    target_bytes: int,
    *,
    seed: int = 0,
    quick: bool = False,
    deadline: float = math.inf,
) -> Trace:
    """Descend until the peak is within the target, nothing helps, or `deadline`.

    `seed` varies which values are given up first, with no noise at 0; a `quick` descent tries few;
    `deadline` is a time of `time.perf_counter`. Returns the trace with the lowest peak.
    """
    weights = random_factors(_NOISE if seed > 0 else 0.0, seed, wiring.value_count)
    best, since = now, 0
    while now.peak_bytes > target_bytes and since < _PATIENCE:
        lower = _lower(_Past(wiring, now, target_bytes, weights, quick=quick), deadline)
        if lower is None:
            break
        now, since = drop_dead_runs(wiring, lower), since + 1
        if now.peak_bytes < best.peak_bytes:
            best, since = now, 0
    return best


def give_up(wiring: Wiring, now: Trace, rng: np.random.Generator) -> Trace:
    """Give up an idle value at a high time step, both at random, rather large than small ones.

    All that is gone is made again before its next use, whatever the peak of that: for descents to
    begin with, where no small step leads. The same trace if nothing can be given up.
    """
    high = np.flatnonzero(now.during >= _HIGH * now.peak_bytes)
    copies, _, next_after = idle_copies(wiring, now, int(rng.choice(high)))
    if not len(copies):
        return now
    values = now.copy_value[copies]
    size = wiring.size[values].astype(np.float64)
    which = int(rng.choice(len(copies), p=size / size.sum()))
    position = min(int(next_after[which]), now.steps)
    closure = Closures(wiring, now).at(int(values[which]), position)
    if closure is None:
        return now
    sequence = np.insert(now.sequence, [position] * len(closure.ops), closure.ops)
    return drop_dead_runs(wiring, trace(wiring, sequence))


def _lower(past: _Past, deadline: float) -> Trace | None:
    """Find a trace of less excess at the highest time steps of some ops; `None` if none is."""
    now, target_bytes = past.now, past.target
    over = np.flatnonzero(now.during > target_bytes)
    over = over[np.argsort(-now.during[over], kind="stable")]
    _, first = np.unique(now.sequence[over], return_index=True)
    for position in over[np.sort(first)[: _QUICK_POSITIONS if past.quick else _POSITIONS]].tolist():
        if time.perf_counter() > deadline:
            break
        least, best = now.excess(target_bytes), None
        for sequence in _attempts(past, position, deadline):
            if time.perf_counter() > deadline:
                return best
            candidate = trace(past.wiring, sequence)
            if candidate.excess(target_bytes) < least:
                least, best = candidate.excess(target_bytes), candidate
        if best is not None:
            return best
    return None


def _attempts(past: _Past, position: int, deadline: float) -> Iterator[Ints]:
    """Yield sequences that hold less at a time step: replays one by one, then several at once."""
    ranked = past.replays(position, deadline)
    single = [ranked[i : i + 1] for i in range(min(3, len(ranked)))]
    several = [ranked[:count] for count in (2, 4, 8) if count <= len(ranked)]
    sequence = past.now.sequence
    for chosen in (*single, *several):
        for ordered in (False, True):
            where: list[int] = []
            what: list[int] = []
            for until, positions in chosen:
                ops = sequence[positions]
                again = (np.unique(ops) if ordered else ops).tolist()
                where += [until] * len(again)
                what += again
            if len(sequence) + len(what) <= _MOST_STEPS * past.wiring.op_count:
                yield np.insert(sequence, where, what)


class _Past:
    """A trace as a graph of copies: who read and made what, as lists for walks in Python."""

    def __init__(
        self, wiring: Wiring, now: Trace, target_bytes: int, weights: Floats, *, quick: bool
    ) -> None:
        self.wiring = wiring
        self.now = now
        self.target = target_bytes
        self.quick = quick
        self._weights = weights
        self._need: list[int] = while_running(wiring).tolist()
        self.size: list[int] = wiring.size.tolist()
        self._ops: list[int] = now.sequence.tolist()
        self._start: list[int] = now.copy_start.tolist()
        self._value: list[int] = now.copy_value.tolist()
        self._reads: list[int] = now.use_copy.tolist()
        steps = np.arange(now.steps + 1)
        self._read: list[int] = np.searchsorted(now.use_position, steps).tolist()

    def replays(self, position: int, deadline: float) -> list[Replay]:
        """List how to be without idle values at a time step, what seems to gain most first."""
        now, target = self.now, self.target
        copies, last_before, next_after = idle_copies(self.wiring, now, position)
        next_after = np.minimum(next_after, now.steps)
        values = now.copy_value[copies]
        size = self.wiring.size[values]
        excess = np.maximum(now.during - target, 0)
        over = np.concatenate([[0], np.cumsum(excess > 0)])
        covered = over[next_after] - over[last_before + 1]
        promise = np.minimum(size, excess[position]) * covered.astype(np.float64)
        promise *= self._weights[values]
        ranked = []
        for chosen in _groups(promise, next_after, _QUICK_VALUES if self.quick else _VALUES):
            if time.perf_counter() > deadline:
                break
            until = int(next_after[chosen[0]])
            during = now.during.copy()
            for i in chosen:
                during[last_before[i] + 1 : until] -= size[i]
            gain = float((excess - np.maximum(during - target, 0)).sum(dtype=np.float64))
            cost, positions = self._cut(copies[chosen].tolist(), until, during, gain)
            if cost < gain:
                weight = float(self._weights[values[chosen]].mean())
                ranked.append(((cost - gain) * weight, until, positions))
        ranked.sort(key=lambda one: one[0])
        return [(until, positions) for _, until, positions in ranked]

    def _cut(self, copies: list[int], until: int, during: Ints, gain: float) -> tuple[float, Ints]:
        """Find what to replay before a position to have copies again, and its cost in excess.

        Nodes are computations (their position) and the copies that these read (from `steps` on). A
        computation on the side of the source runs again, at the cost of its arc to the sink; the
        arc from a copy to its computation is cut where its life is extended instead.
        """
        steps = self.now.steps
        room = self.target - int(self.now.before[until])
        room += sum(self.size[self._value[copy]] for copy in copies)
        producing = sorted({self._start[copy] for copy in copies})
        source, sink = -1, -2
        arcs: list[tuple[int, int, float]] = [
            (source, position, math.inf) for position in producing
        ]
        longer = _Longer(self, until, during)
        seen, pending = set(producing), producing
        while pending:
            position = pending.pop()
            arcs.append((position, sink, self._again(position, room)))
            reads = self._reads[self._read[position] : self._read[position + 1]]
            for u in dict.fromkeys(reads):
                cost = longer.cost(self._value[u])
                if cost is None:
                    continue
                arcs.append((position, steps + u, math.inf))
                if steps + u in seen:
                    continue
                seen.add(steps + u)
                run = self._start[u]
                if len(seen) < _MOST_REPLAYED and self._again(run, room) < min(cost, gain):
                    arcs.append((steps + u, run, cost))
                    if run not in seen:
                        seen.add(run)
                        pending.append(run)
                else:
                    arcs.append((steps + u, sink, cost))
        flow, side = _least_cut(arcs, source, sink, gain)
        return flow, side[(side >= 0) & (side < steps)]

    def _again(self, position: int, room: int) -> float:
        """Count the excess of one more computation, and a share of the bytes under the target."""
        op = self._ops[position]
        if not self.wiring.replayable_list[op]:
            return math.inf
        need = self._need[op]
        return max(0, need - room) + _UNDER * need


def _groups(promise: Floats, until: Ints, most: int) -> Iterator[list[int]]:
    """Yield the most promising values one by one, and those together that are next used at once."""
    ranked = np.argsort(-promise, kind="stable")
    yield from ranked[:most, None].tolist()
    for position in np.unique(until).tolist():
        together = ranked[until[ranked] == position].tolist()
        if len(together) > 1:
            yield together


class _Longer:
    """What it costs if values live on until a position, given what is held without one of them."""

    def __init__(self, past: _Past, until: int, during: Ints) -> None:
        self._target = past.target
        self._until = until
        self._during = during
        self._size = past.size
        wiring, now = past.wiring, past.now
        wanted = wiring.producer * (now.steps + 1) + until
        rank = np.maximum(np.searchsorted(now.key, wanted) - 1, 0)
        self._end: list[int] = now.copy_end[now.first_copy[rank] + wiring.slot].tolist()
        most = np.maximum.accumulate(during[:until][::-1])[::-1]
        self._most: list[int] = most.tolist()
        self._costs: dict[int, float | None] = {}
        self._added: dict[int, list[float]] = {}

    def cost(self, v: int) -> float | None:
        """Sum the excess and a share of the bytes under the target; `None` if alive anyway."""
        if v not in self._costs:
            since, size = self._end[v], self._size[v]
            over = 0.0
            if since < self._until and self._most[since] + size > self._target:
                over = self._excess_of(size)[since]
            under = _UNDER * size * (self._until - since)
            self._costs[v] = None if since > self._until else over + under
        return self._costs[v]

    def _excess_of(self, size: int) -> list[float]:
        """Sum the excess that so many bytes add from each position on."""
        if size not in self._added:
            held = self._during[: self._until] - self._target
            more = np.maximum(held + size, 0) - np.maximum(held, 0)
            self._added[size] = np.cumsum(more[::-1], dtype=np.float64)[::-1].tolist()
        return self._added[size]


def _least_cut(
    arcs: list[tuple[int, int, float]], source: int, sink: int, most: float
) -> tuple[float, Ints]:
    """Find the least cut, all above `most` alike, and the nodes on the side of the source."""
    unit = max(most, 1.0) / _CAPACITY
    tails, heads, costs = zip(*arcs, strict=True)
    capacity = np.clip(np.array(costs) / unit, 1, 2 * _CAPACITY).astype(np.int32)
    if len(arcs) <= FEW_ARCS:
        value, nodes = least_cut(zip(tails, heads, capacity.tolist(), strict=True), source, sink)
        return value * unit, np.sort(np.array(nodes, dtype=np.int64))
    names, ends = np.unique(np.array([tails, heads]), return_inverse=True)
    ends = ends.reshape(2, -1)
    start, end = np.searchsorted(names, (source, sink)).tolist()
    graph = sparse.csr_matrix((capacity, ends.astype(np.int32)), shape=(len(names), len(names)))
    flow = maximum_flow(graph, start, end)
    left = graph - flow.flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    side = breadth_first_order(left, start, return_predecessors=False)
    reached: Ints = np.sort(names[side])
    return flow.flow_value * unit, reached
