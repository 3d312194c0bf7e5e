"""The rounds of `refine`: what is the best schedule, what is proved, where to look next."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from remat_solvers.bottleneck import bottleneck
from remat_solvers.evict import Taste, evict
from remat_solvers.exhaust import exhaust
from remat_solvers.least import least
from remat_solvers.milp import Answer, Outcome, relaxed, solve_program
from remat_solvers.paging import Habit, page
from remat_solvers.problem import Limit, Progress, Report
from remat_solvers.prune import prune
from remat_solvers.refine.construct import construct
from remat_solvers.refine.embed import embed
from remat_solvers.refine.moments import Refinement, refinements
from remat_solvers.refine.neighbourhood import Neighbourhood
from remat_solvers.refine.relaxation import Relaxation, Stagewise, read_point, relax
from remat_solvers.shake import shake
from remat_solvers.smallest import smallest_trace
from remat_solvers.starts import HABITS, TASTES
from remat_solvers.trace import Trace, sequence_time, trace
from remat_solvers.wiring import Floats, Ints, Wiring, expand

__all__ = ["TOLERANCE", "Rounds"]

TOLERANCE = 1e-6
_GAP = 1e-3
_EXACT_SECONDS = 3.0
_EXACT_OPS = 200
_SMALL_COLUMNS = 500
# Beyond the first the linear relaxation comes first, beyond the second alone: HiGHS takes long, and
# does not stop when told to.
_LARGE_COLUMNS = 3_000
_TOO_LARGE_COLUMNS = 50_000
_RESERVES = (0.02, 0.05, 0.08)
_ROUGH_GAP = 3e-3
_AT_ONCE = 2
_SKETCH_SHARE = 0.15
_DESCENT_SHARE, _BELOW = 0.2, 0.99
_POLISH_SHARE = 0.15
# Of the time, for one integer program: large ones raise their bounds late.
_SLICE, _LARGE_SLICE = 1 / 8, 7 / 8
_FRUITLESS = 3
_POLISH, _LEAST_POLISH = 0.3, 0.04
_MUCH, _SOME = 0.1, 0.02
_GAP_TO_TRY_MORE = 0.01
_MOST_OF_GAP = 0.4
_MOST_AGAIN = 2
_BY_PARTS = 0.75  # of the time for improving schedules
_PATIENCE = 8
_ATTEMPT_SECONDS = 0.4
_ATTEMPT_SECONDS_PER_OP = 5e-4

_log = logging.getLogger(__name__)


class Rounds:
    """The state of one solve: incumbent, bound, and the program's checkpoints and rows."""

    def __init__(
        self,
        wiring: Wiring,
        budget_bytes: int,
        deadline: float,
        limit: Limit,
        report: Report,
        start: Ints | None = None,
    ) -> None:
        self.wiring = wiring
        self.budget_bytes = budget_bytes
        self.deadline = deadline
        self.best: Trace | None = None
        self.best_time = np.inf
        self.once = wiring.graph.time
        self.bound = self.once
        self.infeasible = False
        self._given = start
        self._limit = limit
        self._report = report
        self._round = 0
        self._columns = 0
        self._neighbourhood = Neighbourhood(wiring, budget_bytes)
        self._sketched: tuple[Refinement, Relaxation, Answer] | None = None
        self._started = time.perf_counter()

    def run(self) -> None:
        """Work until closed, infeasible, out of refinements, or out of time."""
        everything = trace(self.wiring, np.arange(self.wiring.op_count))
        self.offer(everything)
        if self.closed(0.0):
            return self._say("storing everything fits")
        if least(self.wiring).peak_bytes > self.budget_bytes:
            self.infeasible = True
            return self._say("one op alone needs more than the budget")
        self._start(everything)
        if self.best is None:
            self.infeasible = bottleneck(self.wiring, self._soon()).peak_bytes > self.budget_bytes
            if self.infeasible:
                return self._say("nothing fits: the least peak is above the budget")
            self._descend()
        self._say("repaired storing everything")
        self._refine(Refinement(frozenset({int(everything.during.argmax())}), frozenset()))
        if not self.infeasible and not self.closed(0.0):
            self._exhaust()
        if not self.infeasible:
            self._polish(self._left())
        return None

    def _start(self, everything: Trace) -> None:
        """Find a schedule that fits without a program, by whatever gives one first."""
        if self._given is not None:
            self._repair(trace(self.wiring, self._given), TASTES[0])
        self._repair(everything, TASTES[0])
        for taste, habit in zip(TASTES[1:], HABITS, strict=True):
            if self.best is None:
                self._page(habit, None)
            if self.best is None:
                self._repair(everything, taste)

    def _descend(self) -> None:
        """Look for a peak within the budget whatever the time, for a share of what is left."""
        until = time.perf_counter() + _DESCENT_SHARE * self._left()
        floor = int(_BELOW * self.budget_bytes)
        found = smallest_trace(self.wiring, until, floor_bytes=floor)
        self.offer(prune(self.wiring, found, self.budget_bytes, deadline=self.deadline))

    def closed(self, gap: float) -> bool:
        """Say whether the incumbent is proved to be within a share `gap` of the bound."""
        return self.best is not None and self.best_time <= self.bound * (1 + TOLERANCE + gap)

    def offer(self, found: Trace) -> None:
        """Keep a schedule if it fits and is faster."""
        if found.peak_bytes <= self.budget_bytes:
            found_time = sequence_time(self.wiring, found.sequence)
            if found_time < self.best_time:
                self.best, self.best_time = found, found_time
                self._confront()

    def _enough(self) -> bool:
        """Ask small graphs for proof to the last digit for some seconds, else for the gap."""
        early = time.perf_counter() - self._started < _EXACT_SECONDS
        exactly = early and self.wiring.op_count <= _EXACT_OPS
        return self.closed(0.0 if exactly else _GAP) or self._left() <= 0

    def _is_worth_a_round(self) -> bool:
        """Ask for one integer program where it is small, even if relaxations were enough."""
        small = 0 < self._columns < _LARGE_COLUMNS
        return small and self._round == 0 and not self.closed(0.0) and self._left() > 0

    def _left(self) -> float:
        return self.deadline - time.perf_counter()

    def _soon(self) -> float:
        """Give one attempt of a heuristic its time."""
        seconds = _ATTEMPT_SECONDS + _ATTEMPT_SECONDS_PER_OP * self.wiring.op_count
        return time.perf_counter() + min(self._left(), max(seconds, self._left() / 60))

    def _refine(self, tried: Refinement) -> None:
        """Solve, look where the schedule is over budget, refine there; more time if it stalls."""
        tried = self._sketch(tried)
        pending: list[Refinement] = []
        again, begun = 0, None
        share, polish = _SLICE, _POLISH
        if self._sketched is not None and self._sketched[1].columns > _LARGE_COLUMNS:
            self._polish(_POLISH_SHARE * self._left())
            share = _LARGE_SLICE
        seconds = max(1.0, share * self._left())
        while not self._enough() or self._is_worth_a_round():
            relaxation, answer = self._solve(tried, min(self._left(), seconds), begun)
            begun = None
            if answer.outcome is Outcome.INFEASIBLE:
                self.infeasible = self.best is None
                return self._say("the program is infeasible")
            self._learn(answer)
            built = self._build(relaxation, answer)
            if self._round == 1:
                self._reserve(tried)
            before = self.best_time
            self._polish(min(self._left(), polish * seconds))
            polish = _POLISH if self.best_time < before else max(polish / 2, _LEAST_POLISH)
            self._say(f"{len(tried.checkpoints)} checkpoints, {len(tried.running)} running rows")
            seen = [] if built is None else self._where(built, tried)
            pending = [r for r in seen or pending if not tried >= r]
            if answer.outcome is not Outcome.SOLVED:
                seconds *= 1.5
                if again < _MOST_AGAIN and self._is_worth_closing(answer):
                    seconds = max(2 * seconds, _LARGE_SLICE * self._left())
                    again, begun = again + 1, answer.point
                    continue
            elif not pending:
                break
            for refinement in pending[:_AT_ONCE]:
                tried |= refinement
            pending = pending[_AT_ONCE:]
            again = 0
        return None

    def _sketch(self, tried: Refinement) -> Refinement:
        """Choose checkpoints by linear relaxations, which take moments, while the bound rises.

        First the next two are added while it rises much; then, with tighter relaxations, they also
        take the place of others. Not where the integer program takes moments too: where it is over
        budget tells more.
        """
        near = max(1, self.wiring.op_count // 50)
        tried = self._by_relaxations(tried, Refinement.next_two, _MUCH, paired=False)
        if self._sketched is None:
            return tried
        return self._by_relaxations(tried, partial(Refinement.moves, near=near), _SOME, paired=True)

    def _by_relaxations(
        self,
        tried: Refinement,
        moves: Callable[[Refinement, list[Refinement]], list[Refinement]],
        much: float,
        *,
        paired: bool,
    ) -> Refinement:
        """Go to moves that raise the bound by a share `much` of itself, or of ten times the gap."""
        until = time.perf_counter() + _SKETCH_SHARE * self._left()
        risen = self.once
        pending, since = [tried], 0
        while pending and since < _FRUITLESS and time.perf_counter() < until:
            if self._enough():
                break
            sketched = pending.pop(0)
            relaxation = self._relax(sketched, paired=paired)
            if self._columns < _SMALL_COLUMNS:
                break
            answer = solve_program(relaxed(relaxation.program), seconds=until - time.perf_counter())
            self._learn(answer)
            built = self._build(relaxation, answer)
            self._say(f"{len(sketched.checkpoints)} checkpoints, linear relaxation")
            reached = self.once * (1 + answer.bound / 1000)
            since += 1
            if reached - risen > much * min(risen - self.once, 10 * (self.best_time - risen)):
                tried, risen, since = sketched, reached, 0
                self._sketched = tried, relaxation, answer
                pending = [] if built is None else moves(tried, self._where(built, tried))
        return tried

    def _relax(self, tried: Refinement, *, paired: bool = False) -> Relaxation:
        relaxation = relax(
            self.wiring,
            self.budget_bytes,
            sorted(tried.checkpoints),
            running=sorted(tried.running),
            paired=paired,
        )
        self._columns = relaxation.columns
        return relaxation

    def _solve_relaxed(self, tried: Refinement, seconds: float) -> tuple[Relaxation, Answer]:
        """Solve the linear relaxation, unless that was the last thing that the sketch did."""
        if self._sketched is not None and self._sketched[0] == tried:
            return self._sketched[1:]
        relaxation = self._relax(tried, paired=True)
        answer = solve_program(relaxed(relaxation.program), seconds=seconds)
        self._learn(answer)
        return relaxation, answer

    def _is_worth_closing(self, answer: Answer) -> bool:
        """Say whether most of the gap would be closed if this program were solved to its end."""
        if not (math.isfinite(answer.bound) and math.isfinite(answer.value)):
            return False
        ends_at = self.once * (1 + answer.value / 1000)
        return ends_at - self.bound > _MOST_OF_GAP * (self.best_time - self.bound)

    def _exhaust(self) -> None:
        """Close what the program leaves open on a small graph."""
        found = exhaust(self.wiring, self.budget_bytes, self.deadline)
        if found is None:
            return
        if found.sequence is None:
            self.infeasible = self.best is None
            return
        self.offer(trace(self.wiring, found.sequence))
        self.bound = max(self.bound, sequence_time(self.wiring, found.sequence) * (1 - 1e-9))
        self._say("searched all states")

    def _solve(
        self, tried: Refinement, seconds: float, begun: Floats | None
    ) -> tuple[Relaxation, Answer]:
        """Solve a program from the better of two starts: the incumbent and an earlier point."""
        relaxation = self._relax(tried)
        if self._columns > _LARGE_COLUMNS:
            too_large = self._columns > _TOO_LARGE_COLUMNS
            tighter, answer = self._solve_relaxed(tried, seconds)
            if too_large or answer.outcome is Outcome.INFEASIBLE or self._enough():
                self._round += 1
                return tighter, answer
            self._build(tighter, answer)
            self._say("the linear relaxation of the next program")
            seconds = min(self._left(), seconds)
        starts = [] if begun is None else [begun]
        if self.best is not None:
            starts.append(embed(self.wiring, relaxation, self.best))
        exact = self._columns < _LARGE_COLUMNS
        answer = solve_program(
            relaxation.program,
            seconds=seconds,
            gap=0.0 if exact else _GAP,
            start=min(starts, key=relaxation.program.cost.dot, default=None),
            target=1000 * (self.bound / self.once - 1),
            many_nodes=begun is not None,
        )
        self._round += 1
        return relaxation, answer

    def _reserve(self, tried: Refinement) -> None:
        """Build from programs with less room, whose schedules overshoot less; prune then."""
        for share in _RESERVES:
            if self._enough() or self._columns > _TOO_LARGE_COLUMNS:
                break
            relaxation = relax(
                self.wiring,
                self.budget_bytes,
                sorted(tried.checkpoints),
                reserves=dict.fromkeys(tried.checkpoints, int(share * self.budget_bytes)),
            )
            seconds = min(1.0, self._left() / 8)
            self._build(
                relaxation, solve_program(relaxation.program, seconds=seconds, gap=_ROUGH_GAP)
            )

    def _learn(self, answer: Answer) -> None:
        """Raise the bound; a hair less than the back end says, for its tolerances."""
        proved = self.once * (1 + answer.bound / 1000 * (1 - 1e-7) - 1e-8)
        if np.isfinite(proved) and proved > self.bound:
            self.bound = proved
            self._confront()

    def _confront(self) -> None:
        """Give up a bound that a schedule refutes: the back end was wrong (see `milp`)."""
        if self.bound > self.best_time * (1 + TOLERANCE):
            _log.warning("gave up a bound of %g: a schedule takes %g", self.bound, self.best_time)
            self.bound = self.once

    def _build(self, relaxation: Relaxation, answer: Answer) -> Trace | None:
        """Build, repair and offer the schedule of a point; return it as it was built."""
        if answer.point is None:
            return None
        stagewise = read_point(relaxation, self.wiring, answer.point)
        built = trace(self.wiring, construct(self.wiring, stagewise))
        for taste in TASTES if self._round > 1 else TASTES[:1]:
            self._repair(built, taste)
            if self.closed(_GAP_TO_TRY_MORE) or self._left() <= 0:
                break
        if self.best is None:
            self._page(HABITS[0], stagewise)
        return built

    def _where(self, built: Trace, tried: Refinement) -> list[Refinement]:
        return refinements(self.wiring, built, self.budget_bytes, tried, 3 * _AT_ONCE)

    def _repair(self, start: Trace, taste: Taste) -> None:
        """Evict, prune and offer."""
        fitting = evict(
            self.wiring, start.sequence, self.budget_bytes, taste=taste, deadline=self._soon()
        )
        self.offer(prune(self.wiring, fitting, self.budget_bytes, deadline=self.deadline))

    def _page(self, habit: Habit, stagewise: Stagewise | None) -> None:
        """Run within the budget in one pass, keeping what the point of a program keeps."""
        sequence = page(
            self.wiring,
            self.budget_bytes,
            habit=habit,
            plan=None if stagewise is None else stagewise.keeps,
            deadline=self._soon(),
        )
        if sequence is not None:
            found = trace(self.wiring, sequence)
            self.offer(prune(self.wiring, found, self.budget_bytes, deadline=self.deadline))

    def _polish(self, seconds: float) -> None:
        """Improve what fits by `shake`, then by parts of a program if that is no small one."""
        if self.best is None or seconds <= 0 or self._enough():
            return
        until = time.perf_counter() + seconds
        by_parts = self._columns >= _SMALL_COLUMNS and self._neighbourhood.is_of_use
        self.offer(
            shake(
                self.wiring,
                self.best,
                self.budget_bytes,
                seed=self._round,
                deadline=until - by_parts * _BY_PARTS * seconds,
            )
        )
        since = 0
        while by_parts and since < _PATIENCE and time.perf_counter() < until:
            if self._enough():
                break
            before = self.best_time
            self.offer(self._neighbourhood.step(self.best, until))
            since = 0 if self.best_time < before else since + 1

    def _say(self, message: str) -> None:
        best = self.best
        progress = Progress(
            solver="refine",
            round=self._round,
            incumbent_time=None if best is None else self.best_time,
            incumbent_peak_bytes=None if best is None else best.peak_bytes,
            lower_bound=self.bound,
            seconds=self._limit.elapsed,
            message=message,
            incumbent=None if best is None else partial(expand, self.wiring, best.sequence),
        )
        _log.info("%s", progress)
        self._report(progress)
