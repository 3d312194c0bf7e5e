"""Schedules to begin with, found without a program, so that there are some before the first bound.

In turn: the given schedule as it is; that one and storing everything, each repaired by eviction and
then rid of what the budget does not need; and while nothing fits, running the ops within the budget
in one pass, repairing storing everything in other ways, and a descent to the budget by all that
looks for the minimal peak. A given schedule that does not first compute all ops in the order of the
graph is left out.

Guarantee: every sequence is legal in the order of the graph; some may be over the budget. The given
one comes even without time. Complexity: that of `evict`, `prune` and `one_pass`, each attempt for
at most a third of what is left of the share of the time, and of the descent, which takes the rest.
Source: as `refine` begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from remat_graph import Schedule
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Ints, Wiring, in_order
from remat_solvers.search.descent import descend_to
from remat_solvers.search.evict import evict
from remat_solvers.search.local_search import local_search
from remat_solvers.search.one_pass import evict_in_one_pass
from remat_solvers.search.perturbations import (
    EVICTION_PERTURBATIONS,
    ONE_PASS_PERTURBATIONS,
    EvictionPerturbation,
)
from remat_solvers.search.prune import prune

__all__ = ["starts"]

_SHARE = 0.1
_LEAST_SECONDS = 0.5  # or a third of the time, if that is less
_ATTEMPT_SHARE = 1 / 3


def starts(
    wiring: Wiring, budget_bytes: int, start: Schedule | None, deadline: float
) -> Iterator[Trace]:
    """Yield schedules that may fit, for a small share of the time until `deadline`.

    `deadline` is a time of `time.perf_counter`.
    """
    now = time.perf_counter()
    left = deadline - now
    until = now + max(_SHARE * left, min(_LEAST_SECONDS, left / 3))
    fits = False
    for schedule in _always(wiring, budget_bytes, start, until):
        fits |= schedule.peak_bytes <= budget_bytes
        yield schedule
    if fits:
        return
    for schedule in _at_need(wiring, budget_bytes, until):
        yield schedule
        if schedule.peak_bytes <= budget_bytes or time.perf_counter() >= until:
            return


def _always(
    wiring: Wiring, budget_bytes: int, start: Schedule | None, until: float
) -> Iterator[Trace]:
    sequence = None if start is None else in_order(wiring, start)
    if sequence is not None:
        yield trace(wiring, sequence)
        yield _repaired(wiring, sequence, budget_bytes, EVICTION_PERTURBATIONS[0], until)
    yield _repaired(
        wiring, np.arange(wiring.op_count), budget_bytes, EVICTION_PERTURBATIONS[0], until
    )


def _at_need(wiring: Wiring, budget_bytes: int, until: float) -> Iterator[Trace]:
    for eviction, other in zip(EVICTION_PERTURBATIONS[1:], ONE_PASS_PERTURBATIONS, strict=True):
        sequence = evict_in_one_pass(
            wiring, budget_bytes, perturbation=other, deadline=_soon(until)
        )
        if sequence is not None:
            yield prune(wiring, trace(wiring, sequence), budget_bytes, deadline=until)
        yield _repaired(wiring, np.arange(wiring.op_count), budget_bytes, eviction, until)
    yield _descended(wiring, budget_bytes, until)


def _descended(wiring: Wiring, budget_bytes: int, until: float) -> Trace:
    """Descend to the budget whatever the time, then search locally: what is found so is slow."""
    now = time.perf_counter()
    low = descend_to(wiring, budget_bytes, now + (until - now) / 2)
    low = prune(wiring, low, budget_bytes, deadline=until)
    if low.peak_bytes > budget_bytes:
        return low
    return local_search(wiring, low, budget_bytes, seed=1, deadline=until)


def _repaired(
    wiring: Wiring, start: Ints, budget_bytes: int, perturbation: EvictionPerturbation, until: float
) -> Trace:
    evicted = evict(wiring, start, budget_bytes, perturbation=perturbation, deadline=_soon(until))
    return prune(wiring, evicted, budget_bytes, deadline=until)


def _soon(until: float) -> float:
    now = time.perf_counter()
    return now + _ATTEMPT_SHARE * (until - now)
