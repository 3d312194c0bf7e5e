"""Improve a schedule that fits: take some recomputations out, evict with other prices, prune.

A large-neighbourhood search on the tracer. A step frees a window of moments (or some at random) of
its recomputations, which makes the schedule faster and too large, and repairs it with noise in the
prices; what recomputes a little more than the best is not gone on with. The result is taken if it
is not slower. Where values have several makers, a step may also change the ways in which one group,
or all that are alike, run first. `away` makes another schedule of one in the same way, however much
slower. Deterministic for a seed and a number of steps.
"""

from __future__ import annotations

import time

import numpy as np

from remat_solvers.core.makers import Makers, least_time
from remat_solvers.core.trace import Trace, sequence_time
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.search.evict import EvictionPerturbation
from remat_solvers.search.repair import made_again, repaired, without_waste
from remat_solvers.search.ways import other_ways

__all__ = ["away", "local_search"]

_OTHER_WAYS = 0.3  # of the steps
_MOST_MORE = 1.2  # times what is recomputed, before it is pruned
_SHARES, _COUNTS = (0.05, 0.1, 0.2, 0.4), (5, 10, 20, 50, 100)  # of the recomputations: the fewer
_SCATTERED = 0.2  # of the steps

_MOST_AWAY = 3.0  # times what is recomputed
_STEPS_AWAY, _SECONDS_AWAY = 20, 2.0  # of local search, for every other schedule


def local_search(
    wiring: Wiring,
    incumbent: Trace,
    budget_bytes: int,
    *,
    seed: int,
    deadline: float,
    patience: int = 200,
) -> Trace:
    """Search until `deadline` of `time.perf_counter`, or for `patience` steps without a gain.

    The result fits and is never slower.
    """
    rng = np.random.default_rng(seed)
    makers = Makers.of(wiring)
    best, best_time = incumbent, sequence_time(wiring, incumbent.sequence)
    once = least_time(wiring)
    likely = wiring.time[wiring.producer]
    since = 0
    while since < patience and time.perf_counter() < deadline:
        since += 1
        positions = made_again(wiring, best)
        if not makers.plain and (not len(positions) or rng.random() < _OTHER_WAYS):
            freed = other_ways(wiring, makers, best, rng)
        elif len(positions):
            freed = without_waste(wiring, _thin(best, positions, rng))
        else:
            break
        found = repaired(
            wiring,
            freed,
            budget_bytes,
            perturbation=_prices(rng),
            most_time=once + _MOST_MORE * (best_time - once),
            likely=likely,
            quick=True,
            soon=deadline,
            deadline=deadline,
        )
        if found.peak_bytes > budget_bytes:
            continue
        found_time = sequence_time(wiring, found.sequence)
        if found_time < best_time:
            since = 0
        if found_time <= best_time:
            best, best_time = found, found_time
    return best


def away(
    wiring: Wiring,
    best: Trace,
    budget_bytes: int,
    share: float,
    *,
    rng: np.random.Generator,
    deadline: float,
) -> Trace | None:
    """Free a share of the recomputations and repair at other prices; half of the time, search on.

    `None` if that does not fit by `deadline`, a moment of `time.perf_counter`.
    """
    positions = made_again(wiring, best)
    if not len(positions):
        return None
    once = least_time(wiring)
    again = sequence_time(wiring, best.sequence) - once
    count = max(1, int(share * len(positions)))
    found = repaired(
        wiring,
        without_waste(wiring, _without(best, positions, count, rng)),
        budget_bytes,
        perturbation=_prices(rng),
        most_time=once + _MOST_AWAY * again,
        soon=deadline,
        deadline=deadline,
    )
    if found.peak_bytes > budget_bytes:
        return None
    if rng.random() < 0.5:
        return found
    return local_search(
        wiring,
        found,
        budget_bytes,
        seed=int(rng.integers(1 << 30)),
        deadline=min(deadline, time.perf_counter() + _SECONDS_AWAY),
        patience=_STEPS_AWAY,
    )


def _prices(rng: np.random.Generator) -> EvictionPerturbation:
    return EvictionPerturbation(
        cover=float(rng.choice([0.0, 0.5, 1.0])),
        crowding=float(rng.choice([0.5, 2.0, 8.0])),
        hold=float(rng.choice([0.0, 0.1, 0.2, 0.5])),
        noise=float(rng.choice([0.0, 0.1, 0.3])),
        seed=int(rng.integers(1 << 30)),
    )


def _thin(now: Trace, positions: Ints, rng: np.random.Generator) -> Ints:
    """Leave out some recomputations."""
    share = round(float(rng.choice(_SHARES)) * len(positions))
    return _without(now, positions, max(1, min(share, int(rng.choice(_COUNTS)))), rng)


def _without(now: Trace, positions: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Leave out so many recomputations: all of a stretch of the schedule, or some at random."""
    if rng.random() < _SCATTERED:
        gone = rng.choice(positions, size=count, replace=False)
    else:
        since = int(rng.integers(len(positions) - count + 1))
        gone = positions[since : since + count]
    return np.delete(now.sequence, gone)
