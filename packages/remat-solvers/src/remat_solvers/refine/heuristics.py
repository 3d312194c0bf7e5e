"""Schedules without a proof: found at first, built from points of programs, and improved.

A first schedule comes of repairing the given one and storing everything, where values have several
implementations by each kind of them; while nothing fits, or where the gap stays wide, of repairing
in other ways; while nothing fits, of running the ops within the budget in one pass; at last of a
descent to the minimal peak. A graph that is a chain of blocks is also planned as one: on long
chains of which little fits, nothing else here finds what that does. What is found is pruned and
offered to the state, which keeps the fastest. With several implementations all of this works on the
ordinary graph of a sequence (`unfolding`). Guarantee: what is kept fits; nothing is proved.
Complexity: each attempt has its time (`State.soon`). Source: ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial

from remat_solvers.chains.chain import find_chains, merged
from remat_solvers.chains.costs import measure_stages
from remat_solvers.chains.search import MOST_STAGES, SLOTS, ChainSearch
from remat_solvers.core.milp import Answer
from remat_solvers.core.problem import Limit, Problem, silent
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Ints, expand, in_order
from remat_solvers.refine.construct import construct
from remat_solvers.refine.neighbourhood import Neighbourhood
from remat_solvers.refine.point import read_point
from remat_solvers.refine.relaxation import Relaxation
from remat_solvers.refine.state import FAR, State
from remat_solvers.search.descent import descend_to, minimal_peak_trace
from remat_solvers.search.local_search import local_search, restarted_search
from remat_solvers.search.one_pass import evict_in_one_pass
from remat_solvers.search.perturbations import (
    EVICTION_PERTURBATIONS,
    ONE_PASS_PERTURBATIONS,
    EvictionPerturbation,
    OnePassPerturbation,
)
from remat_solvers.search.prune import prune
from remat_solvers.search.repair import prune_multi, repaired
from remat_solvers.search.unfolding import Keeps, Unfolded, unfold

__all__ = ["Heuristics"]

_START_SHARE = 0.1  # of the time left, where there are several schedules to begin with
_WIDE_GAP = 0.05  # beyond which all first schedules are tried
_DESCENT_SHARE = 0.4  # of the time left
_GAP_TO_TRY_MORE = 0.01
_MOST_OPS_OF_CHAIN = 5_000  # cut and measured in half a second, whatever the limit
_CHAIN_SHARE, _LEAST_CHAIN_SECONDS = 0.1, 0.1  # the first: of the time left
_BY_PARTS = 0.75  # of the time for improving schedules
_PATIENCE, _PATIENCE_AT_END = 8, 40  # steps by parts without a gain
_MOST_MORE = 2.0  # times what the best recomputes, of one that is not yet pruned
_MOST_AGAIN = 2.0  # computes everything so often again


class Heuristics:
    """What looks for schedules and needs no bound; keeps what its neighbourhood has learnt."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._neighbourhood = Neighbourhood(
            state.wiring, state.budget_bytes, back_end=state.back_end
        )
        self._others: list[Callable[[], None]] = []  # first schedules that were not tried yet
        self._seed = 0
        self._polish_seconds = 0.0

    def start(self, everything: Sequence[Trace], sequences: Sequence[Ints]) -> None:
        """Find a schedule that fits without a program, by whatever gives one first.

        `everything` are schedules that store all, by one kind of implementations each. Out of time,
        one that fits is enough.
        """
        wiring, usual = self._state.wiring, EVICTION_PERTURBATIONS[0]
        unfolded = cache(partial(unfold, wiring))
        first = [
            *(partial(self._repair, trace(wiring, sequence), usual) for sequence in sequences),
            *(partial(self._repair_unfolded, stored, unfolded) for stored in everything),
        ]
        for begin in first:
            if self._state.best is None or self._state.left() > 0:
                begin()
        until = time.perf_counter() + _START_SHARE * self._state.left()
        for stored in everything:
            is_due = stored is everything[0] and self._state.best is None
            if is_due or time.perf_counter() < until:
                self._repair(stored, usual)
        self._others = [
            partial(self._repair, stored, eviction)
            for eviction in EVICTION_PERTURBATIONS[1:]
            for stored in everything
        ]
        passes = (
            partial(self._run_in_one_pass, unfolded(stored), perturbation, None)
            for perturbation in ONE_PASS_PERTURBATIONS
            for stored in everything
        )
        while self._state.best is None:
            attempt = self._others.pop(0) if self._others else next(passes, None)
            if attempt is None:
                break
            attempt()

    @property
    def far_too_slow(self) -> bool:
        """Whether all that was found computes everything some times over."""
        state = self._state
        return state.best_time > (1 + _MOST_AGAIN) * state.once

    def descend(self) -> None:
        """Look for a peak within the budget whatever the time, for a share of what is left."""
        state = self._state
        until = time.perf_counter() + _DESCENT_SHARE * state.left()
        if state.wiring.graph.has_alternatives:
            self._offer_pruned(minimal_peak_trace(state.wiring, until))
        else:
            self._offer_pruned(descend_to(state.wiring, state.budget_bytes, until))

    def build(self, relaxation: Relaxation, answer: Answer) -> Trace | None:
        """Build, repair and offer the schedule of a point; return it as it was built."""
        state = self._state
        if answer.point is None:
            return None
        stagewise = read_point(relaxation, answer.point)
        sequence = construct(state.wiring, stagewise)
        if sequence is None:
            return None
        built = trace(state.wiring, sequence)
        for perturbation in (
            EVICTION_PERTURBATIONS if state.round > 1 else EVICTION_PERTURBATIONS[:1]
        ):
            self._repair(built, perturbation)
            if state.closed(_GAP_TO_TRY_MORE) or state.left() <= 0:
                break
        unfolded = cache(partial(unfold, state.wiring))
        self._repair_unfolded(built, unfolded)
        if state.best is None:
            self._run_in_one_pass(unfolded(built), ONE_PASS_PERTURBATIONS[0], stagewise.keeps)
        return built

    def plan_chain(self) -> None:
        """Offer the schedule of a chain of blocks, if there is one in the order of the graph."""
        state = self._state
        seconds = _CHAIN_SHARE * state.left()
        if (
            state.wiring.graph.has_alternatives
            or seconds < _LEAST_CHAIN_SECONDS
            or state.wiring.op_count > _MOST_OPS_OF_CHAIN
        ):
            return
        wiring = state.wiring
        chains = find_chains(wiring)
        if isinstance(chains, str):
            return
        problem = Problem(wiring.graph, state.budget_bytes)
        search = ChainSearch("refine", problem, Limit.starting_now(seconds), silent)
        for chain in chains:
            search.fill(measure_stages(wiring, merged(wiring, chain, MOST_STAGES)), SLOTS)
        best = search.best
        sequence = None if best is None else in_order(wiring, expand(wiring, best.sequence))
        if sequence is not None:
            self._offer_pruned(trace(state.wiring, sequence))

    @property
    def polish_seconds(self) -> float:
        """How long schedules were improved, in all."""
        return self._polish_seconds

    def polish(self, seconds: float, *, by_parts: bool, thorough: bool = False) -> None:
        """Improve what fits by local search, then, if asked for, by parts of a program.

        `thorough` is for the end: searches begin again elsewhere, and go on longer without a gain.
        """
        state = self._state
        if state.best is None or seconds <= 0 or state.enough():
            return
        seconds = min(seconds, state.left())
        started = time.perf_counter()
        until = started + seconds
        by_parts = by_parts and self._neighbourhood.is_of_use
        self._seed += 1
        soon = until - by_parts * _BY_PARTS * seconds
        if state.wiring.graph.has_alternatives:
            self._search_alternatives((time.perf_counter() + soon) / 2)
        while self._others and not state.closed(_WIDE_GAP) and time.perf_counter() < until:
            self._others.pop(0)()
        unfolded = unfold(state.wiring, state.best)
        search = restarted_search if thorough else local_search
        improved = search(
            unfolded.wiring, unfolded.start, state.budget_bytes, seed=self._seed, deadline=soon
        )
        self._offer_folded(unfolded, improved)
        since = 0
        while by_parts and time.perf_counter() < until:
            patience = _PATIENCE_AT_END if thorough and not state.closed(FAR) else _PATIENCE
            if since >= patience or state.enough():
                break
            before = state.best_time
            state.offer(self._neighbourhood.step(state.best, until))
            since = 0 if state.best_time < before else since + 1
        self._polish_seconds += time.perf_counter() - started

    def _search_alternatives(self, until: float) -> None:
        """Improve the fastest schedule by other implementations."""
        state = self._state
        if state.best is not None:
            state.offer(
                local_search(
                    state.wiring, state.best, state.budget_bytes, seed=self._seed, deadline=until
                )
            )

    def _repair(self, start: Trace, perturbation: EvictionPerturbation) -> None:
        """Evict, prune and offer."""
        state = self._state
        again = state.best_time - state.once
        candidate = repaired(
            state.wiring,
            start,
            state.budget_bytes,
            perturbation=perturbation,
            most_time=state.once + min(_MOST_MORE * again, _MOST_AGAIN * state.once),
            soon=state.soon(),
            deadline=state.deadline,
        )
        state.offer(candidate)

    def _repair_unfolded(self, start: Trace, unfolded_of: Callable[[Trace], Unfolded]) -> None:
        """With alternatives: keep those of a schedule, and evict, or run within the budget.

        The latter keeping what it can, or what the schedule keeps.
        """
        state = self._state
        if not state.wiring.graph.has_alternatives:
            return
        unfolded = unfolded_of(start)
        candidate = repaired(
            unfolded.wiring,
            unfolded.start,
            state.budget_bytes,
            soon=state.soon(),
            deadline=state.deadline,
        )
        self._offer_folded(unfolded, candidate)
        for perturbation in ONE_PASS_PERTURBATIONS[:2]:
            for keeps in (None, unfolded.keeps()):
                self._run_in_one_pass(unfolded, perturbation, keeps)

    def _run_in_one_pass(
        self, unfolded: Unfolded, perturbation: OnePassPerturbation, keeps: Keeps | None
    ) -> None:
        """Run the ops of a schedule within the budget in one pass."""
        state = self._state
        sequence = evict_in_one_pass(
            unfolded.wiring,
            state.budget_bytes,
            perturbation=perturbation,
            plan=keeps,
            deadline=state.soon(),
        )
        if sequence is not None:
            candidate = trace(unfolded.wiring, sequence)
            candidate = prune(unfolded.wiring, candidate, state.budget_bytes, deadline=state.soon())
            self._offer_folded(unfolded, candidate)

    def _offer_folded(self, unfolded: Unfolded, candidate: Trace) -> None:
        state = self._state
        folded = unfolded.fold(candidate)
        state.offer(prune_multi(state.wiring, folded, state.budget_bytes, deadline=state.deadline))

    def _offer_pruned(self, candidate: Trace) -> None:
        """Prune a schedule and offer it."""
        state = self._state
        unfolded = unfold(state.wiring, candidate)
        now = prune(unfolded.wiring, unfolded.start, state.budget_bytes, deadline=state.deadline)
        self._offer_folded(unfolded, now)
