"""The schedule of minimal peak, whatever its time, looked for in single steps.

Budgets are halved between what is proved and the best found: at each, the best schedule is repaired
(`evict`), the ops are run in one pass (`one_pass`), and storing everything is repaired. The peak
that an attempt reaches counts even where it misses. From the best, storing everything, and the best
with something given up at a high time step or with a part of it run again, `replay` then descends
in small steps, with several seeds: slower far from the minimal peak, better near it.
Guarantee: what is found is legal; nothing is proved. Complexity: some dozens of attempts, each
limited in time.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.alternatives import Alternatives, store_all_sequence
from remat_solvers.core.dead_runs import drop_dead_runs
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.search.evict import evict
from remat_solvers.search.one_pass import evict_in_one_pass
from remat_solvers.search.perturbations import LOW_PEAK_PERTURBATIONS, ONE_PASS_PERTURBATIONS
from remat_solvers.search.replay import give_up, replay
from remat_solvers.search.selection import arrange, first_choices
from remat_solvers.search.unfolding import unfold

__all__ = [
    "CLOSE",
    "descend",
    "descend_to",
    "equally_long",
    "minimal_peak_trace",
]

_ATTEMPT_SECONDS = 0.5
CLOSE = 1.02  # times what is proved: near enough
_DONE = 1.002
_SHARES = (0.98, 0.94, 0.88, 0.995)
_SEEDS, _PATIENCE = 12, 4  # the second: without a gain
_HALVING_SHARE = 0.4  # of the time, and more the more ops there are
_GOAL = 0.99  # of a budget that is to be met
_LARGE = 30_000  # ops, of which a descent in small steps would see too little


def minimal_peak_trace(wiring: Wiring, deadline: float, *, floor_bytes: int = 0) -> Trace:
    """Look for the minimal peak until `deadline`, of `time.perf_counter`.

    `floor_bytes` is a peak below which it is known that there is nothing. Where there are
    alternatives, some choices of implementations are tried in turn.
    """
    if not wiring.graph.has_alternatives:
        return _descended(wiring, deadline, floor_bytes)
    alternatives = Alternatives.of(wiring)
    stored = [
        arrange(wiring, alternatives, choice) for choice in first_choices(wiring, alternatives)
    ]
    best = trace(wiring, store_all_sequence(wiring))
    left = [start for start in stored if start is not None]
    for at, start in enumerate(left):
        now = time.perf_counter()
        until = now + (deadline - now) / (len(left) - at)
        unfolded = unfold(wiring, start)
        lowest = _descended(unfolded.wiring, until, floor_bytes)
        best = min(best, unfolded.fold(lowest), key=lambda now: now.peak_bytes)
    return best


def equally_long(wiring: Wiring) -> Wiring:
    """Count all ops alike: measured times, which vary, have no part in what can be reached."""
    ones = np.ones(wiring.op_count)
    return dataclasses.replace(wiring, time=ones, time_list=tuple(ones.tolist()))


def _descended(wiring: Wiring, deadline: float, floor_bytes: int) -> Trace:
    """Halve, then descend from several starts and with several seeds."""
    wiring = equally_long(wiring)
    best = trace(wiring, np.arange(wiring.op_count))
    low = floor = max(floor_bytes, peak_bound(wiring).peak_bytes)
    now = time.perf_counter()
    soon = now + min(1.0, _HALVING_SHARE + wiring.op_count / _LARGE) * (deadline - now)
    while best.peak_bytes > low * CLOSE and time.perf_counter() < soon:
        middle = (low + best.peak_bytes) // 2
        best = _lower(wiring, best, middle, soon)
        if best.peak_bytes > middle:
            low = max(middle, low + 1)
    since = 0
    for seed in range(_SEEDS):
        if since == _PATIENCE:
            break
        since += 1
        for start in _STARTS:
            if best.peak_bytes <= floor * _DONE or time.perf_counter() >= deadline:
                return best
            begin = start(wiring, best, seed)
            if begin is best and start is not _same:
                continue
            lower = descend(wiring, begin, floor, seed, deadline)
            if lower.peak_bytes < best.peak_bytes:
                best, since = lower, 0
    return best


def descend_to(wiring: Wiring, budget_bytes: int, deadline: float) -> Trace:
    """Look for a schedule within a budget, whatever its time; it may be over it."""
    return minimal_peak_trace(wiring, deadline, floor_bytes=int(_GOAL * budget_bytes))


def _same(_: Wiring, best: Trace, __: int) -> Trace:
    return best


def _without_one(wiring: Wiring, best: Trace, which: int) -> Trace:
    """Give up a value where much is held; no small step does if making it anew needs much."""
    return give_up(wiring, best, np.random.default_rng(which))


def _everything(wiring: Wiring, _: Trace, __: int) -> Trace:
    return trace(wiring, np.arange(wiring.op_count))


def _again_at_the_end(wiring: Wiring, best: Trace, which: int) -> Trace:
    """Run again at the end what comes before a peak: no result made there is kept then."""
    highest = np.argsort(-best.during, kind="stable")
    _, first = np.unique(best.sequence[highest], return_index=True)
    position = int(highest[np.sort(first)[which % len(first)]])
    again = best.sequence[:position]
    again = again[wiring.replayable[again]]
    return drop_dead_runs(wiring, trace(wiring, np.concatenate([best.sequence, again])))


_STARTS = (_same, _without_one, _everything, _again_at_the_end)


def descend(wiring: Wiring, now: Trace, floor: int, seed: int, deadline: float) -> Trace:
    """Replay at targets that are shares of the peak, until none of them helps."""
    helped = True
    while helped and now.peak_bytes > floor:
        former = now.peak_bytes
        for share in _SHARES:
            if time.perf_counter() >= deadline:
                return now
            target = max(floor, int(share * former))
            now = replay(wiring, now, target, seed=seed, deadline=deadline)
            if now.peak_bytes < former:
                break
        helped = now.peak_bytes < former
    return now


def _lower(wiring: Wiring, best: Trace, target_bytes: int, deadline: float) -> Trace:
    """Try in turn to reach the target: repair the best, run in one pass, repair storing all."""
    everything = np.arange(wiring.op_count)
    for attempt in range(2 * len(LOW_PEAK_PERTURBATIONS) + 1):
        now = time.perf_counter()
        if best.peak_bytes <= target_bytes or now >= deadline:
            break
        soon = min(deadline, now + max(_ATTEMPT_SECONDS, (deadline - now) / 30))
        which, one_pass = divmod(attempt, 2)
        if one_pass:
            sequence = evict_in_one_pass(
                wiring, target_bytes, perturbation=ONE_PASS_PERTURBATIONS[which], deadline=soon
            )
            if sequence is None:
                continue
            candidate = trace(wiring, sequence)
        else:
            start = everything if attempt else best.sequence
            perturbation = LOW_PEAK_PERTURBATIONS[max(which - 1, 0)]
            candidate = evict(wiring, start, target_bytes, perturbation=perturbation, deadline=soon)
        candidate = drop_dead_runs(wiring, candidate)
        if candidate.peak_bytes < best.peak_bytes:
            best = candidate
    return best
