"""The rounds of `refine`: what comes when, where to look next, and when it is done."""

from __future__ import annotations

import math
import time

import numpy as np

from remat_solvers.bounds.bottleneck import bottleneck
from remat_solvers.bounds.exhaust import exhaust
from remat_solvers.bounds.least import least
from remat_solvers.bounds.regression import regress
from remat_solvers.core.milp import Answer, Outcome
from remat_solvers.core.trace import sequence_time, trace
from remat_solvers.core.wiring import Ints
from remat_solvers.refine.heuristics import Heuristics
from remat_solvers.refine.moments import Refinement
from remat_solvers.refine.programs import Programs
from remat_solvers.refine.state import State

__all__ = ["Rounds"]

_AT_ONCE = 2  # refinements

# Of the time left, for one integer program: large ones raise their bounds late.
_PROGRAM_SHARE, _LARGE_PROGRAM_SHARE, _LAST_PROGRAM_SHARE = 1 / 8, 4 / 5, 19 / 20
_LEAST_PROGRAM_SECONDS = 1.0
_LONGER = 1.5  # after a program that was stopped
_MOST_OF_GAP = 0.4
_MOST_AGAIN = 2

_WIDE_GAP = 0.01  # after the second program
_REGRESSION_SHARE = 0.1  # of the time left
_POLISH_BEFORE_LARGE = 0.2  # of the time left
_POLISH, _LEAST_POLISH = 0.3, 0.04  # of the time for one integer program, beside and after it


class Rounds:
    """The course of one solve; what comes of it is in the state."""

    def __init__(self, state: State, start: Ints | None = None) -> None:
        self._state = state
        self._given = start
        self._heuristics = Heuristics(state)
        self._programs = Programs(state, self._heuristics)

    def run(self) -> None:
        """Work until closed, infeasible, out of refinements, or out of time."""
        state = self._state
        everything = trace(state.wiring, np.arange(state.wiring.op_count))
        state.offer(everything)
        if state.closed(0.0):
            return state.say("storing everything fits")
        if least(state.wiring).peak_bytes > state.budget_bytes:
            state.infeasible = True
            return state.say("one op alone needs more than the budget")
        self._heuristics.start(everything, self._given)
        if state.best is None:
            proved = bottleneck(state.wiring, state.soon())
            until = min(state.soon(), time.perf_counter() + _REGRESSION_SHARE * state.left())
            proved = regress(state.wiring, proved, until, enough_bytes=state.budget_bytes)
            state.infeasible = proved.peak_bytes > state.budget_bytes
            if state.infeasible:
                return state.say("nothing fits: the least peak is above the budget")
            self._heuristics.descend()
        state.say("repaired storing everything")
        self._refine(Refinement(frozenset({int(everything.during.argmax())}), frozenset()))
        if not state.infeasible and not state.closed(0.0):
            self._exhaust()
        if not state.infeasible:
            self._polish(state.left())
        return None

    def _refine(self, tried: Refinement) -> None:
        """Solve, look where the schedule is over budget, refine there; more time if it stalls."""
        state = self._state
        tried = self._programs.sketch(tried)
        pending: list[Refinement] = []
        again, begun, first = 0, None, True
        share, polish = _PROGRAM_SHARE, _POLISH
        if self._programs.sketch_is_large:
            self._polish(_POLISH_BEFORE_LARGE * state.left() - self._heuristics.polish_seconds)
            share = _LARGE_PROGRAM_SHARE
        seconds = max(_LEAST_PROGRAM_SECONDS, share * state.left())
        while not state.enough() or self._is_worth_a_round():
            limit = min(state.left(), seconds)
            before, polished = state.best_time, self._heuristics.polish_seconds
            relaxation, answer = self._programs.solve(tried, limit, begun)
            begun = None
            if answer.outcome is Outcome.INFEASIBLE:
                state.infeasible = state.best is None
                return state.say("the program is infeasible")
            state.learn(answer.bound)
            built = self._heuristics.build(relaxation, answer)
            if state.round == 1:
                self._programs.reserve(tried)
            elif state.round == 2 and not state.closed(_WIDE_GAP):
                self._heuristics.plan_chain()
            beside = self._heuristics.polish_seconds - polished
            self._polish(min(state.left() / 2, polish * seconds - beside))
            polish = _POLISH if state.best_time < before else max(polish / 2, _LEAST_POLISH)
            state.say(f"{len(tried.checkpoints)} checkpoints, {len(tried.running)} running rows")
            seen = [] if built is None else self._programs.where(built, tried)
            pending = [r for r in seen or pending if not tried >= r]
            if answer.outcome is not Outcome.SOLVED:
                seconds *= _LONGER
                if again < _MOST_AGAIN and self._is_worth_closing(answer):
                    seconds = _LAST_PROGRAM_SHARE * state.left()
                    again, begun = again + 1, answer.point
                    continue
            elif not pending:
                break
            for refinement in pending[:_AT_ONCE]:
                tried |= refinement
            pending = pending[_AT_ONCE:]
            tried = self._programs.start_anew(tried) if first else self._programs.stronger(tried)
            first = False
            again = 0
        return None

    def _polish(self, seconds: float) -> None:
        self._heuristics.polish(seconds, by_parts=not self._programs.last_is_small)

    def _is_worth_a_round(self) -> bool:
        """Ask for one integer program where it is small, even if relaxations were enough."""
        state = self._state
        first = self._programs.last_is_moderate and state.round == 0
        return first and not state.closed(0.0) and state.left() > 0

    def _is_worth_closing(self, answer: Answer) -> bool:
        """Say whether most of the gap would be closed if this program were solved to its end."""
        state = self._state
        if not (math.isfinite(answer.bound) and math.isfinite(answer.value)):
            return False
        risen = state.time_of(answer.value) - state.bound
        return risen > _MOST_OF_GAP * (state.best_time - state.bound)

    def _exhaust(self) -> None:
        """Close what the program leaves open on a small graph."""
        state = self._state
        found = exhaust(state.wiring, state.budget_bytes, state.deadline)
        if found is None:
            return
        if found.sequence is None:
            state.infeasible = state.best is None
            return
        state.offer(trace(state.wiring, found.sequence))
        state.bound = max(state.bound, sequence_time(state.wiring, found.sequence) * (1 - 1e-9))
        state.say("searched all states")
