"""Take out recomputations that a budget does not need, dearest first.

Without a recomputation the copy made before lives on until the later uses; it may go if the memory
in between allows. What nothing reads any more goes with it. Repeated until nothing changes.
Guarantee: never slower, never above the larger of the budget and the former peak. Complexity: a
trace per removal, or per handful of them on graphs of more than 500 ops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from remat_solvers.core.dead_runs import drop_dead_runs, repeats
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Ints, Wiring

__all__ = ["prune"]

_OPS_PER_REMOVAL = 500


def prune(wiring: Wiring, now: Trace, budget_bytes: int, *, deadline: float = math.inf) -> Trace:
    """Remove what can be removed; a trace over budget is only rid of unused recomputations.

    `deadline` is a time of `time.perf_counter`; what was removed by then is gone.
    """
    now = drop_dead_runs(wiring, now)
    if now.peak_bytes > budget_bytes:
        return now
    while time.perf_counter() < deadline:
        gone = _removable(wiring, now, budget_bytes)
        if not gone:
            return now
        now = drop_dead_runs(wiring, now, gone)
    return now


def _removable(wiring: Wiring, now: Trace, budget_bytes: int) -> list[int]:
    """Choose recomputations, dearest first, without which the peak stays within the budget.

    One, and one more for every 500 ops: what taking one out frees is only seen afterwards. Of two
    in a row of one op, at most one is chosen; what the chosen ones read is counted as if they still
    did, so that the memory is never more than assumed.
    """
    ranks = _removable_alone(wiring, now, budget_bytes)
    ops, positions = np.divmod(now.key[ranks], now.steps + 1)
    during = now.during.copy()
    touched: set[int] = set()
    gone: list[int] = []
    for i in np.argsort(-wiring.time[ops], kind="stable").tolist():
        rank, start = int(ranks[i]), int(positions[i])
        if rank in touched:
            continue
        longer = _longer(wiring, now, rank, start)
        if not gone or all(budget_bytes >= most for most in _with(during, longer, start)):
            for since, size in longer:
                during[since:start] += size
            touched.update((rank - 1, rank, rank + 1))
            gone.append(start)
        if len(gone) > wiring.op_count // _OPS_PER_REMOVAL:
            break
    return gone


def _removable_alone(wiring: Wiring, now: Trace, budget_bytes: int) -> Ints:
    """Find the recomputations of which each alone may go; ranks in the order of `key`."""
    again = repeats(now)
    outs = np.diff(now.first_copy)
    rank = np.repeat(np.arange(now.steps), outs)
    copies = np.flatnonzero(again[rank])
    rank = rank[copies]
    since = now.copy_end[copies - outs[rank]]  # of the copy made before
    start = now.copy_start[copies]
    lives = (now.copy_last[copies] > start) & (since < start)
    rank, since, start = rank[lives], since[lives], start[lives]
    size = wiring.size[now.copy_value[copies[lives]]]
    order = np.lexsort((since, rank))
    rank, since, start, size = rank[order], since[order], start[order], size[order]
    more = np.cumsum(size)
    more -= (more - size)[np.searchsorted(rank, rank)]
    until = np.where(np.append(rank[1:] == rank[:-1], False), np.append(since[1:], 0), start)
    over = _most(now.during, since, until) + more > budget_bytes
    again[rank[over & (since < until)]] = False
    return np.flatnonzero(again)


def _most(during: Ints, since: Ints, until: Ints) -> Ints:
    """Find the most in each stretch `since:until`, with a table of all spans of powers of two."""
    level = np.frexp(np.maximum(until - since, 1))[1] - 1
    highest = np.zeros(len(since), dtype=np.int64)
    most = during
    for power in range(int(level.max(initial=0)) + 1):
        here = level == power
        highest[here] = np.maximum(most[since[here]], most[until[here] - (1 << power)])
        most = np.maximum(most[: -1 << power], most[1 << power :])
    return highest


def _longer(wiring: Wiring, now: Trace, rank: int, start: int) -> list[tuple[int, int]]:
    """List what lives on until `start` without a recomputation: since when, and its size."""
    first, former = int(now.first_copy[rank]), int(now.first_copy[rank - 1])
    return [
        (int(now.copy_end[former + slot]), int(wiring.size[now.copy_value[first + slot]]))
        for slot in range(int(now.first_copy[rank + 1]) - first)
        if now.copy_last[first + slot] > start
    ]


def _with(during: Ints, longer: list[tuple[int, int]], start: int) -> Iterator[int]:
    """Yield the most that is held, stretch by stretch, if the given sizes are added."""
    more = 0
    ordered = sorted(longer)
    for (since, size), (until, _) in zip(ordered, [*ordered[1:], (start, 0)], strict=True):
        more += size
        if since < min(until, start):
            yield int(during[since : min(until, start)].max()) + more
