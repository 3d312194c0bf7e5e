"""A lower peak than single steps find, by schedules built from points of the program of `refine`.

`search.descent` changes one thing at a time. A point of the program says at once what to keep at
all time steps where memory binds, and the schedule built from it, repaired, is often lower.
Programs are asked at budgets between the lowest peak known and the bound: first half way, then
nearer to that peak. From what is found, small steps go on down. A program without a point proves
that nothing fits its budget.
Guarantee: the schedule is legal and never higher than the given one; what is proved holds for all
schedules in the order of the graph. Complexity: some rounds of `refine`, each limited in time.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from remat_solvers.core.problem import Limit, silent
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.errors import BackEndFailed
from remat_solvers.refine.rounds import Rounds
from remat_solvers.refine.state import State
from remat_solvers.search.descent import CLOSE, descend, equally_long

__all__ = ["Lowest", "lower"]

_TURN = 0.4  # of the time left, for one budget
# Less would find by luck: for small graphs so long by each op.
_LEAST_SECONDS, _LEAST_SECONDS_PER_OP = 0.2, 1e-3
_NEAREST = 0.9  # of the way from the bound to the minimal peak

_log = logging.getLogger(__name__)


class Lowest(NamedTuple):
    """The schedule of minimal peak, and the bytes below which none goes."""

    schedule: Trace
    least_bytes: int


def lower(wiring: Wiring, start: Trace, least_bytes: int, deadline: float) -> Lowest:
    """Look for a peak below that of a schedule until `deadline`, of `time.perf_counter`.

    For graphs whose values have one implementation each; `least_bytes` is proved.
    """
    wiring = equally_long(wiring)
    lowest, share = start, 1 / 2
    least_seconds = min(_LEAST_SECONDS, _LEAST_SECONDS_PER_OP * wiring.op_count)
    while lowest.peak_bytes > CLOSE * least_bytes and share < _NEAREST:
        seconds = _TURN * (deadline - time.perf_counter())
        if seconds < least_seconds:
            break
        target = max(1, int(least_bytes + share * (lowest.peak_bytes - least_bytes)))
        state = _Peak(wiring, target, lowest, seconds)
        try:
            Rounds(state).feasibility_rounds()
        except BackEndFailed as error:
            _log.warning("%s", error)
            break
        if state.infeasible:
            least_bytes = target + 1
        elif state.lowest.peak_bytes < lowest.peak_bytes:
            lowest = descend(wiring, state.lowest, least_bytes, 0, deadline)
        else:
            share = (1 + share) / 2
    return Lowest(lowest, least_bytes)


class _Peak(State):
    """Keeps the schedule of minimal peak, whether it fits or not; done when one fits."""

    def __init__(self, wiring: Wiring, budget_bytes: int, start: Trace, seconds: float) -> None:
        until = time.perf_counter() + seconds
        super().__init__(wiring, budget_bytes, until, Limit.starting_now(seconds), silent)
        self.lowest = start
        self.once = self.bound = float(wiring.time.sum())  # not that of the graph

    def offer(self, candidate: Trace) -> bool:
        """Keep a schedule if it is lower; say whether it fits."""
        if candidate.peak_bytes < self.lowest.peak_bytes:
            self.lowest = candidate
        return super().offer(candidate)

    def enough(self) -> bool:
        """Ask for no more than one that fits."""
        return self.best is not None or self.left() <= 0
