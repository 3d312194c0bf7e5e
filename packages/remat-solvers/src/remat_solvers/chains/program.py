"""rotor's dynamic programme over (first stage, last stage, memory), and its least memory.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous chains"
(RR-9302; the slides are "rotor: Rematerializing Optimally with pyTORch"). With the input of stage s
stored and the stages beyond t done backward, the time to run s..t forward and backward within m is
the lesser of

    C1(s, t, m) = min over s < k <= t of  time of Fck(s) Fn(s+1) ... Fn(k-1)
                                          + C(k, t, m - |input of k|) + C(s, k-1, m)
    C2(s, t, m) = min over options o of
                  Fe_o(s) + C(s+1, t, m - |what Fe_o(s) recorded|) + B_o(s)

each where the most bytes held by its own runs are within m. m is what is left for everything but
the stored inputs and records around s..t. As what is held besides (gradients made so far, results)
depends on t alone, it is added to the needs and not to the state. rotor's one option is to store
all that the backward of a stage reads; rk-rotor (Zhao et al., ICML 2023) has one for each schedule
of the stage, and what its backward half computes again is in B_o.

Memory is counted in slots, sizes and needs rounded up, so a plan never needs more than the budget;
with as many slots as bytes nothing is lost. Complexity: O((stages^3 + stages^2 * options) * slots)
in numpy, 100 stages with 500 slots take about a second. `least_bytes` is the same recursion with
bytes for time: exact.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat_solvers.chains.costs import Record, Run, StageCosts
from remat_solvers.core.wiring import Floats, Ints

__all__ = ["fastest", "least_bytes"]

_RECORD = -1  # with the first option; -2 with the second, and so on


def fastest(
    costs: tuple[StageCosts, ...], budget_bytes: int, slots: int, deadline: float
) -> list[int] | None:
    """Find the fastest sequence of ops within the budget; `None` if there is none, or no time.

    `deadline` is a time of `time.perf_counter`.
    """
    table = _Table(costs, budget_bytes, min(slots, budget_bytes))
    if not table.fill(deadline) or not np.isfinite(table.time_of(0, len(costs) - 1, table.slots)):
        return None
    return table.sequence()


def least_bytes(costs: tuple[StageCosts, ...]) -> int:
    """Find the least budget with which the chain can be run, by rotor's moves, without rounding."""
    count = len(costs)
    needs = _Needs(costs)
    least = np.zeros((2, count, count), dtype=np.int64)
    stored = np.zeros((count, count), dtype=np.int64)  # [t, s]: with the input of s
    for length in range(count):
        for s in range(count - length):
            t = s + length
            for freeing in (False, True):
                need = min(
                    max(
                        needs.record(record, s, t, freeing=freeing),
                        needs.recorded(record, freeing=freeing)
                        + int(least[needs.frees_after(record), s + 1, t])
                        if s < t
                        else 0,
                    )
                    for record in costs[s].records
                )
                if s < t:
                    moves = np.maximum(needs.forward(s, t), stored[t, s + 1 : t + 1])
                    need = min(need, int(np.maximum(moves, least[int(freeing), s, s:t]).min()))
                least[int(freeing), s, t] = need
            stored[t, s] = need + (costs[s - 1].carried_bytes if s else 0)
    return int(least[1, 0, count - 1])


@dataclass(frozen=True, slots=True)
class _Needs:
    """Bytes and times of the moves, the bytes around the stages included.

    `freeing`: nothing but the backward of the stage s holds its input, which thus goes with it.
    """

    costs: tuple[StageCosts, ...]

    def first(self, t: int) -> int:
        """Index of the run: what comes before the last stage's backward is a first run."""
        return 0 if t == len(self.costs) - 1 else 1

    def frees_after(self, record: Record) -> int:
        """Say whether the next stage may free its input after a record of its producer."""
        return 0 if record.rereads else 1

    def recording(self, record: Record, s: int, t: int, *, freeing: bool) -> Run:
        """Choose the run of Fe."""
        again = self.first(t)
        runs = record.forward_freeing if freeing else record.forward
        return runs[2 if again and s == t else again]

    def record(self, record: Record, s: int, t: int, *, freeing: bool) -> int:
        """Bound the bytes while Fe(s) and B(s) run, the input of s not counted."""
        stage = self.costs[s]
        base = self.costs[t].base_bytes if self.first(t) else stage.base_first_bytes
        ahead = base + self.recording(record, s, t, freeing=freeing).peak_bytes
        if freeing:
            return max(0, max(ahead, record.backward_freeing.peak_bytes) - stage.input_bytes)
        return max(ahead, record.backward.peak_bytes)

    def recorded(self, record: Record, *, freeing: bool) -> int:
        """Count what Fe adds to what is held; below 0 where it frees more than it makes."""
        return record.recorded_bytes - (record.freed_bytes if freeing else 0)

    def freeing_matters(self, s: int) -> bool:
        """Say whether it is ever of use that stage s may free its input, and not always given."""
        if s == 0 or not any(record.rereads for record in self.costs[s - 1].records):
            return False
        size = self.costs[s].input_bytes
        return any(
            record.freed_bytes
            or record.backward_freeing.peak_bytes - size < record.backward.peak_bytes
            for record in self.costs[s].records
        )

    def forward(self, s: int, t: int) -> Ints:
        """Bound the bytes while s..k-1 run forward, for k from s + 1 to t."""
        again = self.first(t)
        peaks = [self.costs[s].keep[again].peak_bytes]
        peaks += [stage.forget[again].peak_bytes for stage in self.costs[s + 1 : t]]
        if again:
            around = [self.costs[t].base_bytes] * (t - s)
        else:
            around = [stage.base_first_bytes for stage in self.costs[s:t]]
        return np.maximum.accumulate(np.array(peaks, np.int64) + np.array(around, np.int64))

    def forward_time(self, s: int, t: int) -> Floats:
        """Add up the time of s..k-1, for k from s + 1 to t."""
        again = self.first(t)
        times = [stage.forget[again].time for stage in self.costs[s:t]]
        return np.cumsum(np.array(times, np.float64))


class _Table:
    """Least times by memory, in slots, and the moves that reach them.

    `left[f][s][t - s]` is C(s, t, .), with f = 1 where the stage may free its input; `after[t][s]`
    is the latter with the input of s to be stored too. Where freeing changes nothing, both are one.
    """

    def __init__(self, costs: tuple[StageCosts, ...], budget_bytes: int, slots: int) -> None:
        count = len(costs)
        self.slots = slots
        self._costs = costs
        self._needs = _Needs(costs)
        self._budget = budget_bytes
        freeing = [np.full((count - s, slots + 1), np.inf) for s in range(count)]
        moves = [np.full((count - s, slots + 1), _RECORD, np.int16) for s in range(count)]
        self._two = [self._needs.freeing_matters(s) for s in range(count)]
        self._left = (
            [freeing[s].copy() if two else freeing[s] for s, two in enumerate(self._two)],
            freeing,
        )
        self._move = (
            [moves[s].copy() if two else moves[s] for s, two in enumerate(self._two)],
            moves,
        )
        self._after = [np.full((t + 1, slots + 1), np.inf) for t in range(count)]

    def _in_slots(self, size_bytes: int) -> int:
        return max(-self.slots, min(-(-size_bytes * self.slots // self._budget), self.slots + 1))

    def time_of(self, s: int, t: int, slots: int) -> float:
        """Look up the least time."""
        return float(self._left[1][s][t - s, slots])

    def fill(self, deadline: float) -> bool:
        """Fill the table, short chains first; say whether there was time enough."""
        count = len(self._costs)
        for length in range(count):
            for s in range(count - length):
                if time.perf_counter() > deadline:
                    return False
                for freeing in (False, True) if self._two[s] else (True,):
                    self._fill_one(s, s + length, freeing=freeing)
        return True

    def _fill_one(self, s: int, t: int, *, freeing: bool) -> None:
        left, move = self._left[freeing][s], self._move[freeing][s][t - s]
        best = left[t - s]
        for option, record in enumerate(self._costs[s].records):
            times = self._recorded_times(record, s, t, freeing=freeing)
            move[times < best] = _RECORD - option
            best = np.minimum(best, times)
        if s < t:
            forward = self._needs.forward(s, t).tolist()
            needed = np.array([self._in_slots(need) for need in forward])
            total = self._after[t][s + 1 : t + 1] + left[: t - s]
            total += self._needs.forward_time(s, t)[:, None]
            total[np.arange(self.slots + 1) < needed[:, None]] = np.inf
            choice = total.argmin(axis=0)
            least = np.take_along_axis(total, choice[None], axis=0)[0]
            stored: NDArray[np.bool_] = least < best
            best = np.where(stored, least, best)
            move[stored] = choice[stored]
        left[t - s] = best
        if freeing:
            self._after[t][s] = self._shifted(best, self._stored(s))

    def _stored(self, s: int) -> int:
        return self._in_slots(self._costs[s - 1].carried_bytes) if s else 0

    def _shifted(self, times: Floats, by: int) -> Floats:
        """Read times with `by` slots less; more memory than there is counts as all there is."""
        shifted = np.full(self.slots + 1, np.inf if by > 0 else times[-1])
        if by > 0:
            shifted[by:] = times[: max(0, self.slots + 1 - by)]
        else:
            shifted[: self.slots + 1 + by] = times[-by:]
        return shifted

    def _recorded_times(self, record: Record, s: int, t: int, *, freeing: bool) -> Floats:
        needs = self._needs
        own = needs.recording(record, s, t, freeing=freeing).time + record.backward.time
        if s == t:
            times = np.full(self.slots + 1, own)
        else:
            size = self._in_slots(needs.recorded(record, freeing=freeing))
            rest = self._left[needs.frees_after(record)][s + 1][t - s - 1]
            times = own + self._shifted(rest, size)
        times[: self._in_slots(needs.record(record, s, t, freeing=freeing))] = np.inf
        return times

    def sequence(self) -> list[int]:
        """Follow the moves from the whole chain with the whole budget."""
        ops: list[int] = []
        start = (0, len(self._costs) - 1, self.slots, 1)
        waiting: list[Run | tuple[int, int, int, int]] = [start]
        while waiting:
            now = waiting.pop()
            if isinstance(now, Run):
                ops.extend(now.ops)
                continue
            s, t, slots, free = now
            again = self._needs.first(t)
            move = int(self._move[free][s][t - s, slots])
            if move <= _RECORD:
                record = self._costs[s].records[_RECORD - move]
                waiting.append(record.backward)
                if s < t:
                    size = self._in_slots(self._needs.recorded(record, freeing=bool(free)))
                    room = min(self.slots, slots - size)
                    waiting.append((s + 1, t, room, self._needs.frees_after(record)))
                waiting.append(self._needs.recording(record, s, t, freeing=bool(free)))
                continue
            middle = s + 1 + move
            waiting.append((s, middle - 1, slots, free))
            waiting.append((middle, t, slots - self._stored(middle), 1))
            waiting.extend(stage.forget[again] for stage in reversed(self._costs[s:middle]))
        return ops
