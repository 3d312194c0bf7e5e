"""A lower bound on every peak, by search backwards from what an op reads and from the end.

When an op runs for the first time, all it reads is alive; at the end, all results are. Which ops
ran, in what order, to make it so? Regression search goes back from there: one of the values that
must be alive was made last, by the last run of its op; right before, what that op reads was alive,
and all the others. Step by step this leads to a set of which nothing has to be alive, and the least
over all ways of the most that a way holds is a bound. What it sees and `bottleneck` does not
is the order in which several large things can be made, again and again down to the inputs.

Only large values count: smaller ones weigh nothing and are always there, which lowers the bound,
and makes the sets few. From the end all values count once, but only the last few runs are looked at
then. A set is passed over if a part of it was looked at: whatever makes it alive makes the part
alive. Two kinds of step are taken without a look at the others, if it holds no more than what is
proved already: one that adds nothing to the set; and one that does not make the set larger,
of an op that may run again, if nothing that it takes away is needed to make another of the set:
whatever made it earlier and held it could have held, instead, what it is made of (proof:
certified-bounds).
Guarantee: the bound holds for all schedules in the order of the graph; it is never below the one
given. Complexity: exponential in how many large values an op depends on at once, so the number of
sets is limited, and what was proved by then counts. Source: our own; regression in planning, and
minimax paths by Dijkstra's algorithm.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from remat_solvers.bounds.common_core import common_core
from remat_solvers.bounds.peak import PeakBound
from remat_solvers.core.wiring import Wiring

__all__ = ["regress"]

_SHARES = (0.08, 0.04, 0.02, 0.01, 0.005, 0.0025)  # of the bound, from which on a value is large
_MOST_LARGE = 2000
_MOST_BITS, _MOST_BITS_AT_END = 50_000_000, 5_000_000  # of all sets of one search
_MOST_CUT_SHORT = 2  # searches, until those from later ops are not tried: they are as hard

Set = int  # of large values, by bits


def regress(
    wiring: Wiring, floor: PeakBound, deadline: float = math.inf, *, enough_bytes: float = math.inf
) -> PeakBound:
    """Raise a lower bound on the peak, until it is above `enough_bytes` or `deadline`.

    `deadline` is a time of `time.perf_counter`; what was proved by then is returned. The op of
    the answer is the one that cannot run with less; `None` if it is the end that was looked at.
    """
    wiring = common_core(wiring)
    best, limits = floor, _Limits(deadline, enough_bytes)
    if not 0 < best.peak_bytes <= enough_bytes:
        return best
    largest = np.sort(np.argsort(-wiring.size, kind="stable")[:_MOST_LARGE])
    search = _Search(wiring, largest.tolist(), limits, _MOST_BITS_AT_END)
    peak_bytes = search.minimal_peak(search.results, best.peak_bytes)
    if peak_bytes > best.peak_bytes:
        best = PeakBound(peak_bytes, None)
    former = 0
    for share in _SHARES:
        large = np.flatnonzero(wiring.size >= share * best.peak_bytes)
        if limits.reached(best.peak_bytes):
            return best
        if len(large) == former or len(large) > _MOST_LARGE:
            continue
        former = len(large)
        search = _Search(wiring, large.tolist(), limits, _MOST_BITS)
        for op, wanted in search.goals():
            if limits.reached(best.peak_bytes) or search.cut_short == _MOST_CUT_SHORT:
                break
            peak_bytes = search.minimal_peak(wanted, best.peak_bytes)
            if peak_bytes > best.peak_bytes:
                best = PeakBound(peak_bytes, None if op is None else wiring.graph.ops[op].name)
    return best


class _Limits(NamedTuple):
    """When to stop: at a time of `time.perf_counter`, or above some bytes."""

    deadline: float
    enough_bytes: float

    def reached(self, peak_bytes: int) -> bool:
        return peak_bytes > self.enough_bytes or time.perf_counter() > self.deadline


class _Step(NamedTuple):
    """The run that completed a set: what was alive before it, and the bytes while it ran."""

    before: Set
    before_bytes: int
    peak_bytes: int


class _Search:
    """Ops with the large values that they read and make; remembers which sets can be made.

    `results` are the large results; `cut_short` counts the searches that ended without an answer.
    """

    def __init__(self, wiring: Wiring, large: list[int], limits: _Limits, most_bits: int) -> None:
        self._wiring = wiring
        self._limits = limits
        self._most_sets = most_bits // max(1, len(large))
        self._bit = {v: 1 << i for i, v in enumerate(large)}
        size = wiring.size.tolist()
        self._sizes = [size[v] for v in large]
        self._producers = [wiring.producer_list[v] for v in large]
        self._reads = [self._set(values) for values in wiring.inputs]
        self._makes = [self._set(values) for values in wiring.outputs]
        self._overwritten = [self._set(values) for values in wiring.overwritten]
        self._ancestors: list[Set] = []  # with all that these are made of in turn
        for producer in self._producers:
            ancestors = self._reads[producer]
            for i in _bits(self._reads[producer]):
                ancestors |= self._ancestors[i]
            self._ancestors.append(ancestors)
        self._reachable: set[Set] = {0}
        self.results = self._set(wiring.results.tolist())
        self.cut_short = 0

    def goals(self) -> Iterator[tuple[int | None, Set]]:
        """Yield the ops before which several large values must be alive, and these.

        In order; at last the end, as `None`, and the results.
        """
        wiring = self._wiring
        last = dict.fromkeys(wiring.results.tolist(), wiring.op_count)
        for op in range(wiring.op_count - 1, -1, -1):
            for v in wiring.inputs[op]:
                last.setdefault(v, op)
        ends: dict[int, Set] = {}
        pinned = 0  # cannot be made again, and is needed from here on
        for op in range(wiring.op_count):
            wanted = self._reads[op] | pinned
            if wanted & (wanted - 1):
                yield op, wanted
            pinned &= ~ends.pop(op, 0)
            if not wiring.replayable_list[op]:
                for v in wiring.outputs[op]:
                    if v in last and v in self._bit:
                        pinned |= self._bit[v]
                        ends[last[v]] = ends.get(last[v], 0) | self._bit[v]
        yield None, self.results

    def minimal_peak(self, wanted: Set, floor_bytes: int) -> int:
        """Bound the peak of what makes a set alive; of no interest below `floor_bytes`.

        Dijkstra's algorithm: open sets are taken in the order of the peak of the best way to them,
        then of how many values they are made of, then of their bytes.
        """
        peak_bytes = floor_bytes
        pending = [(peak_bytes, self._depth(wanted), self._size(wanted), wanted)]
        best: dict[Set, tuple[int, Set | None]] = {wanted: (peak_bytes, None)}
        seen = _Sets(len(self._sizes))
        while pending:
            way_bytes, _, _, now = heapq.heappop(pending)
            if way_bytes > best[now][0]:
                continue
            peak_bytes = way_bytes
            if now in self._reachable:
                way: Set | None = now
                while way is not None:
                    self._reachable.add(way)
                    way = best[way][1]
                return peak_bytes
            if len(best) > self._most_sets or self._limits.reached(peak_bytes):
                self.cut_short += 1
                return peak_bytes
            if seen.has_part_of(now):
                continue
            seen.add(now)
            for step in self._steps(now, peak_bytes):
                way_bytes = max(step.peak_bytes, peak_bytes)
                if step.before not in best or way_bytes < best[step.before][0]:
                    best[step.before] = (way_bytes, now)
                    depth = self._depth(step.before)
                    heapq.heappush(pending, (way_bytes, depth, step.before_bytes, step.before))
        raise AssertionError("what an op reads can be made")

    def _steps(self, now: Set, peak_bytes: int) -> list[_Step]:
        """List the runs that may have completed a set; a single one if no other does better."""
        wiring = self._wiring
        now_bytes = self._size(now)
        steps: list[_Step] = []
        for op in {self._producers[i] for i in _bits(now)}:
            outputs, new = self._makes[op], self._reads[op] & ~now
            others = now & ~outputs
            replayable = wiring.replayable_list[op]
            if not replayable and others and self._producers[others.bit_length() - 1] > op:
                continue  # it ran once, and what is of later ops was not there yet
            with_reads = now_bytes + self._size(new)
            besides = (new & ~self._overwritten[op]) | (outputs & ~now)
            step = _Step(
                before=others | self._reads[op],
                before_bytes=with_reads - self._size(outputs & now),
                peak_bytes=now_bytes + self._size(besides) + wiring.workspace_list[op],
            )
            if step.peak_bytes <= peak_bytes:
                no_larger = replayable and step.before_bytes <= now_bytes
                if not new or (no_larger and not self._depend_on(others, outputs)):
                    return [step]
            steps.append(step)
        return steps

    def _depend_on(self, values: Set, others: Set) -> bool:
        return any(self._ancestors[i] & others for i in _bits(values))

    def _depth(self, values: Set) -> int:
        """Count all values of which a set is made, down to the inputs, with its own."""
        ancestors = values
        for i in _bits(values):
            ancestors |= self._ancestors[i]
        return ancestors.bit_count()

    def _set(self, values: Sequence[int]) -> Set:
        bits = 0
        for v in values:
            bits |= self._bit.get(v, 0)
        return bits

    def _size(self, values: Set) -> int:
        return sum(self._sizes[i] for i in _bits(values))


class _Sets:
    """Sets as rows of 64-bit words, in which a part of another set is looked for."""

    def __init__(self, value_count: int) -> None:
        self._word_count = max(1, math.ceil(value_count / 64))
        self._rows = np.zeros((256, self._word_count), dtype=np.uint64)
        self._count = 0

    def add(self, values: Set) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self._count] = self._words(values)
        self._count += 1

    def has_part_of(self, values: Set) -> bool:
        """Say whether all of some set here is in another."""
        others = ~self._words(values)
        left = self._rows[: self._count]
        for word in range(self._word_count - 1, -1, -1):
            left = left[left[:, word] & others[word] == 0]
            if not len(left):
                return False
        return True

    def _words(self, values: Set) -> np.ndarray:
        return np.frombuffer(values.to_bytes(8 * self._word_count, "little"), dtype="<u8")


def _bits(values: Set) -> Iterator[int]:
    while values:
        lowest = values & -values
        yield lowest.bit_length() - 1
        values ^= lowest
