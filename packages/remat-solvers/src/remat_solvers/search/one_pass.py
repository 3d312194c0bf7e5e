"""Run the ops in order within a budget in one pass: evict when an op needs room, as DTR does.

When an op needs room, the value that is cheapest to lose is dropped; when it reads what was
dropped, that is computed again first, and what it needs before it. The price of a value is the time
to make it again (with all that is gone of its ancestors) per byte, less the longer it stays unread;
what a `plan` does not keep is cheap. What cannot be made again is dear, and not overwritten, while
something made of it may be made again. Unlike `evict`, which repairs a schedule at its peak, this
never goes over the budget, so that it finds schedules where little fits.
Guarantee: the sequence is legal and its peak is within the budget; `None` proves nothing. Source:
the idea of dynamic tensor rematerialization (Kirisame et al. 2021), with the future known.
Complexity: about (steps + evictions) * (log values + ancestors that are gone).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable

import numpy as np

from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.search.perturbations import ONE_PASS_PERTURBATIONS, OnePassPerturbation

__all__ = ["evict_in_one_pass"]

_MOST_STEPS = 30  # per op of the graph, in all
_MOST_AT_ONCE = 3  # per op of the graph, for one first computation; more is thrashing


def evict_in_one_pass(
    wiring: Wiring,
    budget_bytes: int,
    *,
    perturbation: OnePassPerturbation = ONE_PASS_PERTURBATIONS[0],
    plan: Callable[[int, int], bool] | None = None,
    deadline: float = math.inf,
) -> Ints | None:
    """Find a sequence within the budget, or `None`.

    `plan(op, value)` says whether the value, not read before it, is worth keeping while first
    computations have come to `op`. `deadline` is a time of `time.perf_counter`.
    """
    walk = _OnePass(wiring, budget_bytes, perturbation, plan, deadline)
    for op in range(wiring.op_count):
        walk.now = op
        if not walk.bring(op):
            return None
    walk.now = wiring.op_count
    for v in wiring.results.tolist():
        walk.pinned[v] += 1
    for v in wiring.results.tolist():
        if not walk.alive[v] and not walk.bring(wiring.producer_list[v]):
            return None
    return np.array(walk.sequence, dtype=np.int64)


class _OnePass:
    """What is alive, and the values in the order of their prices, some of them out of date."""

    def __init__(
        self,
        wiring: Wiring,
        budget_bytes: int,
        perturbation: OnePassPerturbation,
        plan: Callable[[int, int], bool] | None,
        deadline: float,
    ) -> None:
        self.wiring = wiring
        self._deadline = deadline
        self._count = wiring.op_count
        self.sequence: list[int] = []
        self.now = 0
        self.pinned = [0] * wiring.value_count
        self.alive = [False] * wiring.value_count
        self._room = budget_bytes
        self._all = float(wiring.time.sum())
        self._perturbation = perturbation
        self._plan = plan
        self._size: list[int] = wiring.size.tolist()
        self._weight = perturbation.weights(wiring.value_count)
        self._reads: list[list[int]] = [[] for _ in range(wiring.value_count)]
        self._results = frozenset(wiring.results.tolist())
        for v in self._results:
            self._reads[v].append(wiring.op_count)
        for op in range(wiring.op_count - 1, -1, -1):
            for v in wiring.inputs[op]:
                self._reads[v].append(op)  # the next read is the last of the list
        self._of_use = _of_use(wiring) if perturbation.hold else [-1] * wiring.value_count
        self._wanted = [-1] * wiring.value_count  # the first need to make again what is gone
        self._until = [-1] * wiring.value_count  # the last one
        self._heap: list[tuple[float, int]] = []
        self._queued = [False] * wiring.value_count
        self._parked: set[int] = set()  # pinned, and in the heap at price 0 once they are not

    def bring(self, op: int) -> bool:
        """Compute an op, before it what it reads and is gone; say whether that succeeded."""
        inputs, pinned, alive = self.wiring.inputs, self.pinned, self.alive
        pending = [op]
        count = self._count
        most = min(len(self.sequence) + _MOST_AT_ONCE * count, _MOST_STEPS * count) + 1000
        for v in inputs[op]:
            pinned[v] += 1
        while pending:
            top = pending[-1]
            missing = [v for v in inputs[top] if not alive[v]]
            if missing:
                producers = {self.wiring.producer_list[v] for v in missing}
                producer = (
                    max(producers, key=self._closure) if len(producers) > 1 else producers.pop()
                )
                if not self.wiring.replayable_list[producer]:
                    return False
                pending.append(producer)
                for v in inputs[producer]:
                    pinned[v] += 1
                continue
            if not self._compute(top):
                return False
            pending.pop()
            self._unpin(inputs[top])
            if len(self.sequence) > most or self._late():
                return False
        return True

    def _compute(self, op: int) -> bool:
        outputs, alive = self.wiring.outputs[op], self.alive
        fresh = [v for v in outputs if not alive[v]]
        new_bytes = sum(self._size[v] for v in fresh)
        for v in outputs:
            self.pinned[v] += 1
        ending = [v for v in self.wiring.overwritten[op] if self._ends(v, op)]
        ending_bytes = sum(self._size[v] for v in ending)
        there = self._make_room(new_bytes - ending_bytes + self.wiring.workspace_list[op], op)
        self._unpin(outputs)
        if not there:
            return False
        self.sequence.append(op)
        self._room -= new_bytes
        for v in fresh:
            alive[v] = True
        for v in ending:
            self._drop(v)
        for v in (*outputs, *self.wiring.inputs[op]):
            self._push(v)
        return True

    def _ends(self, value: int, op: int) -> bool:
        """Say whether nothing needs a value after a run of an op that reads it."""
        if self.pinned[value] > 1 or self._of_use[value] > self.now or value in self._results:
            return False
        self._next(value)
        own = int(op == self.now)
        return (
            len(self._reads[value]) <= own
            and max(self._wanted[value], self._until[value]) < self.now + own
        )

    def _make_room(self, wanted: int, op: int) -> bool:
        """Drop values, cheapest first, until there is room; at need what waits for other ops."""
        aside: list[int] = []
        while self._room < wanted and self._heap and not self._late():
            price, v = heapq.heappop(self._heap)
            self._queued[v] = False
            if not self.alive[v]:
                continue
            if self.pinned[v]:
                self._queued[v] = True
                self._parked.add(v)
                continue
            true_price = self._price(v, deep=self._perturbation.deep)
            if true_price == math.inf:
                aside.append(v)
            elif true_price > price * 1.001 and true_price > self._lowest(price, v):
                self._push(v, true_price)
            else:
                self._drop(v)
        if self._room < wanted:
            needed = {*self.wiring.inputs[op], *self.wiring.outputs[op]}
            if self.now == self._count:
                needed.update(self.wiring.results.tolist())
            others = [v for v in (*aside, *self._parked) if v not in needed]
            for v in self._cheapest(others, wanted - self._room):
                self._drop(v)
                self._unpark(v)
        for v in aside:
            self._push(v)
        return self._room >= wanted

    def _cheapest(self, values: list[int], wanted: int) -> list[int]:
        """Choose values by price until they free enough, or none can be made again.

        The ancestors of a value are walked once its price without them is the least.
        """
        queue = [(self._price(v, deep=False), False, v) for v in values if not self._late()]
        heapq.heapify(queue)
        chosen: list[int] = []
        while queue and wanted > 0 and not self._late():
            price, final, v = heapq.heappop(queue)
            if price == math.inf:
                break
            if not final:
                heapq.heappush(queue, (self._price(v, deep=self._perturbation.deep), True, v))
                continue
            chosen.append(v)
            wanted -= self._size[v]
        return chosen

    def _lowest(self, price: float, value: int) -> float:
        """Find the least price in the heap after that of a value; what is parked has price 0."""
        least = self._heap[0][0] if self._heap else math.inf
        if least > 0 == price and self._parked and max(self._parked) > value:
            return 0.0
        return least

    def _unpin(self, values: tuple[int, ...]) -> None:
        for v in values:
            self.pinned[v] -= 1
            if not self.pinned[v]:
                self._unpark(v)

    def _unpark(self, value: int) -> None:
        if value in self._parked:
            self._parked.remove(value)
            heapq.heappush(self._heap, (0.0, value))

    def _late(self) -> bool:
        return time.perf_counter() > self._deadline

    def _drop(self, value: int) -> None:
        self.alive[value] = False
        self._room += self._size[value]
        until = self._next(value)
        if until > self._count:
            return
        pending = [value]
        while pending:
            for u in self.wiring.inputs[self.wiring.producer_list[pending.pop()]]:
                earlier = self._wanted[u] < self.now or until < self._wanted[u]
                if earlier:
                    self._wanted[u] = until
                if until > self._until[u]:
                    self._until[u] = until
                elif not earlier:
                    continue
                if not self.alive[u]:
                    pending.append(u)

    def _push(self, value: int, price: float = 0.0) -> None:
        if not self._queued[value]:
            self._queued[value] = True
            heapq.heappush(self._heap, (price, value))

    def _next(self, value: int) -> int:
        """Find the next read, by a first computation or to make again what is gone."""
        reads = self._reads[value]
        while reads and reads[-1] < self.now:
            reads.pop()
        direct = reads[-1] if reads else self._count + 1
        for wanted in (self._wanted[value], self._until[value]):
            if wanted >= self.now:
                return min(direct, wanted)
        return direct

    def _price(self, value: int, *, deep: bool) -> float:
        size = self._size[value]
        until = self._next(value)
        producer = self.wiring.producer_list[value]
        if until > self._count:
            return self._all / max(size, 1) if self._of_use[value] >= self.now else 0.0
        if size == 0:
            return math.inf
        if deep:
            cost = self._closure(producer)
        elif self.wiring.replayable_list[producer]:
            cost = self.wiring.time_list[producer]
        else:
            return math.inf
        span = (until - self.now + 1) / self._count
        price: float = (cost + 1e-12) / size / span**self._perturbation.span * self._weight[value]
        if self._plan is not None and not self._plan(self.now, value):
            price *= 1e-3
        return price

    def _closure(self, op: int) -> float:
        """Sum the time to compute an op again, with all of its ancestors that are gone."""
        inputs, producer_of, alive = self.wiring.inputs, self.wiring.producer_list, self.alive
        times, replayable = self.wiring.time_list, self.wiring.replayable_list
        if not replayable[op]:
            return math.inf
        cost, pending, seen = times[op], [op], {op}
        while pending:
            for u in inputs[pending.pop()]:
                if not alive[u]:
                    producer = producer_of[u]
                    if producer not in seen:
                        if not replayable[producer]:
                            return math.inf
                        seen.add(producer)
                        cost += times[producer]
                        pending.append(producer)
        return cost


def _of_use(wiring: Wiring) -> list[int]:
    """Find until when a value that cannot be made again is of use to make others again; else -1.

    The last first computation that reads something made of it by ops that may run again.
    """
    last = [-1] * wiring.value_count
    for v in wiring.results.tolist():
        last[v] = wiring.op_count
    for op in range(wiring.op_count - 1, -1, -1):
        until_use = -1
        if wiring.replayable_list[op]:
            until_use = max((last[v] for v in wiring.outputs[op]), default=-1)
        for v in wiring.inputs[op]:
            last[v] = max(last[v], until_use, op)
    once = [not wiring.replayable_list[op] for op in wiring.producer_list]
    return [until if alone else -1 for until, alone in zip(last, once, strict=True)]
