"""How a solve by `refine` stands: the fastest schedule, the bound on all, and the time left.

Where nobody set a limit, the time left also depends on what may still be gained: the gap to the
bound.
"""

from __future__ import annotations

import time

from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.milp import HIGHS
from remat_solvers.core.problem import Limit, Report
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.refine.relaxation import COST_OF_ONCE

__all__ = ["FAR", "GAP", "State"]

GAP = 1e-3  # that is small enough to stop at
FAR = 0.02  # a gap at which much is to be gained by looking for schedules
# Since the last gain; points are of a hundred of the gap, relative to computing once.
_PATIENCE_SECONDS, _PATIENCE_SECONDS_PER_SMALL_POINT = 4.0, 5.0
_PATIENCE_SECONDS_PER_POINT = 3.0
_PATIENCE_SECONDS_PER_OP = 1e-3
_MOST_PATIENCE_SECONDS, _MOST_PATIENCE = 8.0, 2.0  # of the time until the last gain, if longer
_GAIN = 1e-4  # of computing once, that is worth waiting for more
_EXACT_SECONDS = 3.0
_EXACT_OPS = 200
_ATTEMPT_SECONDS = 0.4
_ATTEMPT_SECONDS_PER_OP = 5e-4
_ATTEMPTS = 60  # that fit into what is left, if they may take longer


class State(Incumbent):
    """What is sought and known by `refine`, whose rounds are counted by what solves its programs.

    `until`, of `time.perf_counter`, is when to stop in any case; `back_end` solves programs.
    """

    def __init__(
        self,
        wiring: Wiring,
        budget_bytes: int,
        until: float,
        limit: Limit,
        report: Report,
        *,
        back_end: str = HIGHS,
    ) -> None:
        super().__init__("refine", wiring, budget_bytes, limit, report)
        self.back_end = back_end
        self._started = self._gained = time.perf_counter()
        self._until = until

    @property
    def deadline(self) -> float:
        """The time by which to stop, of `time.perf_counter`.

        Without a limit, or with a loose one: sooner, the less may be gained and the longer nothing
        was.
        """
        if (self._limit.seconds is not None and not self._limit.loose) or self.best is None:
            return self._until
        points = 100 * (self.best_time - self.bound) / self.once if self.once else 0.0
        patience = min(_PATIENCE_SECONDS, _PATIENCE_SECONDS_PER_SMALL_POINT * points)
        patience += _PATIENCE_SECONDS_PER_POINT * points
        until_gain = self._gained - self._started
        patience = min(patience, max(_MOST_PATIENCE_SECONDS, _MOST_PATIENCE * until_gain))
        patience += _PATIENCE_SECONDS_PER_OP * self.wiring.op_count
        return min(self._until, self._gained + patience)

    def offer(self, candidate: Trace) -> bool:
        """Keep a schedule if it fits and is faster; say whether it fits."""
        before = self.best_time
        fits = super().offer(candidate)
        if self.best_time < before - _GAIN * self.once:
            self._gained = time.perf_counter()
        return fits

    def learn(self, cost: float) -> None:
        """Raise the bound to a cost that a program has at least."""
        self.raise_bound(self.time_of(cost), self.back_end)

    def time_of(self, cost: float) -> float:
        """Return the time of a schedule whose recomputation has a cost in a program."""
        return self.once * (1 + cost / COST_OF_ONCE)

    def say(self, message: str) -> None:
        """Report and log how things stand in this round."""
        self._tell(message)

    def enough(self) -> bool:
        """Ask small graphs for proof to the last digit for some seconds, else for the gap."""
        early = self.spent() < _EXACT_SECONDS
        exactly = early and self.wiring.op_count <= _EXACT_OPS
        return self.closed(0.0 if exactly else GAP) or self.left() <= 0

    def spent(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._started

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def soon(self) -> float:
        """Return the time by which one attempt of a heuristic has to end."""
        seconds = _ATTEMPT_SECONDS + _ATTEMPT_SECONDS_PER_OP * self.wiring.op_count
        return time.perf_counter() + min(self.left(), max(seconds, self.left() / _ATTEMPTS))
