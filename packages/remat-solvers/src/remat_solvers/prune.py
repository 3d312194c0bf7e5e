"""Take out recomputations that a budget does not need, dearest first.

Without a recomputation the copy made before lives on until the later uses; it may go if the memory
in between allows. What nothing reads any more goes with it. Repeated until nothing changes.
Guarantee: never slower, never above the larger of the budget and the former peak.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from remat_solvers.trace import Trace, trace
from remat_solvers.wiring import Ints, Wiring

__all__ = ["drop_unused", "prune"]


def prune(wiring: Wiring, now: Trace, budget_bytes: int) -> Trace:
    """Remove what can be removed; a trace over budget is only rid of unused recomputations."""
    now = drop_unused(wiring, now)
    if now.peak_bytes > budget_bytes:
        return now
    while True:
        again = _removable(wiring, now, budget_bytes)
        if again is None:
            return now
        now = drop_unused(wiring, trace(wiring, np.delete(now.sequence, again)))


def drop_unused(wiring: Wiring, now: Trace) -> Trace:
    """Remove recomputations that nothing reads, and what only they read."""
    while True:
        used = np.zeros(len(now.copy_value), dtype=np.bool_)
        used[now.use_copy] = True
        rank = np.repeat(np.arange(now.steps), np.diff(now.first_copy))
        read = np.zeros(now.steps, dtype=np.bool_)
        read[rank[used]] = True
        idle = repeats(now) & ~read
        if not idle.any():
            return now
        gone = now.key[idle] % (now.steps + 1)
        now = trace(wiring, np.delete(now.sequence, gone))


def repeats(now: Trace) -> NDArray[np.bool_]:
    """Say of each computation, in the order of `key`, whether it is a recomputation."""
    ops = now.key // (now.steps + 1)
    return np.concatenate([[False], ops[1:] == ops[:-1]]) if now.steps else np.zeros(0, np.bool_)


def _removable(wiring: Wiring, now: Trace, budget_bytes: int) -> int | None:
    """Find the dearest recomputation without which the peak stays within the budget."""
    ranks = np.flatnonzero(repeats(now))
    ops, positions = np.divmod(now.key[ranks], now.steps + 1)
    for i in np.argsort(-wiring.time[ops], kind="stable").tolist():
        rank, start = int(ranks[i]), int(positions[i])
        if _fits_without(wiring, now, rank, start, budget_bytes):
            return start
    return None


def _fits_without(wiring: Wiring, now: Trace, rank: int, start: int, budget_bytes: int) -> bool:
    """Check the memory between the last use of the former copies and the recomputation."""
    first, former = int(now.first_copy[rank]), int(now.first_copy[rank - 1])
    lives: list[tuple[int, int]] = []
    for slot in range(int(now.first_copy[rank + 1]) - first):
        if now.copy_last[first + slot] > start:
            size = int(wiring.size[now.copy_value[first + slot]])
            lives.append((int(now.copy_last[former + slot]) + 1, size))
    if len(lives) == 1:
        since, size = lives[0]
        return since >= start or int(now.during[since:start].max()) + size <= budget_bytes
    since = min((moment for moment, _ in lives), default=start)
    more: Ints = np.array(now.during[since:start])
    for moment, size in lives:
        more[moment - since :] += size
    return not len(more) or int(more.max()) <= budget_bytes
