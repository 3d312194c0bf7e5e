"""Bring a schedule within a budget, and rid it of what the budget does not need.

Where each value has one implementation that is `evict` and `prune`, else `evict_with_alternatives`
and `prune_multi`. Guarantee: nothing gets slower or larger by `prune_multi`; the rest is heuristic.
Complexity: a trace for each change.
"""

from __future__ import annotations

import math
import time

import numpy as np

from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.dead_runs import drop_dead_runs, repeats
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Floats, Ints, Wiring
from remat_solvers.search.evict import evict
from remat_solvers.search.evict_with_alternatives import evict_with_alternatives
from remat_solvers.search.perturbations import EVICTION_PERTURBATIONS, EvictionPerturbation
from remat_solvers.search.prune import prune
from remat_solvers.search.replay import replay

__all__ = ["prune_multi", "recomputations", "repaired"]

_NEARLY = 1.1  # of the budget
_PATIENCE = 12  # evictions without a gain: small steps are better then


def repaired(
    wiring: Wiring,
    now: Trace,
    budget_bytes: int,
    *,
    perturbation: EvictionPerturbation = EVICTION_PERTURBATIONS[0],
    most_time: float = math.inf,
    likely: Floats | None = None,
    quick: bool = False,
    soon: float = math.inf,
    deadline: float = math.inf,
) -> Trace:
    """Evict until `soon`, and prune until `deadline`, times of `time.perf_counter`.

    Eviction that ends a little over the budget goes on in smaller steps (`replay`). Given up is
    what takes longer than `most_time` before it is pruned. `likely` is as of `evict`, `quick` as of
    `replay`.
    """
    if not wiring.graph.has_alternatives:
        evicted = evict(
            wiring,
            now.sequence,
            budget_bytes,
            perturbation=perturbation,
            most_time=most_time,
            patience=_PATIENCE,
            likely=likely,
            deadline=soon,
        )
        nearly = budget_bytes < evicted.peak_bytes <= _NEARLY * budget_bytes
        if nearly and wiring.time[evicted.sequence].sum() <= most_time:
            evicted = replay(wiring, evicted, budget_bytes, quick=quick, deadline=soon)
        return prune(wiring, evicted, budget_bytes, deadline=deadline)
    evicted = evict_with_alternatives(
        wiring,
        Alternatives.of(wiring),
        now.sequence,
        budget_bytes,
        perturbation=perturbation,
        most_time=most_time,
        deadline=soon,
    )
    return prune_multi(wiring, evicted, budget_bytes, deadline=deadline)


def recomputations(wiring: Wiring, now: Trace) -> Ints:
    """List the positions of computations that make nothing a first time, ascending."""
    if not wiring.graph.has_alternatives:
        ranks = np.flatnonzero(repeats(now))
        return np.sort(now.key[ranks] % (now.steps + 1))
    first = np.zeros(now.steps, dtype=np.bool_)
    first[
        now.copy_start[np.lexsort((now.copy_start, now.copy_value))][
            np.unique(np.sort(now.copy_value), return_index=True)[1]
        ]
    ] = True
    first[np.diff(wiring.out_start)[now.sequence] == 0] = True
    return np.flatnonzero(~first)


def prune_multi(
    wiring: Wiring, now: Trace, budget_bytes: int, *, deadline: float = math.inf
) -> Trace:
    """Take out recomputations in whose place a value can be kept, dearest first."""
    if not wiring.graph.has_alternatives:
        return now
    now = drop_dead_runs(wiring, now)
    if now.peak_bytes > budget_bytes:
        return now
    while time.perf_counter() < deadline:
        for at in _spare(wiring, now, budget_bytes):
            left = drop_dead_runs(wiring, now, [at])
            if left.peak_bytes <= budget_bytes:
                now = left
                break
        else:
            break
    return now


def _spare(wiring: Wiring, now: Trace, budget_bytes: int) -> list[int]:
    """List the positions of computations in whose place earlier copies fit, dearest first."""
    order = np.lexsort((now.copy_start, now.copy_value))
    former = np.full(len(order), -1)
    same = now.copy_value[order[1:]] == now.copy_value[order[:-1]]
    former[order[1:][same]] = order[:-1][same]
    longer: dict[int, list[tuple[int, int]]] = {}  # since when, and how many bytes
    first = set(now.copy_start[former < 0].tolist())
    for copy in np.flatnonzero(former >= 0).tolist():
        at = int(now.copy_start[copy])
        if at not in first:
            lives = now.copy_last[copy] > at
            size = int(wiring.size[now.copy_value[copy]]) if lives else 0
            longer.setdefault(at, []).append((int(now.copy_end[former[copy]]), size))
    spare = [
        at
        for at, kept in longer.items()
        if all(
            now.during[since:at].max(initial=0) + sum(size for s, size in kept if s <= since)
            <= budget_bytes
            for since, _ in kept
        )
    ]
    return sorted(spare, key=lambda at: -wiring.time_list[int(now.sequence[at])])
