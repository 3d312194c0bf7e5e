"""A lower bound on every peak, by search backwards from what an op reads and from the end.

When an op runs for the first time, all it reads is alive; at the end, all results are. Which ops
ran, in what order, to make it so? Regression search goes back from there: one of the values that
must be alive was made last, by the last run of its op; right before, what that op reads was alive,
and all the others. Step by step this leads to a set of which nothing has to be alive, and the least
over all ways of the largest moment on a way is a bound. What it sees and `bottleneck` does not is
the order in which several large things can be made, again and again down to the inputs.

Only large values count: smaller ones weigh nothing and are always there, which lowers the bound,
and makes the sets few. From the end all values count, but only the last few runs are looked at. Two
kinds of step are taken without a look at the others: one that adds nothing to the set; and one that
does not make the set larger, if nothing of what it takes away is needed to make another of the set:
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

import numpy as np

from remat_solvers.least import Least
from remat_solvers.wiring import Wiring

__all__ = ["regress"]

_SHARES = (0.08, 0.04, 0.02)  # of the bound, from which on a value is large
_MOST_LARGE = 4000
_MOST_SETS, _MOST_SETS_AT_END = 50_000, 300  # from one op, and from the end, where sets are large
_MOST_CUT_SHORT = 2  # searches, until those from later ops are not tried: they are as hard

Set = int  # of large values, by bits


def regress(
    wiring: Wiring, floor: Least, deadline: float = math.inf, *, enough_bytes: float = math.inf
) -> Least:
    """Raise a lower bound on the peak, until it is above `enough_bytes` or `deadline`.

    `deadline` is a moment of `time.perf_counter`; what was proved by then is returned.
    """
    if not 0 < floor.peak_bytes <= enough_bytes:
        return floor
    best = floor
    largest = np.sort(np.argsort(-wiring.size, kind="stable")[:_MOST_LARGE])
    search = _Search(wiring, largest.tolist(), deadline)
    peak_bytes = search.least_peak(search.results, best.peak_bytes, _MOST_SETS_AT_END)
    if peak_bytes > best.peak_bytes:
        best = Least(peak_bytes, None)
    former = 0
    for share in _SHARES:
        large = np.flatnonzero(wiring.size >= share * best.peak_bytes)
        if len(large) == former or len(large) > _MOST_LARGE:
            continue
        former = len(large)
        search = _Search(wiring, large.tolist(), deadline)
        for op, wanted in search.goals():
            if time.perf_counter() > deadline or best.peak_bytes > enough_bytes:
                return best
            if search.cut_short == _MOST_CUT_SHORT:
                break
            peak_bytes = search.least_peak(wanted, best.peak_bytes, _MOST_SETS)
            if peak_bytes > best.peak_bytes:
                best = Least(peak_bytes, wiring.graph.ops[op].name)
    return best


class _Search:
    """Ops with the large values that they read and make; remembers which sets can be reached.

    `results` are the large results; `cut_short` counts the searches that ended without an answer.
    """

    def __init__(self, wiring: Wiring, large: list[int], deadline: float) -> None:
        self._wiring = wiring
        self._deadline = deadline
        self._bit = {v: 1 << i for i, v in enumerate(large)}
        size = wiring.size.tolist()
        self._sizes = [size[v] for v in large]
        self._makers = [wiring.producer_list[v] for v in large]
        self._reads = [self._set(values) for values in wiring.inputs]
        self._makes = [self._set(values) for values in wiring.outputs]
        self._made_of: list[Set] = []  # with all that these are made of in turn
        for maker in self._makers:
            made_of = self._reads[maker]
            for i in _bits(self._reads[maker]):
                made_of |= self._made_of[i]
            self._made_of.append(made_of)
        self._reached: set[Set] = {0}
        self.results = self._set(wiring.results.tolist())
        self.cut_short = 0

    def goals(self) -> Iterator[tuple[int, Set]]:
        """Yield the ops before which several large values must be alive, in order, and these."""
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

    def least_peak(self, wanted: Set, floor_bytes: int, most: int) -> int:
        """Bound the peak of what makes a set alive; of no interest below `floor_bytes`.

        The open sets, at most `most`, are taken in the order of the peak of the best way to them.
        """
        peak = floor_bytes
        pending = [(peak, self._size(wanted), wanted)]
        before: dict[Set, Set | None] = {wanted: None}
        for _ in range(most):
            if not pending:
                return peak  # cannot be: what an op reads can be made
            reached, _, now = heapq.heappop(pending)
            peak = max(peak, reached)
            if now in self._reached:
                way: Set | None = now
                while way is not None:
                    self._reached.add(way)
                    way = before[way]
                return peak
            if time.perf_counter() > self._deadline:
                return peak
            for need, size, earlier in self._steps(now, peak):
                if earlier not in before:
                    before[earlier] = now
                    heapq.heappush(pending, (max(need, peak), size, earlier))
        self.cut_short += 1
        return peak

    def _steps(self, now: Set, peak: int) -> list[tuple[int, int, Set]]:
        """List which sets may have been alive before a run that completed this one.

        Each with the bytes alive during that run and before it; a single one if it is as good as
        any other at `peak`.
        """
        wiring = self._wiring
        total = self._size(now)
        found: list[tuple[int, int, Set]] = []
        for op in {self._makers[i] for i in _bits(now)}:
            made, new = self._makes[op], self._reads[op] & ~now
            others = now & ~made
            replayable = wiring.replayable_list[op]
            if not replayable and any(self._makers[i] > op for i in _bits(others)):
                continue
            new_bytes = self._size(new)
            need = total + new_bytes + self._size(made & ~now) + wiring.workspace_list[op]
            size = total + new_bytes - self._size(made & now)
            step = (need, size, others | self._reads[op])
            as_small = replayable and size <= total
            if need <= peak and (not new or (as_small and not self._needs(others, made))):
                return [step]
            found.append(step)
        return found

    def _needs(self, values: Set, others: Set) -> bool:
        return any(self._made_of[i] & others for i in _bits(values))

    def _set(self, values: Sequence[int]) -> Set:
        found = 0
        for v in values:
            found |= self._bit.get(v, 0)
        return found

    def _size(self, values: Set) -> int:
        return sum(self._sizes[i] for i in _bits(values))


def _bits(values: Set) -> Iterator[int]:
    while values:
        lowest = values & -values
        yield lowest.bit_length() - 1
        values ^= lowest
