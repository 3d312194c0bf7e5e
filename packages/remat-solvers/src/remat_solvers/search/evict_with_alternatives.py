"""Bring a sequence within a budget where there are alternatives: evict by the cheapest.

As `evict`: at the time step of the peak, of what is alive but idle, that is evicted which costs
least time per byte freed. It is made again just before its next use by whichever of its
implementations, with all that this one needs, is cheapest; what packs it runs right after its last
use, and what is packed weighs against what is freed. Or the op that runs at the peak gives way to
others that make the same and need less. Complexity: a trace per eviction, and for each a walk over
what can be evicted.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.search.evict import idle_values, lowered
from remat_solvers.search.perturbations import EVICTION_PERTURBATIONS, EvictionPerturbation

__all__ = ["evict_with_alternatives"]

_INSTANT = 1e-9  # of the time of all ops: what a change costs at least, so that gains count


@dataclass(frozen=True, slots=True)
class _Way:
    """What to run before a position, and right after another; seconds, and bytes held between.

    Each op stands once, where it was first asked for.
    """

    ops: dict[int, None] = field(default_factory=dict)
    packs: dict[int, None] = field(default_factory=dict)
    seconds: float = 0.0
    held: int = 0

    def __add__(self, other: _Way) -> _Way:
        return _Way(
            self.ops | other.ops,
            self.packs | other.packs,
            self.seconds + other.seconds,
            self.held + other.held,
        )


def evict_with_alternatives(
    wiring: Wiring,
    alternatives: Alternatives,
    sequence: Ints,
    budget_bytes: int,
    *,
    perturbation: EvictionPerturbation = EVICTION_PERTURBATIONS[0],
    most_time: float = math.inf,
    deadline: float = math.inf,
) -> Trace:
    """Evict until the peak is within the budget or nothing helps; the caller looks at the peak.

    Nor does anything beyond `most_time` of the sequence; `deadline` is a time of
    `time.perf_counter`. Returns the trace with the lowest peak.
    """
    weights = perturbation.weights(wiring.value_count)
    evictor = _Evictor(wiring, alternatives, budget_bytes, perturbation, weights)

    def step(now: Trace) -> Ints | None:
        return evictor.step(now) if time.perf_counter() < deadline else None

    return lowered(wiring, sequence, budget_bytes, step, most_time=most_time)


class _Evictor:
    """Chooses one change after another."""

    def __init__(
        self,
        wiring: Wiring,
        alternatives: Alternatives,
        budget_bytes: int,
        perturbation: EvictionPerturbation,
        weights: list[float],
    ) -> None:
        self._wiring, self._alternatives = wiring, alternatives
        self._budget_bytes = budget_bytes
        self._perturbation, self._weights = perturbation, weights
        self._makes: list[list[int]] = [[op] for op in wiring.producer_list]
        for v, op in zip(
            alternatives.more_value.tolist(), alternatives.more_op.tolist(), strict=True
        ):
            self._makes[v].append(op)
        for row in self._makes:
            row[:] = [op for op in row if wiring.replayable_list[op]]
        graph = wiring.graph
        self._after = [[graph.op_index[name] for name in op.order_after] for op in graph.ops]
        times = wiring.time_list
        self._least = np.array([min((times[op] for op in row), default=0.0) for row in self._makes])
        self._instant = _INSTANT * math.fsum(times)
        self._small = 0.0

    def step(self, now: Trace) -> Ints | None:
        """Return the sequence after the cheapest change at the peak; `None` if there is none."""
        peak = int(now.during.argmax())
        best, changed = self._eviction(now, peak)
        for price, sequence in self._other_ways(now, peak):
            if price < best:
                best, changed = price, sequence
        return changed

    def _eviction(self, now: Trace, peak: int) -> tuple[float, Ints | None]:
        wiring, perturbation = self._wiring, self._perturbation
        over = int(now.during[peak]) - self._budget_bytes
        best: tuple[float, Ints | None] = (math.inf, None)
        lives = _Lives(wiring, now)
        for v, size, since, q, factor, least, free in idle_values(
            wiring, now, self._budget_bytes, perturbation.cover, self._least, self._least
        ):
            weight = self._weights[v]
            if least * weight >= best[0]:
                if perturbation.noise == 0:
                    break
                continue
            most = best[0] * min(size, over) * factor / weight
            for way in self._ways(lives, v, since, q, most):
                freed = min(size - way.held, over)
                if freed <= 0:
                    continue
                dearer = perturbation.dearer(self._need(way.ops) - free, over)
                price = max(way.seconds, self._instant) / (freed * factor) * weight * dearer
                if price < best[0]:
                    where = [since + 1] * len(way.packs) + [q] * len(way.ops)
                    best = price, np.insert(now.sequence, where, (*way.packs, *way.ops))
        return best

    def _need(self, ops: Collection[int]) -> int:
        wiring = self._wiring
        outputs = sum(wiring.output_bytes[op] for op in ops)
        return outputs + max((wiring.workspace_list[op] for op in ops), default=0)

    def _ways(self, lives: _Lives, v: int, since: int, q: int, most: float) -> Iterator[_Way]:
        """List the ways to have a value again at `q`, if it ends at `since`."""
        ways: dict[int, _Way | None] = {v: None}
        self._small = self._perturbation.hold * float(self._wiring.size[v])
        for op in self._makes[v]:
            way = self._by(lives, op, since, q, ways, most)
            if way is not None:
                yield way

    def _by(
        self,
        lives: _Lives,
        op: int,
        since: int,
        q: int,
        ways: dict[int, _Way | None],
        most: float,
    ) -> _Way | None:
        """Find a way to run an op at `q`, of at most so many seconds.

        `ways` are the ways to have what is not there; `None` where there is none, or not yet.
        """
        if not all(lives.done_before(earlier, q) for earlier in self._after[op]):
            return None
        own = self._wiring.time_list[op]
        way = _Way()
        for u in self._wiring.inputs[op]:
            if u not in ways and lives.alive(u, q):
                continue
            if u not in ways:
                ways[u] = None
                ways[u] = self._have(lives, u, since, q, ways, most - own - way.seconds)
            needed = ways[u]
            if needed is None or needed.seconds + way.seconds + own > most:
                return None
            way += needed
        return way + _Way({op: None}, {}, own, 0)

    def _have(
        self,
        lives: _Lives,
        u: int,
        since: int,
        q: int,
        ways: dict[int, _Way | None],
        most: float,
    ) -> _Way | None:
        """Find the cheapest way to have a value at `q` that is not there.

        What is small, or cannot be made again, is kept longer.
        """
        wiring = self._wiring
        if self._alternatives.optional_value[u]:
            size = int(wiring.size[u])
            if lives.existed(u, q):
                return _Way(held=size)
            op = wiring.producer_list[u]
            if not wiring.replayable_list[op]:
                return None
            if not all(lives.done_before(earlier, since + 1) for earlier in self._after[op]):
                return None
            if all(lives.just_used(w, since) for w in wiring.inputs[op]):
                return _Way({}, {op: None}, wiring.time_list[op], size)
            return None
        if not lives.existed(u, q):
            return None
        if not self._makes[u] or wiring.size[u] <= self._small:
            return _Way(held=int(wiring.size[u]))
        best = None
        for op in self._makes[u]:
            way = self._by(lives, op, since, q, ways, most)
            if way is not None:
                best, most = way, way.seconds
        return best

    def _other_ways(self, now: Trace, peak: int) -> Iterator[tuple[float, Ints]]:
        """Let others of the group take the place of the op that runs at the peak."""
        wiring, alternatives = self._wiring, self._alternatives
        op = int(now.sequence[peak])
        if alternatives.optional[op] or not alternatives.chosen[op]:
            return
        lives = _Lives(wiring, now)
        over = int(now.during[peak]) - self._budget_bytes
        outputs = set(wiring.outputs[op])
        members = [p for p in alternatives.members(int(alternatives.group[op])).tolist() if p != op]
        parts = [p for p in members if set(wiring.outputs[p]) < outputs]
        wholes = [[p] for p in members if set(wiring.outputs[p]) >= outputs]
        for ops in (*wholes, parts):
            if set().union(*(wiring.outputs[p] for p in ops)) < outputs:
                continue
            together: _Way | None = _Way()
            for p in ops:
                way = self._by(lives, p, peak, peak, {}, math.inf)
                together = None if way is None or together is None else together + way
            if together is None or together.packs or together.held:
                continue
            need = max(self._alone(p) for p in ops)
            freed = min(self._alone(op) - need, over)
            if freed > 0:
                seconds = together.seconds - wiring.time_list[op]
                sequence = np.insert(
                    np.delete(now.sequence, peak), [peak] * len(together.ops), [*together.ops]
                )
                yield max(seconds, self._instant) / freed, sequence

    def _alone(self, op: int) -> int:
        """Sum what an op needs while it runs, but for what it reads."""
        wiring = self._wiring
        over = sum(int(wiring.size[v]) for v in wiring.overwritten[op])
        return wiring.output_bytes[op] + wiring.workspace_list[op] - over


class _Lives:
    """Whether a value is there at a position of a trace."""

    def __init__(self, wiring: Wiring, now: Trace) -> None:
        order = np.lexsort((now.copy_start, now.copy_value))
        self._starts = np.searchsorted(
            now.copy_value[order], np.arange(wiring.value_count + 1)
        ).tolist()
        self._start: list[int] = now.copy_start[order].tolist()
        self._last: list[int] = now.copy_last[order].tolist()
        self._outputs, self._sequence = wiring.outputs, now.sequence

    def done_before(self, op: int, position: int) -> bool:
        """Say whether an op, or others that make the same, ran before a position."""
        outputs = self._outputs[op]
        if outputs:
            return all(self.existed(v, position) for v in outputs)
        return bool(np.any(self._sequence[:position] == op))

    def existed(self, v: int, position: int) -> bool:
        """Say whether a value was made before a position."""
        return self._latest(v, position) is not None

    def alive(self, v: int, position: int) -> bool:
        """Say whether the latest copy made before a position is still there."""
        at = self._latest(v, position)
        return at is not None and self._last[at] >= position

    def just_used(self, v: int, position: int) -> bool:
        """Say whether a copy made up to a position is still there."""
        at = self._latest(v, position + 1)
        return at is not None and self._last[at] >= position

    def _latest(self, v: int, position: int) -> int | None:
        since, until = self._starts[v], self._starts[v + 1]
        at = bisect_left(self._start, position, since, until) - 1
        return at if at >= since else None
