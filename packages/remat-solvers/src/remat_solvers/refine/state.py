"""How a solve by `refine` stands: the fastest schedule, the bound on all, and the time left.

A schedule faster than the bound refutes it, whichever comes last; the bound is then given up. Where
nobody set a limit, the time left also depends on what may still be gained: the gap to the bound.
"""

from __future__ import annotations

import logging
import time
from functools import partial

import numpy as np

from remat_solvers.core.problem import Limit, Progress, Report
from remat_solvers.core.trace import Trace, sequence_time
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.refine.relaxation import COST_OF_ONCE

__all__ = ["GAP", "TOLERANCE", "State"]

GAP = 1e-3  # that is small enough to stop at
TOLERANCE = 1e-6  # of a time, within which two are the same
_PATIENCE_SECONDS = 4.0  # since the last gain
_PATIENCE_SECONDS_PER_OP = 1e-3
_PATIENCE_SECONDS_PER_POINT = 3.0  # of a hundred of the gap, relative to computing once
_GAIN = 1e-4  # of computing once, that is worth waiting for more
_EXACT_SECONDS = 3.0
_EXACT_OPS = 200
_ATTEMPT_SECONDS = 0.4
_ATTEMPT_SECONDS_PER_OP = 5e-4
_ATTEMPTS = 60  # that fit into what is left, if they may take longer

_log = logging.getLogger(__name__)


class State:
    """What is sought, known and reported; `once` is the time of computing everything once.

    `last_moment`, of `time.perf_counter`, is when to stop in any case.
    """

    def __init__(
        self, wiring: Wiring, budget_bytes: int, last_moment: float, limit: Limit, report: Report
    ) -> None:
        self.wiring = wiring
        self.budget_bytes = budget_bytes
        self.best: Trace | None = None
        self.best_time = np.inf
        self.once = wiring.graph.time
        self.bound = self.once
        self.infeasible = False
        self.round = 0
        self._limit = limit
        self._report = report
        self._started = self._gained = time.perf_counter()
        self._last_moment = last_moment

    @property
    def deadline(self) -> float:
        """The moment by which to stop, of `time.perf_counter`.

        Without a limit: sooner, the less may be gained and the longer nothing was.
        """
        if self._limit.seconds is not None or self.best is None:
            return self._last_moment
        patience = _PATIENCE_SECONDS + _PATIENCE_SECONDS_PER_OP * self.wiring.op_count
        if self.once:
            points = 100 * (self.best_time - self.bound) / self.once
            patience += _PATIENCE_SECONDS_PER_POINT * points
        return min(self._last_moment, self._gained + patience)

    def offer(self, found: Trace) -> None:
        """Keep a schedule if it fits and is faster."""
        if found.peak_bytes <= self.budget_bytes:
            found_time = sequence_time(self.wiring, found.sequence)
            if found_time < self.best_time:
                if found_time < self.best_time - _GAIN * self.once:
                    self._gained = time.perf_counter()
                self.best, self.best_time = found, found_time
                self._confront()

    def learn(self, cost: float) -> None:
        """Raise the bound to a cost that a program has at least, slightly less for tolerances."""
        proved = self.once * (1 + cost / COST_OF_ONCE * (1 - 1e-7) - 1e-8)
        if np.isfinite(proved) and proved > self.bound:
            self.bound = proved
            self._confront()

    def time_of(self, cost: float) -> float:
        """Return the time of a schedule whose recomputation has a cost in a program."""
        return self.once * (1 + cost / COST_OF_ONCE)

    def closed(self, gap: float) -> bool:
        """Say whether the fastest schedule is proved to be within a share `gap` of the bound."""
        return self.best is not None and self.best_time <= self.bound * (1 + TOLERANCE + gap)

    def enough(self) -> bool:
        """Ask small graphs for proof to the last digit for some seconds, else for the gap."""
        early = time.perf_counter() - self._started < _EXACT_SECONDS
        exactly = early and self.wiring.op_count <= _EXACT_OPS
        return self.closed(0.0 if exactly else GAP) or self.left() <= 0

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def soon(self) -> float:
        """Return the moment by which one attempt of a heuristic has to end."""
        seconds = _ATTEMPT_SECONDS + _ATTEMPT_SECONDS_PER_OP * self.wiring.op_count
        return time.perf_counter() + min(self.left(), max(seconds, self.left() / _ATTEMPTS))

    def say(self, message: str) -> None:
        """Report and log how things stand."""
        best = self.best
        progress = Progress(
            solver="refine",
            round=self.round,
            incumbent_time=None if best is None else self.best_time,
            incumbent_peak_bytes=None if best is None else best.peak_bytes,
            lower_bound=self.bound,
            seconds=self._limit.elapsed,
            message=message,
            incumbent=None if best is None else partial(expand, self.wiring, best.sequence),
        )
        _log.info("%s", progress)
        self._report(progress)

    def _confront(self) -> None:
        """Give up a bound that a schedule refutes: the back end was wrong (see `milp`)."""
        if self.bound > self.best_time * (1 + TOLERANCE):
            _log.warning("gave up a bound of %g: a schedule takes %g", self.bound, self.best_time)
            self.bound = self.once
