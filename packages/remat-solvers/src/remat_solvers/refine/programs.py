"""The programs of `refine`: written for a refinement, solved, their bounds and schedules taken.

Linear relaxations choose the first checkpoints (`sketch`) unless the first program is small; then
the ops that leave least room are next (`start_anew`). A large program begins with its linear
relaxation, and a very large one ends there (`solve`). Near the bound, before a large one, its
checkpoints are compared with those where the fastest schedule is fullest (`stronger`). The first is
solved anew with reserves, for schedules that overshoot less (`reserve`). Far from the bound,
checkpoints are also chosen by what the linear relaxation proves with them (`grow`). Linear
relaxations raise the bound of the state; of the answer of `solve` the caller makes use. While a
program is solved, the fastest schedule is improved. Source: decisions 0016, 0017, 0019, 0020, 0045
and 0046; Minoux 1978, "Accelerated greedy algorithms for maximizing submodular set functions".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from remat_solvers.bounds.peak import while_running
from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.incumbent import TOLERANCE
from remat_solvers.core.milp import Answer, Outcome, relaxed, solve_program
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Floats
from remat_solvers.refine.heuristics import Heuristics
from remat_solvers.refine.point import embed
from remat_solvers.refine.refinements import Refinement, fullest, nearly_full, refinements, tightest
from remat_solvers.refine.relaxation import COST_OF_ONCE, Relaxation, relax
from remat_solvers.refine.state import FAR, GAP, State

__all__ = ["Programs"]

_SMALL_COLUMNS = 500
# Beyond the first the linear relaxation comes first, beyond the second alone: HiGHS takes long, and
# does not stop when asked to.
_LARGE_COLUMNS = 3_000
_TOO_LARGE_COLUMNS = 50_000
_TIME_STEPS = 6  # over budget, that are looked at

_SKETCH_SHARE = 0.15  # of the time left, for each pass
_SHARE_OF_GAP = 0.01  # between schedule and bound, to which a program is worth solving
_RISE, _RISE_IN_PAIRS = 0.1, 0.02  # of the proved recomputation, or of so many times the gap:
_TIMES_THE_GAP = 10
_FRUITLESS = 3
_COMPARE_SHARE = 0.1  # of the time left
_GROWN, _MOST_GROWN = 2, 4  # checkpoints at once
_LEAST_GAIN = 1e-6 * COST_OF_ONCE  # of a checkpoint, by which the relaxation proves more
_AS_STRONG = 0.01  # of the strongest bound, within which the smallest program is taken

_TIGHTEST_SHARE = 0.05  # of the time left
_RISE_TIGHTEST = 1e-3  # of the bound of the relaxation
_FRUITLESS_TIGHTEST = 4  # ops
_LEAST_BY_PARTS_SECONDS = 1.0

_HEAVY = 0.5  # of the budget

_RESERVES = (0.02, 0.05, 0.08)  # of the budget
_RESERVE_SECONDS, _RESERVE_SHARE = 1.0, 1 / 8
_RESERVE_GAP = 3e-3

_NOTHING = Refinement(frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class _Sketch:
    """A refinement that was chosen by linear relaxations, and its own."""

    chosen: Refinement
    relaxation: Relaxation
    answer: Answer


class Programs:
    """Remembers how large the program written last was, and what the sketch ended with."""

    def __init__(self, state: State, heuristics: Heuristics) -> None:
        self._state = state
        self._heuristics = heuristics
        self._columns = 0
        self._sketched: _Sketch | None = None
        self._compared: set[Refinement] = set()
        self._grown: _Sketch | None = None
        self._gains: dict[int, float] = {}  # of each checkpoint, when it was last tried
        self._loose = False

    @property
    def last_is_small(self) -> bool:
        """Whether the program written last, if any, is solved in an instant."""
        return self._columns < _SMALL_COLUMNS

    @property
    def last_was_loose(self) -> bool:
        """Whether the program solved last was solved less far than it can be."""
        return self._loose

    @property
    def last_is_moderate(self) -> bool:
        """Whether a program was written, and the last one is not large."""
        return 0 < self._columns < _LARGE_COLUMNS

    @property
    def sketch_is_large(self) -> bool:
        """Whether the sketch ended with a large program."""
        return self._sketched is not None and self._sketched.relaxation.columns > _LARGE_COLUMNS

    def sketch(self, refinement: Refinement) -> Refinement:
        """Choose checkpoints by linear relaxations, which take an instant, while the bound rises.

        First the next two are added while it rises much; then, with tighter relaxations, they also
        take the place of others. Not where the integer program takes an instant too: where it is
        over budget shows more.
        """
        near = max(1, self._state.wiring.op_count // 50)
        refinement = self._climb(refinement, Refinement.next_two, _RISE, paired=False)
        if self._sketched is None:
            return refinement
        moves = partial(Refinement.moves, near=near)
        return self._climb(refinement, moves, _RISE_IN_PAIRS, paired=True)

    def start_anew(self, refinement: Refinement) -> Refinement:
        """Start anew from the ops that leave the least room, unless the first program was large.

        From as many of them as still raise the bound of the linear relaxation, if more than one.
        """
        state = self._state
        if self._sketched is not None or state.enough():
            return refinement
        until = time.perf_counter() + _TIGHTEST_SHARE * state.left()
        ops = tightest(state.wiring, state.budget_bytes)
        best: _Sketch | None = None
        since = 0
        for count in range(1, len(ops) + 1):
            seconds = until - time.perf_counter()
            if since == _FRUITLESS_TIGHTEST or seconds <= 0:
                break
            sketch = self._solve_relaxed(Refinement(frozenset(ops[:count]), frozenset()), seconds)
            since += 1
            if best is None or sketch.answer.bound > (1 + _RISE_TIGHTEST) * best.answer.bound:
                best, since = sketch, 0
        if best is None or len(best.chosen.checkpoints) == 1:
            return refinement
        self._sketched = best
        return best.chosen

    def stronger(self, refinement: Refinement) -> Refinement:
        """Prefer the checkpoints where the fastest schedule is fullest, if these prove more.

        By linear relaxations, near the bound, and only in place of a large program.
        """
        state = self._state
        if state.best is None or state.enough() or self._columns > _TOO_LARGE_COLUMNS:
            return refinement
        if not state.closed(FAR) or self._relax(refinement).columns <= _LARGE_COLUMNS:
            return refinement
        others = [
            other
            for other in fullest(state.wiring, state.best, state.budget_bytes)
            if other not in self._compared and not refinement >= other
        ]
        if not others:
            return refinement
        self._compared.update(others)
        until = time.perf_counter() + _COMPARE_SHARE * state.left()
        sketches = [self._solve_relaxed(refinement, until - time.perf_counter())]
        for other in others:
            seconds = until - time.perf_counter()
            if seconds > 0:
                sketches.append(self._solve_relaxed(other, seconds))
        strongest = max(sketches, key=lambda sketch: sketch.answer.bound)
        enough = strongest.answer.bound - _AS_STRONG * abs(strongest.answer.bound)
        able = [s for s in sketches if s is strongest or s.answer.bound >= enough]
        self._sketched = min(able, key=lambda sketch: sketch.relaxation.columns)
        return self._sketched.chosen

    def grow(self) -> Refinement | None:
        """Far from the bound, choose checkpoints by what they prove: two more than the last time.

        At first, as many as prove what is known, up to four. `None` if no other proves more, or
        there is no time to see which do.
        """
        state = self._state
        if state.best is None or state.enough() or state.closed(FAR):
            return None
        if self._columns > _TOO_LARGE_COLUMNS:
            return None
        until = time.perf_counter() + _COMPARE_SHARE * state.left()
        bound, before = state.bound, self._grown
        for count in range(_MOST_GROWN if before is None else _GROWN):
            if count >= _GROWN and state.bound > bound:
                break
            more = self._with_one_more(self._grown, until)
            if more is None:
                break
            self._grown = more
        if self._grown is None or self._grown is before:
            return None
        self._sketched = self._grown
        return self._grown.chosen

    def _with_one_more(self, grown: _Sketch | None, until: float) -> _Sketch | None:
        """Add the checkpoint with which the linear relaxation proves most, if any proves more.

        Of the ops where the fastest schedule is nearly full. None is expected to raise the bound by
        more than when it was last tried, so most need not be tried again.
        """
        state = self._state
        if state.best is None:
            return None
        refinement = _NOTHING if grown is None else grown.chosen
        base = 0.0 if grown is None else grown.answer.bound
        best, most = None, _LEAST_GAIN
        ops = (
            set(nearly_full(state.wiring, state.best, state.budget_bytes)) - refinement.checkpoints
        )
        for op in sorted(ops, key=lambda op: (-self._gains.get(op, math.inf), op)):
            seconds = until - time.perf_counter()
            if seconds <= 0 or self._gains.get(op, math.inf) <= most:
                break
            sketch = self._solve_relaxed(
                refinement | Refinement(frozenset({op}), frozenset()), seconds
            )
            if sketch.answer.outcome is Outcome.SOLVED:
                gain = self._gains[op] = sketch.answer.bound - base
                if gain > most:
                    best, most = sketch, gain
        return best

    def solve(
        self,
        refinement: Refinement,
        seconds: float,
        start_point: Floats | None,
        *,
        exactly: bool = False,
    ) -> tuple[Relaxation, Answer]:
        """Solve a program, which is one round; unless `exactly`, as far as the gap is worth."""
        state = self._state
        relaxation = self._relax(refinement)
        if self._columns > _LARGE_COLUMNS:
            too_large = self._columns > _TOO_LARGE_COLUMNS
            sketch = self._sketched
            if (
                sketch is None
                or sketch.chosen != refinement
                or sketch.answer.outcome is Outcome.STOPPED
            ):
                sketch = self._sketched = self._solve_relaxed(refinement, seconds)
            tighter, answer = sketch.relaxation, sketch.answer
            if too_large or answer.outcome is Outcome.INFEASIBLE or state.enough():
                state.round += 1
                return tighter, answer
            self._heuristics.build(tighter, answer)
            state.say("the linear relaxation of the next program")
            seconds = min(state.left(), seconds)
        start = self._start(relaxation, start_point)
        least = 0.0 if self._columns < _LARGE_COLUMNS else GAP
        gap = least if exactly else max(least, self._worth_closing())
        self._loose = gap > least
        wide = state.best_time - state.bound
        proved = state.bound / state.once if state.once else 1.0  # ops may take no time
        answer = solve_program(
            relaxation.program,
            seconds=seconds,
            gap=gap,
            start=start,
            target=COST_OF_ONCE * (proved * (1 + TOLERANCE) - 1),
            apart=wide / state.once if state.once and state.best is not None else None,
            back_end=state.back_end,
            meanwhile=self._polish,
        )
        state.round += 1
        return relaxation, answer

    def _worth_closing(self) -> float:
        """Say how near to its optimum a program is to be solved, relative to that.

        While schedules are far from the bound, to a share of what is between them.
        """
        state = self._state
        if state.best is None or state.closed(FAR):
            return 0.0
        return _SHARE_OF_GAP * (state.best_time - state.bound) / (state.best_time - state.once)

    def reserve(self, refinement: Refinement) -> None:
        """Build from programs with less room, whose schedules overshoot less; prune then."""
        state = self._state
        for share in _RESERVES:
            if state.enough() or self._columns > _TOO_LARGE_COLUMNS:
                break
            relaxation = relax(
                state.wiring,
                state.budget_bytes,
                sorted(refinement.checkpoints),
                reserves=dict.fromkeys(refinement.checkpoints, int(share * state.budget_bytes)),
            )
            seconds = min(_RESERVE_SECONDS, _RESERVE_SHARE * state.left())
            answer = solve_program(
                relaxation.program, seconds=seconds, gap=_RESERVE_GAP, back_end=state.back_end
            )
            self._heuristics.build(relaxation, answer)

    def where(self, built: Trace, refinement: Refinement) -> list[Refinement]:
        """List refinements for the time steps where a built schedule is most over budget."""
        return refinements(
            self._state.wiring, built, self._state.budget_bytes, refinement, _TIME_STEPS
        )

    def _climb(
        self,
        refinement: Refinement,
        moves: Callable[[Refinement, list[Refinement]], list[Refinement]],
        rise: float,
        *,
        paired: bool,
    ) -> Refinement:
        """Go to moves that raise the bound by a share `rise` of itself, or of a wide gap."""
        state = self._state
        until = time.perf_counter() + _SKETCH_SHARE * state.left()
        risen = state.once
        pending, since = [refinement], 0
        while pending and since < _FRUITLESS and time.perf_counter() < until:
            if state.enough():
                break
            sketched = pending.pop(0)
            relaxation = self._relax(sketched, paired=paired)
            if self.last_is_small:
                break
            sketch = self._solve_relaxed(sketched, until - time.perf_counter(), relaxation)
            built = self._heuristics.build(relaxation, sketch.answer)
            state.say(f"{len(sketched.checkpoints)} checkpoints, linear relaxation")
            reached = state.time_of(sketch.answer.bound)
            since += 1
            gap = state.best_time - risen
            if reached - risen > rise * min(risen - state.once, _TIMES_THE_GAP * gap):
                refinement, risen, since = sketched, reached, 0
                self._sketched = sketch
                pending = [] if built is None else moves(refinement, self.where(built, refinement))
        return refinement

    def _relax(self, refinement: Refinement, *, paired: bool = False) -> Relaxation:
        relaxation = relax(
            self._state.wiring,
            self._state.budget_bytes,
            sorted(refinement.checkpoints),
            running=sorted(refinement.running | self._members(refinement)),
            splits=sorted(refinement.splits),
            paired=paired,
        )
        self._columns = relaxation.columns
        return relaxation

    def _members(self, refinement: Refinement) -> set[tuple[int, int]]:
        """List the heavy ways of groups at checkpoints: one that does not open runs in the segment.

        Without a row of its own what it needs counts nowhere.
        """
        alternatives = Alternatives.of(self._state.wiring)
        heavy = while_running(self._state.wiring) > _HEAVY * self._state.budget_bytes
        chosen = (c for c in refinement.checkpoints if alternatives.chosen[c])
        return {(c, p) for c in chosen for p in alternatives.members(c).tolist() if heavy[p]}

    def _solve_relaxed(
        self, refinement: Refinement, seconds: float, relaxation: Relaxation | None = None
    ) -> _Sketch:
        """Solve the linear relaxation, and raise the bound."""
        if relaxation is None:
            relaxation = self._relax(refinement, paired=True)
        answer = solve_program(
            relaxed(relaxation.program),
            seconds=seconds,
            back_end=self._state.back_end,
            meanwhile=self._polish,
        )
        self._state.learn(answer.bound)
        return _Sketch(refinement, relaxation, answer)

    def _polish(self, seconds: float) -> None:
        """Improve the fastest schedule while a program is solved; in short turns not by parts."""
        state = self._state
        before = state.best_time
        by_parts = seconds >= _LEAST_BY_PARTS_SECONDS and not self.last_is_small
        self._heuristics.polish(seconds, by_parts=by_parts)
        if state.best_time < before:
            state.say("improved while a program is solved")

    def _start(self, relaxation: Relaxation, start_point: Floats | None) -> Floats | None:
        """Take the better of two starts: the fastest schedule and an earlier point."""
        starts = (
            [] if start_point is None or len(start_point) != relaxation.columns else [start_point]
        )
        if self._state.best is not None:
            starts.append(embed(self._state.wiring, relaxation, self._state.best))
        return min(starts, key=relaxation.program.cost.dot, default=None)
