"""The smallest budget for which a schedule is found, and the proof below which there is none.

Of a small graph a search at a glance comes first: most often it reaches what some op needs by
itself. Else the proof comes first (`bottleneck`, raised by `regress`), then the search in single
steps (`search.descent`); where the two are not near each other, programs look for a lower schedule,
or prove that there is none (`programs`). Where values have several implementations, in the ordinary
graph of the schedule found.
Guarantee: `peak_bytes` is that of a legal schedule, `least_bytes` is proved; between them nothing
is known. Complexity: some dozens of attempts, each limited in time.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from remat_graph import Graph, Schedule
from remat_solvers.bounds.bottleneck import bottleneck
from remat_solvers.bounds.peak import PeakBound, peak_bound
from remat_solvers.bounds.regression import regress
from remat_solvers.core.milp import HIGHS
from remat_solvers.core.problem import Limit, check_graph
from remat_solvers.core.trace import Trace
from remat_solvers.core.trust import distrust, doubt_of
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.minimal_peak.programs import lower
from remat_solvers.search.descent import CLOSE, minimal_peak_trace
from remat_solvers.search.unfolding import unfold

__all__ = ["SmallestBudget", "smallest_budget"]

_DEFAULT_SECONDS = 10.0
_PROOF_SHARE, _REGRESSION_SHARE = 0.3, 0.15  # of the time
# For the search in single steps, of the time left, and what it may take of a short time.
_STEPS_SHARE, _STEPS_SECONDS, _MOST_STEPS_SHARE = 0.4, 12.0, 0.8
_FEW_OPS, _GLANCE_SHARE = 200, 0.1  # of the time
_MOST_OPS = 20_000  # beyond which single steps need all of the time

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SmallestBudget:
    """A schedule of small peak; none at all goes below `least_bytes`.

    `least_at` is the op that cannot run with less; `None` if it is what is alive at the end, or no
    single op.
    """

    peak_bytes: int
    schedule: Schedule
    least_bytes: int
    least_at: str | None


def smallest_budget(graph: Graph, *, limit_seconds: float | None = None) -> SmallestBudget:
    """Look for the schedule of minimal peak, whatever its time.

    Raises:
        InvalidProblem: if the limit is negative, or the graph is none, or too large to add up.
    """
    check_graph(graph)
    wiring = Wiring.of(graph)
    limit = Limit.starting_now(limit_seconds)
    deadline = limit.started + limit.left(_DEFAULT_SECONDS)
    seconds = deadline - limit.started
    floor, start = peak_bound(wiring), limit.started
    if wiring.op_count <= _FEW_OPS:
        start += _GLANCE_SHARE * seconds
        lowest = minimal_peak_trace(wiring, start, floor_bytes=floor.peak_bytes)
        if lowest.peak_bytes == floor.peak_bytes:
            return _found(wiring, lowest, floor)
    floor = bottleneck(wiring, start + _PROOF_SHARE * seconds)
    floor = regress(wiring, floor, time.perf_counter() + _REGRESSION_SHARE * seconds)
    now = time.perf_counter()
    left = deadline - now
    steps = max(_STEPS_SHARE * left, min(_STEPS_SECONDS, _MOST_STEPS_SHARE * left))
    if wiring.op_count > _MOST_OPS:
        steps = left
    lowest = minimal_peak_trace(wiring, now + steps, floor_bytes=floor.peak_bytes)
    if lowest.peak_bytes > CLOSE * floor.peak_bytes:
        lowest, proved = _lower(wiring, lowest, floor, deadline)
        if proved.peak_bytes > lowest.peak_bytes:
            claim = f"that nothing fits {proved.peak_bytes - 1} bytes"
            distrust(HIGHS, f"it said {claim}, but a schedule takes {lowest.peak_bytes}")
        else:
            floor = proved
    if floor.peak_bytes > lowest.peak_bytes:
        _log.warning("gave up %s: a schedule peaks at %d bytes", floor, lowest.peak_bytes)
        floor = peak_bound(wiring)
    return _found(wiring, lowest, floor)


def _found(wiring: Wiring, lowest: Trace, floor: PeakBound) -> SmallestBudget:
    return SmallestBudget(
        peak_bytes=lowest.peak_bytes,
        schedule=expand(wiring, lowest.sequence),
        least_bytes=floor.peak_bytes,
        least_at=floor.op,
    )


def _lower(
    wiring: Wiring, lowest: Trace, floor: PeakBound, deadline: float
) -> tuple[Trace, PeakBound]:
    """Go on by programs; with alternatives, what they prove holds for some of these only."""
    unfolded = unfold(wiring, lowest)
    result = lower(unfolded.wiring, unfolded.start, floor.peak_bytes, deadline)
    lowest = min(lowest, unfolded.fold(result.schedule), key=lambda now: now.peak_bytes)
    higher = result.least_bytes > floor.peak_bytes and doubt_of(HIGHS) is None
    if unfolded.wiring is wiring and higher:
        floor = PeakBound(result.least_bytes, None)
    return lowest, floor
