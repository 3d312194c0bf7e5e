"""The smallest budget for which a schedule is found, and the proof below which there is none.

Evicts at budgets halved between the proved least and the best found so far, then at some shares of
the best; the peak that an attempt reaches counts even where it misses its budget.
Guarantee: `peak_bytes` is that of a legal schedule, `least_bytes` is proved; between them nothing
is known. Complexity: about a dozen repairs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from remat_graph import Graph, Schedule
from remat_solvers.evict import Taste, evict
from remat_solvers.least import least
from remat_solvers.problem import Limit
from remat_solvers.prune import drop_unused
from remat_solvers.trace import Trace, trace
from remat_solvers.wiring import Wiring, expand

__all__ = ["SmallestBudget", "smallest_budget", "smallest_trace"]

_TASTES = (Taste(), Taste(crowding=8.0), Taste(cover=0.0, crowding=0.5))
_DEFAULT_SECONDS = 10.0
_CLOSE = 1.02
_SHARES = (0.98, 0.94, 0.88, 0.8)


@dataclass(frozen=True, slots=True)
class SmallestBudget:
    """A schedule of small peak; none at all goes below `least_bytes`, reached at op `least_at`."""

    peak_bytes: int
    schedule: Schedule
    least_bytes: int
    least_at: str | None


def smallest_budget(graph: Graph, *, limit_seconds: float | None = None) -> SmallestBudget:
    """Look for the schedule of least peak, whatever its time.

    Raises:
        InvalidProblem: if the limit is negative.
    """
    wiring = Wiring.of(graph)
    limit = Limit.starting_now(limit_seconds)
    found = smallest_trace(wiring, limit.started + limit.left(_DEFAULT_SECONDS))
    floor = least(wiring)
    return SmallestBudget(
        peak_bytes=found.peak_bytes,
        schedule=expand(wiring, found.sequence),
        least_bytes=floor.peak_bytes,
        least_at=floor.op,
    )


def smallest_trace(wiring: Wiring, deadline: float) -> Trace:
    """Halve, then lower the target from the best found until nothing helps, or `deadline`."""
    best = trace(wiring, np.arange(wiring.op_count))
    low = floor = least(wiring).peak_bytes
    while best.peak_bytes > low * _CLOSE and time.perf_counter() < deadline:
        middle = (low + best.peak_bytes) // 2
        best = _lower(wiring, best, middle, deadline)
        if best.peak_bytes > middle:
            low = max(middle, low + 1)
    improved = True
    while improved and time.perf_counter() < deadline:
        former = best.peak_bytes
        for share in _SHARES:
            best = _lower(wiring, best, max(floor, int(share * best.peak_bytes)), deadline)
        improved = best.peak_bytes < former
    return best


def _lower(wiring: Wiring, best: Trace, target_bytes: int, deadline: float) -> Trace:
    """Evict from storing everything, by every taste until one reaches the target."""
    for taste in _TASTES:
        if best.peak_bytes <= target_bytes or time.perf_counter() >= deadline:
            break
        found = evict(
            wiring, np.arange(wiring.op_count), target_bytes, taste=taste, deadline=deadline
        )
        found = drop_unused(wiring, found)
        if found.peak_bytes < best.peak_bytes:
            best = found
    return best
