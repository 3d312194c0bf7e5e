"""Improve a schedule that fits: take some recomputations out, evict with other prices, prune.

A large-neighbourhood search on the tracer. A step frees a window of time steps (or some at random)
of its recomputations, which makes the schedule faster and too large, and repairs it with noise in
the prices; what recomputes a little more than the best is not gone on with. The result is taken if
it is not slower. Where values have several implementations, a step may also change the ways in
which one group, or all that are alike, run first. When nothing comes of many steps,
`restarted_search` begins again further away: a large part of the recomputations is freed and
repaired at other prices, whatever that takes. Deterministic for a seed and a number of steps.
"""

from __future__ import annotations

import time

import numpy as np

from remat_solvers.core.alternatives import Alternatives, least_time
from remat_solvers.core.dead_runs import drop_dead_runs
from remat_solvers.core.trace import Trace, sequence_time
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.search.perturbations import EvictionPerturbation
from remat_solvers.search.repair import recomputations, repaired
from remat_solvers.search.swap_alternatives import swap_alternatives

__all__ = ["local_search", "restarted_search"]

_OTHER_WAYS = 0.3  # of the steps
_MOST_MORE = 1.2  # times what is recomputed, before it is pruned
_SHARES, _COUNTS = (0.05, 0.1, 0.2, 0.4), (5, 10, 20, 50, 100)  # of the recomputations: the fewer
_SCATTERED = 0.2  # of the steps

_RESTARTS = 24  # without a gain
_PATIENCE_AGAIN = 60  # steps
_FREED_AGAIN = (0.3, 0.5, 0.7)  # of the recomputations
_MOST_AGAIN = 3.0  # times what is recomputed


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
    alternatives = Alternatives.of(wiring)
    best, best_time = incumbent, sequence_time(wiring, incumbent.sequence)
    once = least_time(wiring)
    likely = wiring.time[wiring.producer]
    since = 0
    while since < patience and time.perf_counter() < deadline:
        since += 1
        positions = recomputations(wiring, best)
        if not alternatives.plain and (not len(positions) or rng.random() < _OTHER_WAYS):
            freed = swap_alternatives(wiring, alternatives, best, rng)
        elif len(positions):
            freed = drop_dead_runs(wiring, best, _some_of(positions, rng))
        else:
            break
        candidate = repaired(
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
        if candidate.peak_bytes > budget_bytes:
            continue
        candidate_time = sequence_time(wiring, candidate.sequence)
        if candidate_time < best_time:
            since = 0
        if candidate_time <= best_time:
            best, best_time = candidate, candidate_time
    return best


def restarted_search(
    wiring: Wiring, incumbent: Trace, budget_bytes: int, *, seed: int, deadline: float
) -> Trace:
    """Search around a schedule, then around others that are made of the best, until `deadline`.

    Or until nothing came of many. The result fits and is never slower.
    """
    rng = np.random.default_rng(seed)
    best = local_search(wiring, incumbent, budget_bytes, seed=seed, deadline=deadline)
    best_time = sequence_time(wiring, best.sequence)
    once = least_time(wiring)
    since = 0
    while since < _RESTARTS and time.perf_counter() < deadline:
        since += 1
        positions = recomputations(wiring, best)
        if not len(positions):
            break
        count = max(1, int(float(rng.choice(_FREED_AGAIN)) * len(positions)))
        start = repaired(
            wiring,
            drop_dead_runs(wiring, best, _chosen(positions, count, rng)),
            budget_bytes,
            perturbation=_prices(rng),
            most_time=once + _MOST_AGAIN * (best_time - once),
            soon=deadline,
            deadline=deadline,
        )
        if start.peak_bytes > budget_bytes:
            continue
        candidate = local_search(
            wiring,
            start,
            budget_bytes,
            seed=int(rng.integers(1 << 30)),
            deadline=deadline,
            patience=_PATIENCE_AGAIN,
        )
        candidate_time = sequence_time(wiring, candidate.sequence)
        if candidate_time < best_time:
            best, best_time, since = candidate, candidate_time, 0
    return best


def _prices(rng: np.random.Generator) -> EvictionPerturbation:
    return EvictionPerturbation(
        cover=float(rng.choice([0.0, 0.5, 1.0])),
        crowding=float(rng.choice([0.5, 2.0, 8.0])),
        hold=float(rng.choice([0.0, 0.1, 0.2, 0.5])),
        noise=float(rng.choice([0.0, 0.1, 0.3])),
        seed=int(rng.integers(1 << 30)),
    )


def _some_of(positions: Ints, rng: np.random.Generator) -> Ints:
    """Choose some recomputations to leave out."""
    share = round(float(rng.choice(_SHARES)) * len(positions))
    return _chosen(positions, max(1, min(share, int(rng.choice(_COUNTS)))), rng)


def _chosen(positions: Ints, count: int, rng: np.random.Generator) -> Ints:
    """Choose so many recomputations: all of a stretch of the schedule, or some at random."""
    if rng.random() < _SCATTERED:
        return rng.choice(positions, size=count, replace=False)
    since = int(rng.integers(len(positions) - count + 1))
    return positions[since : since + count]
