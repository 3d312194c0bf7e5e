"""Schedules without a proof: found at first, built from points of programs, and improved.

A first schedule comes of repairing the given one and storing everything; while nothing fits, of
running the ops within the budget in one pass and of repairing in other ways; at last of a descent
to the least peak. A graph that is a chain of blocks is also planned as one: on long chains of which
little fits, nothing else here finds what `rotor` does. What is found is pruned and offered to the
state, which keeps the fastest. Guarantee: what is kept fits; nothing is proved. Complexity: each
attempt has its time (`State.soon`). Source: ALGORITHMS.md, refine, step 6.
"""

from __future__ import annotations

import time

from remat_solvers.core.milp import Answer
from remat_solvers.core.problem import Limit, Problem, silent
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Ints, in_order
from remat_solvers.refine.construct import construct
from remat_solvers.refine.neighbourhood import Neighbourhood
from remat_solvers.refine.relaxation import Relaxation, Stagewise, read_point
from remat_solvers.refine.state import State
from remat_solvers.rotor import Rotor
from remat_solvers.search.evict import EvictionPerturbation, evict
from remat_solvers.search.local_search import local_search
from remat_solvers.search.paging import PagingPerturbation, page
from remat_solvers.search.prune import prune
from remat_solvers.search.smallest import descend_to
from remat_solvers.search.starts import EVICTION_PERTURBATIONS, PAGING_PERTURBATIONS

__all__ = ["Heuristics"]

_DESCENT_SHARE = 0.2  # of the time left
_GAP_TO_TRY_MORE = 0.01
_MOST_OPS_OF_CHAIN = 5_000  # cut and measured in half a second, whatever the limit
_CHAIN_SHARE, _LEAST_CHAIN_SECONDS = 0.05, 0.1  # the first: of the time left
_BY_PARTS = 0.75  # of the time for improving schedules
_PATIENCE = 8


class Heuristics:
    """What looks for schedules and needs no bound; keeps what its neighbourhood has learnt."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._neighbourhood = Neighbourhood(state.wiring, state.budget_bytes)
        self._seed = 0
        self._polish_seconds = 0.0

    def start(self, everything: Trace, given: Ints | None) -> None:
        """Find a schedule that fits without a program, by whatever gives one first."""
        if given is not None:
            self._repair(trace(self._state.wiring, given), EVICTION_PERTURBATIONS[0])
        self._repair(everything, EVICTION_PERTURBATIONS[0])
        for eviction, paging in zip(EVICTION_PERTURBATIONS[1:], PAGING_PERTURBATIONS, strict=True):
            if self._state.best is None:
                self._page(paging, None)
            if self._state.best is None:
                self._repair(everything, eviction)

    def descend(self) -> None:
        """Look for a peak within the budget whatever the time, for a share of what is left."""
        state = self._state
        until = time.perf_counter() + _DESCENT_SHARE * state.left()
        self._offer_pruned(descend_to(state.wiring, state.budget_bytes, until))

    def build(self, relaxation: Relaxation, answer: Answer) -> Trace | None:
        """Build, repair and offer the schedule of a point; return it as it was built."""
        state = self._state
        if answer.point is None:
            return None
        stagewise = read_point(relaxation, state.wiring, answer.point)
        built = trace(state.wiring, construct(state.wiring, stagewise))
        for perturbation in (
            EVICTION_PERTURBATIONS if state.round > 1 else EVICTION_PERTURBATIONS[:1]
        ):
            self._repair(built, perturbation)
            if state.closed(_GAP_TO_TRY_MORE) or state.left() <= 0:
                break
        if state.best is None:
            self._page(PAGING_PERTURBATIONS[0], stagewise)
        return built

    def plan_chain(self) -> None:
        """Offer the schedule of `rotor`, if there is one in the order of the graph."""
        state = self._state
        seconds = _CHAIN_SHARE * state.left()
        if seconds < _LEAST_CHAIN_SECONDS or state.wiring.op_count > _MOST_OPS_OF_CHAIN:
            return
        problem, rotor = Problem(state.wiring.graph, state.budget_bytes), Rotor()
        if rotor.can_solve(problem) is not None:
            return
        found = rotor.solve(problem, Limit.starting_now(seconds), silent)
        sequence = None if found.schedule is None else in_order(state.wiring, found.schedule)
        if sequence is not None:
            self._offer_pruned(trace(state.wiring, sequence))

    @property
    def polish_seconds(self) -> float:
        """How long schedules were improved, in all."""
        return self._polish_seconds

    def polish(self, seconds: float, *, by_parts: bool) -> None:
        """Improve what fits by local search, then, if asked for, by parts of a program."""
        state = self._state
        if state.best is None or seconds <= 0 or state.enough():
            return
        seconds = min(seconds, state.left())
        started = time.perf_counter()
        until = started + seconds
        by_parts = by_parts and self._neighbourhood.is_of_use
        self._seed += 1
        state.offer(
            local_search(
                state.wiring,
                state.best,
                state.budget_bytes,
                seed=self._seed,
                deadline=until - by_parts * _BY_PARTS * seconds,
            )
        )
        since = 0
        while by_parts and since < _PATIENCE and time.perf_counter() < until:
            if state.enough():
                break
            before = state.best_time
            state.offer(self._neighbourhood.step(state.best, until))
            since = 0 if state.best_time < before else since + 1
        self._polish_seconds += time.perf_counter() - started

    def _repair(self, start: Trace, perturbation: EvictionPerturbation) -> None:
        """Evict, prune and offer."""
        state = self._state
        fitting = evict(
            state.wiring,
            start.sequence,
            state.budget_bytes,
            perturbation=perturbation,
            deadline=state.soon(),
        )
        self._offer_pruned(fitting)

    def _page(self, perturbation: PagingPerturbation, stagewise: Stagewise | None) -> None:
        """Run within the budget in one pass, keeping what the point of a program keeps."""
        state = self._state
        sequence = page(
            state.wiring,
            state.budget_bytes,
            perturbation=perturbation,
            plan=None if stagewise is None else stagewise.keeps,
            deadline=state.soon(),
        )
        if sequence is not None:
            self._offer_pruned(trace(state.wiring, sequence))

    def _offer_pruned(self, found: Trace) -> None:
        state = self._state
        state.offer(prune(state.wiring, found, state.budget_bytes, deadline=state.deadline))
