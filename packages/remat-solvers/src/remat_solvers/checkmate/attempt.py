"""What solvers by integer programs keep while they work: best schedule, bound, answer."""

from __future__ import annotations

import logging
import math

import numpy as np

from remat_graph import Schedule, Solution, Status, simulate
from remat_solvers.bounds.least import least
from remat_solvers.checkmate.bound import bounding_program
from remat_solvers.checkmate.formulation import count_columns
from remat_solvers.checkmate.stages import Bits, Stages
from remat_solvers.core.milp import Outcome, missing_back_end, relaxed, solve_program
from remat_solvers.core.problem import Limit, Problem, Progress, Report
from remat_solvers.core.trace import Trace, sequence_time, trace
from remat_solvers.core.wiring import Ints, Wiring, expand
from remat_solvers.search.starts import starts

__all__ = ["Attempt", "why_not"]

_TOLERANCE = 1e-6

_log = logging.getLogger(__name__)


def why_not(problem: Problem, back_end: str, most_columns: int) -> str | None:
    """Say why the program cannot be written or handed to the back end, or `None`."""
    if not problem.graph.ops:
        return "the graph has no ops"
    missing = missing_back_end(back_end)
    if missing is not None:
        return missing
    columns = count_columns(Stages.of(Wiring.of(problem.graph)))
    if columns > most_columns:
        return (
            f"its program would have {columns:,} columns, more than {most_columns:,}; "
            f"use 'refine', which has stages only where memory binds"
        )
    return None


class Attempt:
    """One solve: offers schedules, keeps the fastest that fits, raises the bound, reports."""

    def __init__(self, solver: str, problem: Problem, limit: Limit, report: Report) -> None:
        self.wiring = Wiring.of(problem.graph)
        self.stages = Stages.of(self.wiring)
        self.budget_bytes = problem.budget_bytes
        self.once = problem.graph.time
        self.bound = self.once
        self.infeasible = False
        self.best: Trace | None = None
        self.best_time = math.inf
        self.least_peak = math.inf
        self._solver = solver
        self._limit = limit
        self._report = report
        self._round = 0

    def settled_at_once(self, *, any_order: bool = False) -> bool:
        """Store everything if that fits; prove that nothing does if one op needs too much.

        With `any_order`, also in another order than that of the graph.
        """
        self.offer(np.arange(self.wiring.op_count))
        if self.best is not None:
            self.say("storing everything fits")
        elif least(self.wiring, any_order=any_order).peak_bytes > self.budget_bytes:
            self.infeasible = True
            self.say("one op alone needs more than the budget")
        return self.infeasible or self.closed

    def begin(self, given: Schedule | None, deadline: float) -> list[Trace]:
        """Offer schedules that are found without a program; return those that fit, fastest first.

        The given one is offered first. Takes a small share of the time until `deadline`.
        """
        fitting: list[Trace] = []
        for found in starts(self.wiring, self.budget_bytes, given, deadline):
            self.least_peak = min(self.least_peak, found.peak_bytes)
            if found.peak_bytes <= self.budget_bytes:
                fitting.append(found)
                self.take(found.sequence)
        return sorted(fitting, key=lambda found: sequence_time(self.wiring, found.sequence))

    @property
    def closed(self) -> bool:
        """Whether the best schedule is proved to be the fastest."""
        return self.best_time <= self.bound * (1 + _TOLERANCE)

    def offer(self, sequence: Ints) -> bool:
        """Keep a sequence if it fits and is faster; say whether it fits."""
        now = trace(self.wiring, sequence)
        self.least_peak = min(self.least_peak, now.peak_bytes)
        if now.peak_bytes > self.budget_bytes:
            return False
        found_time = sequence_time(self.wiring, sequence)
        if found_time < self.best_time:
            self.best, self.best_time = now, found_time
            self._confront()
        return True

    def _confront(self) -> None:
        """Give up a bound that a schedule refutes: the back end was wrong (see `milp`)."""
        if self.bound > self.best_time * (1 + _TOLERANCE):
            _log.warning("gave up a bound of %g: a schedule takes %g", self.bound, self.best_time)
            self.bound = self.once

    def take(self, sequence: Ints) -> None:
        """Keep a sequence if it fits and is faster, and report it."""
        before = self.best_time
        if self.offer(sequence) and self.best_time < before:
            self.say("a schedule was found")

    def offer_kept(self, kept: Bits) -> bool:
        """Offer the least recomputation for what is kept."""
        return self.offer(self.stages.sequence(self.stages.least_run(kept)))

    def raise_bound(self, value: float) -> None:
        """Take a bound in thousandths of the time of all ops; slightly less, for tolerances."""
        proved = self.once * (1 + value / 1000 * (1 - 1e-7) - 1e-8)
        if np.isfinite(proved):
            self.bound = max(self.bound, proved)
            self._confront()

    def bound_all(self, seconds: float, back_end: str, *, whole: bool = True) -> Outcome:
        """Bound the time of every schedule in the order of the graph, or prove there is none.

        Without `whole`, by the linear relaxation.
        """
        program = bounding_program(self.stages, self.budget_bytes)
        program = program if whole else relaxed(program)
        answer = solve_program(program, seconds=seconds, back_end=back_end)
        if answer.outcome is Outcome.INFEASIBLE:
            self.infeasible = self.best is None
        else:
            self.raise_bound(answer.bound)
        return answer.outcome

    def say(self, message: str) -> None:
        """Report where the work stands."""
        self._round += 1
        progress = Progress(
            solver=self._solver,
            round=self._round,
            incumbent_time=None if self.best is None else self.best_time,
            incumbent_peak_bytes=None if self.best is None else self.best.peak_bytes,
            lower_bound=self.bound,
            seconds=self._limit.elapsed,
            message=message,
            incumbent=None if self.best is None else self._schedule,
        )
        _log.info("%s", progress)
        self._report(progress)

    def _schedule(self) -> Schedule:
        if self.best is None:
            raise ValueError("no schedule has been found")
        return expand(self.wiring, self.best.sequence)

    def solution(self) -> Solution:
        """Give the answer, with the simulator's figures."""
        if self.best is None:
            return Solution(
                status=Status.INFEASIBLE if self.infeasible else Status.LIMIT,
                schedule=None,
                time=math.inf,
                peak_bytes=int(self.least_peak),
                lower_bound=None if self.infeasible else self.bound,
                solver=self._solver,
                solve_seconds=self._limit.elapsed,
            )
        schedule = self._schedule()
        timeline = simulate(self.wiring.graph, schedule)
        return Solution(
            status=Status.OPTIMAL if self.closed else Status.FEASIBLE,
            schedule=schedule,
            time=timeline.time,
            peak_bytes=timeline.peak_bytes,
            lower_bound=min(self.bound, timeline.time),
            solver=self._solver,
            solve_seconds=self._limit.elapsed,
        )
