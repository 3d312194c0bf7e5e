"""The rounds of `refine`: what comes when, where to look next, and when it is done."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from remat_graph import Graph
from remat_solvers.bounds.bottleneck import bottleneck
from remat_solvers.bounds.exhaustive import exhaust
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.bounds.regression import regress
from remat_solvers.core.alternatives import Alternatives, store_all_sequence
from remat_solvers.core.milp import Answer, Outcome
from remat_solvers.core.problem import Limit, Progress
from remat_solvers.core.trace import Trace, sequence_time, trace
from remat_solvers.core.wiring import Ints, Wiring, sequence_of
from remat_solvers.refine.heuristics import Heuristics
from remat_solvers.refine.programs import Programs
from remat_solvers.refine.refinements import Refinement, places
from remat_solvers.refine.state import FAR, State
from remat_solvers.search.repair import prune_multi
from remat_solvers.search.selection import arrange, first_choices
from remat_solvers.search.unfolding import unfold

__all__ = ["Rounds"]

_AT_ONCE, _AT_ONCE_OF_ALTERNATIVES = 2, 4  # refinements
_LEAST_TURN_SECONDS = 0.2

# Of the time left, for one integer program: large ones raise their bounds late.
_PROGRAM_SHARE, _LARGE_PROGRAM_SHARE, _LAST_PROGRAM_SHARE = 1 / 8, 4 / 5, 19 / 20
_FAR_SHARE = 1 / 16  # far from the bound, where two kinds of programs take turns
_LEAST_PROGRAM_SECONDS = 1.0
_LONGER = 1.5  # after a program that was stopped
_MOST_OF_GAP, _MUCH_OF_GAP = 0.15, 0.03
_BEHIND = 0.05  # of the recomputation that is proved
_MOST_AGAIN = 2

_LEANEST_SHARE = 1 / 2  # of the time left, for the ways of storing everything in least
_WIDE_GAP = 0.01  # after the second program
_REGRESSION_SHARE = 0.1  # of the time left
_POLISH_BEFORE_LARGE = 0.2  # of the time left
_POLISH, _LEAST_POLISH = 0.3, 0.04  # of the time for one integer program, beside and after it


class Rounds:
    """The course of one solve; what comes of it is in the state."""

    def __init__(
        self,
        state: State,
        starts: Sequence[Ints] = (),
        checkpoints: frozenset[int] = frozenset(),
        everything: list[Trace] | None = None,
    ) -> None:
        self._state = state
        self._stored = everything
        self._first_checkpoints = checkpoints
        self.checkpoints = checkpoints  # of the last program
        self._starts = starts
        self._heuristics = Heuristics(state)
        self._programs = Programs(state, self._heuristics)
        self._searched = math.inf  # the time of a schedule around which nothing was found
        self._planned: set[Graph] = set()
        self._has_alternatives = state.wiring.graph.has_alternatives

    def run(self) -> None:
        """Work until closed, infeasible, out of refinements, or out of time."""
        state = self._state
        everything = self._start()
        if everything is None:
            return None
        if state.best is None:
            proved = bottleneck(state.wiring, state.soon())
            until = min(state.soon(), time.perf_counter() + _REGRESSION_SHARE * state.left())
            proved = regress(state.wiring, proved, until, enough_bytes=state.budget_bytes)
            if proved.peak_bytes > state.budget_bytes:
                state.refuse()
                return state.say("nothing fits: the minimal peak is above the budget")
        if self._heuristics.far_too_slow:
            self._heuristics.descend()
        state.say("repaired storing everything")
        self._refine(_at_peak(state.wiring, everything[0]))
        if not self._has_alternatives and not state.infeasible and not state.closed(0.0):
            self._exhaust()
        if not state.infeasible:
            self._polish(state.left(), thorough=True)
        return None

    def feasibility_rounds(self) -> None:
        """Solve programs without first schedules, from where storing everything holds most."""
        self._refine(_at_peak(self._state.wiring, self.everything[0]))

    def quick_start(self) -> None:
        """Find what is found without looking far: no program of this graph, and no proof."""
        if self._start() is not None:
            self._state.say("quick start")

    def _start(self) -> list[Trace] | None:
        """Find first schedules around those that store everything; return these, unless done."""
        state = self._state
        everything = self.everything
        state.offer(everything[0])
        if state.closed(0.0):
            state.say("storing everything fits")
            return None
        if peak_bound(state.wiring).peak_bytes > state.budget_bytes:
            state.refuse()
            state.say("one op alone needs more than the budget")
            return None
        self._heuristics.start(everything, self._starts)
        if self._has_alternatives:
            state.say("first schedules")
            leanest = min(everything, key=lambda stored: stored.peak_bytes)
            self._refine_unfolded(leanest, _LEANEST_SHARE * state.left())
        return everything

    @property
    def everything(self) -> list[Trace]:
        """The schedules that store everything; with alternatives, the fastest comes first."""
        if self._stored is None:
            wiring = self._state.wiring
            self._stored = [trace(wiring, store_all_sequence(wiring))]
            if self._has_alternatives:
                alternatives = Alternatives.of(wiring)
                ways = (
                    arrange(wiring, alternatives, way)
                    for way in first_choices(wiring, alternatives)
                )
                self._stored += [stored for stored in ways if stored is not None]
        return self._stored

    def _refine(self, refinement: Refinement) -> None:
        """Solve, look where the schedule is over budget, refine there; more time if it stalls.

        Far from the bound, unless that proved much more, by turns with programs whose checkpoints
        are chosen by what they prove.
        """
        state = self._state
        if self._first_checkpoints:
            refinement |= Refinement(self._first_checkpoints, frozenset())
        else:
            refinement = self._programs.sketch(refinement)
        self._balance_search_time()
        pending: list[Refinement] = []
        again, start_point, first, exactly = 0, None, not self._first_checkpoints, False
        grown = self._programs.grow() if self._programs.sketch_is_large else None
        share, polish = _PROGRAM_SHARE, _POLISH
        if self._programs.sketch_is_large:
            self._polish(_POLISH_BEFORE_LARGE * state.left() - self._heuristics.polish_seconds)
            share = _LARGE_PROGRAM_SHARE
        if state.best is not None and state.bound > state.once and not state.closed(FAR):
            share = _FAR_SHARE
        seconds = max(_LEAST_PROGRAM_SECONDS, share * state.left())
        while not state.enough() or self._is_worth_a_round():
            limit = min(state.left(), seconds)
            before, polished = state.best_time, self._heuristics.polish_seconds
            started = time.perf_counter()
            now = refinement if grown is None else grown
            relaxation, answer = self._programs.solve(now, limit, start_point, exactly=exactly)
            self.checkpoints = now.checkpoints
            start_point = None
            if answer.outcome is Outcome.INFEASIBLE:
                state.refuse(state.back_end)
                return state.say("the program is infeasible")
            risen = state.time_of(answer.bound) - state.bound
            much = risen > _MUCH_OF_GAP * (state.best_time - state.bound)
            state.learn(answer.bound)
            built = self._heuristics.build(relaxation, answer)
            self._balance_search_time()
            if state.round == 1:
                self._programs.reserve(now)
                self._balance_search_time()
            elif state.round == 2 and not state.closed(_WIDE_GAP):
                self._heuristics.plan_chain()
            beside = self._heuristics.polish_seconds - polished
            turn = polish * seconds
            if self._has_alternatives:
                turn = min(turn, max(_LEAST_TURN_SECONDS, time.perf_counter() - started))
                if state.best is not None:
                    self._refine_unfolded(state.best, turn)
            self._polish(min(state.left() / 2, turn - beside))
            polish = _POLISH if state.best_time < before else max(polish / 2, _LEAST_POLISH)
            state.say(f"{len(now.checkpoints)} checkpoints, {len(now.running)} running rows")
            solved = answer.outcome is Outcome.SOLVED
            if not solved:
                seconds *= _LONGER
                if again < _MOST_AGAIN and self._is_worth_closing(answer):
                    seconds = _LAST_PROGRAM_SHARE * state.left()
                    again, start_point = again + 1, answer.point
                    continue
            again = 0
            if grown is None:
                over_budget = [] if built is None else self._programs.where(built, refinement)
                pending = [r for r in over_budget or pending if not refinement >= r]
                if solved and not pending:
                    if not self._programs.last_was_loose:
                        break
                    exactly = True
                    continue
                exactly = False
                at_once = _AT_ONCE_OF_ALTERNATIVES if self._has_alternatives else _AT_ONCE
                for next_one in pending[:at_once]:
                    refinement |= next_one
                pending = pending[at_once:]
                prefer = self._programs.start_anew if first else self._programs.stronger
                refinement, much, first = prefer(refinement), much and not first, False
            grown = self._programs.grow() if grown is None and not much else None
        return None

    def _refine_unfolded(self, start: Trace, seconds: float) -> None:
        """Refine the ordinary graph of a schedule: its implementations stay, all else may change.

        Not twice for the same ones. Reports what is faster as soon as it is found.
        """
        state = self._state
        if state.enough():
            return
        unfolded = unfold(state.wiring, start)
        if unfolded.wiring.graph in self._planned:
            return
        self._planned.add(unfolded.wiring.graph)

        def tell(progress: Progress, /) -> None:
            incumbent_time = progress.incumbent_time
            if (
                progress.incumbent is not None
                and incumbent_time is not None
                and incumbent_time < state.best_time
            ):
                sequence = sequence_of(unfolded.wiring, progress.incumbent())
                state.offer(unfolded.fold(trace(unfolded.wiring, sequence)))
                state.say("with the implementations of a schedule")

        seconds = max(0.0, min(state.left(), seconds))
        limit = Limit.starting_now(seconds)
        inner = State(
            unfolded.wiring, state.budget_bytes, time.perf_counter() + seconds, limit, tell,
            back_end=state.back_end,
        )  # fmt: skip
        Rounds(inner, [unfolded.start.sequence]).run()
        if inner.best is not None:
            folded = unfolded.fold(inner.best)
            state.offer(
                prune_multi(state.wiring, folded, state.budget_bytes, deadline=state.deadline)
            )

    def _balance_search_time(self) -> None:
        """Far from the bound, look for schedules for as long as was spent on other things.

        Not before a program has shown how far it is, nor again around one where that found none.
        """
        state = self._state
        if state.bound <= state.once or state.closed(FAR):
            return
        seconds = state.spent() - 2 * self._heuristics.polish_seconds
        before = state.best_time
        if seconds >= _LEAST_TURN_SECONDS and before != self._searched:
            self._heuristics.polish(seconds, by_parts=False)
            if state.best_time == before:
                self._searched = before

    def _polish(self, seconds: float, *, thorough: bool = False) -> None:
        by_parts = not self._programs.last_is_small
        self._heuristics.polish(seconds, by_parts=by_parts, thorough=thorough)

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
        behind = state.bound - state.time_of(answer.bound)
        if behind > _BEHIND * (state.bound - state.once):
            return False
        risen = state.time_of(answer.value) - state.bound
        return risen > _MOST_OF_GAP * (state.best_time - state.bound)

    def _exhaust(self) -> None:
        """Close what the program leaves open on a small graph."""
        state = self._state
        result = exhaust(state.wiring, state.budget_bytes, state.deadline)
        if result is None:
            return
        if result.sequence is None:
            state.refuse()
            return
        state.offer(trace(state.wiring, result.sequence))
        state.prove(sequence_time(state.wiring, result.sequence) * (1 - 1e-9))
        state.say("searched all states")


def _at_peak(wiring: Wiring, now: Trace) -> Refinement:
    """Choose the op, or group, at whose place a schedule holds most."""
    owed, first = places(wiring, now)
    at = int(np.searchsorted(first, now.during.argmax(), side="right")) - 1
    return Refinement(frozenset({int(owed[max(0, at)])}), frozenset())
