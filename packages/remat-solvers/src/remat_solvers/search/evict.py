"""Bring a sequence of computations within a budget: evict by price, some values at a time.

At the time step of the peak, of the values that are alive but idle, the one is evicted whose
recomputation just before its next use costs least time per byte freed. The closure of what is no
longer alive at that use is recomputed with it; what is small beside the value, or cannot be made
again, is held until then. Dearer: recomputations that would themselves be over budget. Cheaper:
lives that cover more time steps over budget.
Guarantee: none; a heuristic of ours (decision 0035). Complexity: a trace per eviction, or
per handful of them on graphs of more than 500 ops, so that the number of traces does not grow.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Floats, Ints, Wiring
from remat_solvers.search.perturbations import EVICTION_PERTURBATIONS, EvictionPerturbation

__all__ = ["evict", "idle_copies", "idle_values", "lowered"]

_NEVER = int(np.iinfo(np.int64).max)
_OPS_PER_EVICTION = 500
_FAR = 2.0  # times where a walk ended, that having a value again likely takes


def evict(
    wiring: Wiring,
    sequence: Ints,
    budget_bytes: int,
    *,
    perturbation: EvictionPerturbation = EVICTION_PERTURBATIONS[0],
    most_time: float = math.inf,
    patience: int | None = None,
    likely: Floats | None = None,
    deadline: float = math.inf,
) -> Trace:
    """Evict until the peak is within the budget or nothing helps; the caller looks at the peak.

    Nothing helps after `patience` steps without a gain, or beyond `most_time` of the sequence;
    `deadline` is a time of `time.perf_counter`. Returns the trace with the lowest peak. `likely`
    are the seconds that each value may take to have again, by which the search for the cheapest
    goes; it is kept up to date, for calls with sequences that are much the same.
    """
    weights = perturbation.weights(wiring.value_count)
    likely = wiring.time[wiring.producer] if likely is None else likely

    def step(now: Trace) -> Ints | None:
        choices = _cheapest(wiring, now, budget_bytes, perturbation, weights, likely, deadline)
        if not choices:
            return None
        where = [q for q, closure in choices for _ in closure]
        what = [op for _, closure in choices for op in closure]
        return np.insert(now.sequence, where, what)

    return lowered(wiring, sequence, budget_bytes, step, most_time=most_time, patience=patience)


def lowered(
    wiring: Wiring,
    sequence: Ints,
    budget_bytes: int,
    step: Callable[[Trace], Ints | None],
    *,
    most_time: float = math.inf,
    patience: int | None = None,
) -> Trace:
    """Change a sequence step by step, until it fits, no step is left, or they gain nothing.

    Or until it takes longer than `most_time`. Returns the trace with the lowest peak.
    """
    now = best = trace(wiring, sequence)
    least_excess, since = now.excess(budget_bytes), 0
    if patience is None:
        patience = 40 + wiring.op_count // 20
    while now.peak_bytes > budget_bytes and since < patience:
        if wiring.time[now.sequence].sum() > most_time:
            break
        changed = step(now)
        if changed is None:
            break
        now = trace(wiring, changed)
        left = now.excess(budget_bytes)
        since += 1
        if left < least_excess:
            least_excess, since = left, 0
        if now.peak_bytes < best.peak_bytes:
            best = now
    return best


def _cheapest(
    wiring: Wiring,
    now: Trace,
    budget_bytes: int,
    perturbation: EvictionPerturbation,
    weights: list[float],
    likely: Floats,
    deadline: float,
) -> list[tuple[int, list[int]]]:
    """Choose the evictions of least price at the peak: where to recompute, and what.

    None once the deadline is over: the price of one alone can take a walk over the whole graph. The
    likely cheapest come first, for a walk ends where it gets dearer than what is known.
    """
    over = now.peak_bytes - budget_bytes
    idle = idle_values(
        wiring, now, budget_bytes, perturbation.cover, likely, wiring.time[wiring.producer]
    )
    closures = Closures(wiring, now)
    at_once = 1 + wiring.op_count // _OPS_PER_EVICTION
    best: list[tuple[float, int, list[int], int]] = []
    worst = math.inf  # the price of the last of `at_once`
    for v, size, _, q, worth, least, free in idle:
        weight, gain = weights[v], min(size, over) * worth
        if least * weight >= worst:
            continue
        op = wiring.producer_list[v]
        crowd = wiring.output_bytes[op] + wiring.workspace_list[op] - free
        if least * weight * perturbation.dearer(crowd, over) >= worst:
            continue
        if time.perf_counter() > deadline:
            return []
        most = worst * gain / weight
        needed = closures.at(v, q, perturbation.hold, most, free, perturbation.crowding / over)
        likely[v] = max(likely[v], _FAR * most) if needed is None else needed.seconds
        if needed is None or needed.held_bytes >= size:
            continue
        freed = size - needed.held_bytes
        price = needed.seconds * min(size, over) / (gain * min(freed, over)) * weight
        price *= perturbation.dearer(needed.new_bytes + needed.held_bytes - free, over)
        if price < worst:
            insort(best, (price, q, needed.ops, freed))
            del best[at_once:]
            worst = best[-1][0] if len(best) == at_once else math.inf
    chosen: list[tuple[int, list[int]]] = []
    freed = 0
    for _, q, closure, gained in best:
        if freed >= over:
            break
        chosen.append((q, closure))
        freed += gained
    return chosen


def idle_copies(wiring: Wiring, now: Trace, position: int) -> tuple[Ints, Ints, Ints]:
    """Find the copies alive but unused at a time step: copy, last use before, next use after.

    Copies that must not be made again are left out.
    """
    alive = (now.copy_start < position) & (now.copy_last > position)
    since, until = np.searchsorted(now.use_position, [position, position + 1])
    alive[now.use_copy[since:until]] = False
    alive &= wiring.replayable[wiring.producer[now.copy_value]]
    alive &= wiring.size[now.copy_value] > 0
    copies = np.flatnonzero(alive)
    last_before = now.copy_start.copy()
    next_after = np.full(len(alive), _NEVER)
    np.maximum.at(last_before, now.use_copy[:since], now.use_position[:since])
    np.minimum.at(next_after, now.use_copy[until:], now.use_position[until:])
    return copies, last_before[copies], next_after[copies]


def idle_values(
    wiring: Wiring, now: Trace, budget_bytes: int, cover: float, likely: Floats, least: Floats
) -> Iterator[tuple[int, int, int, int, float, float, int]]:
    """List the values that are alive but idle at the peak, the likely cheapest to evict first.

    Of each its size, its last use before and its next use after, what a byte of it is worth (the
    power `cover` of the share of the time steps over budget that it covers), a lower bound on its
    price, and the bytes that are free for making it again. `likely` and `least` are the seconds,
    of each value, that this may take and takes at least.
    """
    peak = int(now.during.argmax())
    copies, since, until = idle_copies(wiring, now, peak)
    values = now.copy_value[copies]
    sizes = wiring.size[values]
    crowded = np.concatenate([[0], np.cumsum(now.during > budget_bytes)])
    covered = crowded[until] - crowded[since + 1]
    worth = (np.maximum(covered, 1) / max(int(crowded[-1]), 1)) ** cover
    gains = np.minimum(sizes, int(now.during[peak]) - budget_bytes) * worth
    order = np.argsort(likely[values] / gains, kind="stable")
    room = budget_bytes + sizes - now.before[until]
    columns = (values, sizes, since, until, worth, least[values] / gains, room)
    return zip(*(column[order].tolist() for column in columns), strict=True)


@dataclass(frozen=True, slots=True)
class Closure:
    """Ops to run, their time, their outputs and workspace, and what is held for them until then."""

    ops: list[int]
    seconds: float
    new_bytes: int
    held_bytes: int


class Closures:
    """What must be recomputed to have a value at a position of one trace, which runs every op."""

    __slots__ = ("_end", "_first", "_key", "_latest", "_size", "_until", "_width", "_wiring")

    def __init__(self, wiring: Wiring, now: Trace) -> None:
        self._wiring = wiring
        self._width = now.steps + 1
        latest = np.searchsorted(now.key, np.arange(1, wiring.op_count + 1) * self._width) - 1
        self._size: list[int] = wiring.size.tolist()
        self._latest: list[int] = (now.key[latest] % self._width).tolist()
        ends = now.copy_last[now.first_copy[latest][wiring.producer] + wiring.slot]
        self._until: list[int] = ends.tolist()
        self._key: list[int] = now.key.tolist()
        self._first: list[int] = now.first_copy.tolist()
        self._end: list[int] = now.copy_last.tolist()

    def at(
        self,
        v: int,
        position: int,
        hold: float = 0.0,
        most: float = math.inf,
        room: float = math.inf,
        dear: float = 0.0,
    ) -> Closure | None:
        """Find what to run before `position` to have a value; `None` above `most` seconds.

        What cannot be made again, or is up to a share `hold` of the value, is held until then. Each
        byte beyond `room` that is made makes the seconds dearer by a share `dear`.
        """
        wiring, width = self._wiring, self._width
        inputs, producer, slot = wiring.inputs, wiring.producer_list, wiring.slot_list
        size, latest, until = self._size, self._latest, self._until
        key, first, end = self._key, self._first, self._end
        times, replayable, outputs = wiring.time_list, wiring.replayable_list, wiring.output_bytes
        small = hold * size[v]
        wanted = [producer[v]]
        chosen = {producer[v]}
        held: set[int] = set()
        cost, new_bytes = times[producer[v]], outputs[producer[v]]
        while wanted:
            for u in inputs[wanted.pop()]:
                op = producer[u]
                if op in chosen:
                    continue
                if latest[op] < position:
                    last = until[u]
                else:  # it runs again later: what counts is its run before
                    last = end[first[bisect_left(key, op * width + position) - 1] + slot[u]]
                if last >= position:
                    continue
                if not replayable[op] or size[u] <= small:
                    held.add(u)
                    continue
                cost += times[op]
                new_bytes += outputs[op]
                if cost > most or (
                    new_bytes > room and cost * (1 + dear * (new_bytes - room)) > most
                ):
                    return None
                chosen.add(op)
                wanted.append(op)
        ops = sorted(chosen)
        new_bytes += max(wiring.workspace_list[op] for op in ops)
        return Closure(
            ops, cost, new_bytes, sum(size[u] for u in held if producer[u] not in chosen)
        )
