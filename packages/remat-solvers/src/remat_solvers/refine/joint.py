"""Planning over alternatives: which makers, and when each value is made and dropped, jointly.

A choice of makers leaves an ordinary graph (`selection`), for which everything of `refine` works.
In turn: the cheapest ways, what is owed, and the ways that need least are tried by repairing
storing everything, and refined, each for a while; rounds of the joint program (`relaxation`, rows h
and i) prove the bound, and each of its points gives a choice, and a schedule of its own; then one
choice after another is flipped, alone or together with all of its equivalence class, and kept if
the repaired schedule is faster; what is left of the time goes to `refine` on the graph of the best
choice.

Guarantee: schedules are legal and fit, as `simulate` of the given graph says; the bound holds for
all schedules that run each group in the order of the graph, by whatever makers. Complexity: as
`refine`, once for the bound and once for the last choice, and a repair for each flip; all of it
again while that helps. Limits: where a value is made once more by another maker, all of the
backward half reads that copy, and what is recomputed there does not; so a gap may remain. Source:
ALGORITHMS.md, *Alternatives in refine*; MONeT (Shah et al. 2021), section 4.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from remat_graph import InvalidSchedule, Schedule, simulate
from remat_solvers.bounds.bottleneck import bottleneck
from remat_solvers.bounds.regression import regress
from remat_solvers.core.makers import Makers, store_all_sequence
from remat_solvers.core.milp import Outcome, relaxed, solve_program
from remat_solvers.core.problem import Limit, silent
from remat_solvers.core.trace import Trace, trace
from remat_solvers.core.wiring import Floats, Ints, expand, sequence_of
from remat_solvers.refine.construct import construct
from remat_solvers.refine.embed import embed, opened_at
from remat_solvers.refine.relaxation import Relaxation, read_point, relax
from remat_solvers.refine.rounds import Rounds
from remat_solvers.refine.state import GAP, State
from remat_solvers.search.evict import EvictionPerturbation, evict
from remat_solvers.search.prune import prune
from remat_solvers.search.selection import Choice, Selection, first_choices, select
from remat_solvers.search.smallest import least_peak_trace
from remat_solvers.search.starts import EVICTION_PERTURBATIONS

__all__ = ["Joint"]

_BOUND_SHARE, _FLIP_SHARE = 0.5, 0.5  # of the time left
_PROGRAM_SHARE = 0.4
_FIRST_SHARE = 0.2  # of the time left, for each of the first choices
_LARGE_COLUMNS = 3_000  # from which on linear relaxations come first
_MOST_CHECKPOINTS = 40
_NEW_CHECKPOINTS = 1  # of a round
_MOST_RUNNING = 500


class Joint:
    """The course of one solve of a graph with alternatives; what comes of it is in the state."""

    def __init__(self, state: State, start: Schedule | None = None) -> None:
        self._state = state
        self._given = start
        self._makers = Makers.of(state.wiring)
        self._tried: dict[Choice, float] = {}
        self._best: Choice | None = None
        self._planned: Choice | None = None
        self._checkpoints: set[int] = set()
        self._rounds = 0

    def run(self) -> None:
        """Work until closed, or out of time."""
        state = self._state
        self._begin()
        choices = list(first_choices(state.wiring, self._makers))
        for choice in choices:
            self._try(choice, EVICTION_PERTURBATIONS)
        state.say("repaired storing everything, by each kind of maker")
        self._plan_each([self._owed(), *choices])
        if state.best is None:
            proved = regress(
                state.wiring,
                bottleneck(state.wiring, state.soon()),
                state.soon(),
                enough_bytes=state.budget_bytes,
            )
            state.infeasible = proved.peak_bytes > state.budget_bytes
        while not state.infeasible and not state.closed():
            before = (state.best_time, state.bound)
            self._bound(time.perf_counter() + _BOUND_SHARE * state.left())
            if state.infeasible or state.enough():
                break
            self._flip(time.perf_counter() + _FLIP_SHARE * state.left())
            self._plan_best()
            if state.enough() or (self._rounds > 1 and before == (state.best_time, state.bound)):
                break
        if state.best is None and not state.infeasible:
            state.offer(least_peak_trace(state.wiring, time.perf_counter() + 1.0))

    def _begin(self) -> None:
        """Offer storing everything in the fastest ways, and the given schedule if it is legal."""
        self._offer(store_all_sequence(self._state.wiring))
        if self._given is not None:
            self._offer(sequence_of(self._state.wiring, self._given))

    def _try(self, choice: Choice, perturbations: tuple[EvictionPerturbation, ...]) -> float:
        """Repair storing everything under a choice, and offer it; return its time."""
        state = self._state
        if choice in self._tried:
            return self._tried[choice]
        selection = select(state.wiring, self._makers, choice)
        best = np.inf
        if selection is not None:
            for perturbation in perturbations:
                if np.isfinite(best) or (self._tried and state.left() <= 0):
                    break
                best = self._repair(selection, perturbation)
        self._keep(choice, best)
        return best

    def _keep(self, choice: Choice, found: float) -> None:
        known = np.inf if self._best is None else self._tried[self._best]
        self._tried[choice] = min(found, self._tried.get(choice, np.inf))
        if self._tried[choice] < known:
            self._best = choice

    def _repair(self, selection: Selection, perturbation: EvictionPerturbation) -> float:
        state, wiring = self._state, selection.wiring
        found = evict(
            wiring,
            np.arange(wiring.op_count),
            state.budget_bytes,
            perturbation=perturbation,
            deadline=state.soon(),
        )
        found = prune(wiring, found, state.budget_bytes, deadline=state.soon())
        return self._offer(selection.translate(state.wiring, self._makers, found.sequence))

    def _offer(self, sequence: Ints) -> float:
        """Offer a sequence of the given graph if it is legal; its time, infinite if it is over."""
        state = self._state
        if not self._in_order(sequence):
            return np.inf
        found = trace(state.wiring, sequence)
        if not state.offer(found):
            return np.inf
        return float(state.wiring.time[sequence].sum())

    def _in_order(self, sequence: Ints) -> bool:
        """Say whether a sequence is legal and runs all groups in the order of the graph."""
        wiring, makers = self._state.wiring, self._makers
        made: set[int] = set()
        owed = np.flatnonzero(makers.owed).tolist()
        ends = {c: set(wiring.outputs[c]) for c in owed}
        at = 0
        for op in sequence.tolist():
            if not made.issuperset(wiring.inputs[op]):
                return False
            made.update(wiring.outputs[op])
            if not makers.optional[op]:
                group = int(makers.group[op])
                if at < len(owed) and group > owed[at]:
                    return False
                if at < len(owed) and group == owed[at] and made >= ends[group]:
                    at += 1
        if at < len(owed):
            return False
        try:
            simulate(wiring.graph, expand(wiring, sequence))
        except InvalidSchedule:
            return False
        return True

    def _bound(self, until: float) -> None:
        """Solve joint programs of more and more checkpoints; try the choices of their points."""
        state, wiring = self._state, self._state.wiring
        everything = trace(wiring, np.flatnonzero(self._makers.owed))
        checkpoints = self._checkpoints or self._fullest(everything, set())
        self._rounds += 1
        while checkpoints and time.perf_counter() < until and not state.enough():
            running = self._running(checkpoints)
            program = relax(wiring, state.budget_bytes, sorted(checkpoints), running=running)
            if program.columns > _LARGE_COLUMNS:
                paired = relax(wiring, state.budget_bytes, sorted(checkpoints), paired=True)
                self._learn(paired, until, whole=False)
            built = self._learn(program, until, whole=True)
            state.round += 1
            if state.infeasible:
                return state.say("the joint program is infeasible")
            state.say(f"{len(checkpoints)} checkpoints, joint program")
            worst = everything if built is None else built
            more = self._fullest(worst, checkpoints) or self._fullest(state.best, checkpoints)
            if not more or len(checkpoints) > _MOST_CHECKPOINTS:
                break
            checkpoints |= more
        self._checkpoints = checkpoints
        return None

    def _running(self, checkpoints: set[int]) -> list[tuple[int, int]]:
        """List all running-memory rows, once the checkpoints are known, where they are few."""
        count = self._state.wiring.op_count
        if self._rounds < 2 or count * len(checkpoints) > _MOST_RUNNING:
            return []
        return [(c, op) for c in sorted(checkpoints) for op in range(count)]

    def _learn(self, relaxation: Relaxation, until: float, *, whole: bool) -> Trace | None:
        """Solve a joint program or its linear relaxation; return the schedule of its point."""
        state = self._state
        left = until - time.perf_counter()
        if left <= 0 or state.enough():
            return None
        exact = relaxation.columns < _LARGE_COLUMNS
        start = None
        if whole and state.best is not None:
            start = embed(state.wiring, relaxation, state.best)
        answer = solve_program(
            relaxation.program if whole else relaxed(relaxation.program),
            seconds=_PROGRAM_SHARE * left,
            gap=0.0 if exact else GAP,
            start=start,
        )
        if answer.outcome is Outcome.INFEASIBLE:
            state.infeasible = state.best is None
            return None
        state.learn(answer.bound)
        return None if answer.point is None else self._build(relaxation, answer.point)

    def _fullest(self, now: Trace | None, known: set[int]) -> set[int]:
        """Choose groups at whose places a schedule holds most, over the budget first."""
        if now is None:
            return set()
        opened = opened_at(self._makers, now)
        owed = np.flatnonzero(self._makers.owed)
        order = owed[np.argsort(opened[owed], kind="stable")]
        during = now.during.astype(np.float64)
        at = np.searchsorted(opened[order], np.arange(now.steps), side="right") - 1
        found: set[int] = set()
        for moment in np.argsort(-during, kind="stable").tolist():
            if len(found) >= _NEW_CHECKPOINTS or during[moment] < 0.5 * self._state.budget_bytes:
                break
            near = {int(order[at[moment]])} if at[moment] >= 0 else set()
            if at[moment] + 1 < len(order):
                near.add(int(order[at[moment] + 1]))
            found |= near - known
        return found

    def _build(self, relaxation: Relaxation, point: Floats) -> Trace | None:
        """Offer the schedule of a point, and what its choice of makers gives; as it was built."""
        state = self._state
        stagewise = read_point(relaxation, state.wiring, point)
        sequence = construct(state.wiring, stagewise)
        built = trace(state.wiring, sequence) if self._in_order(sequence) else None
        self._offer(sequence)
        first = {p for p in stagewise.ways if self._makers.opens[p]}
        for c in self._makers.groups():
            members = set(self._makers.members(c).tolist())
            made = [v for p in first & members for v in state.wiring.outputs[p]]
            if sorted(made) != sorted(state.wiring.outputs[c]):
                first = first - members | {c}
        redone = {op for ops in stagewise.redo for op in ops}
        later = frozenset(redone & set(self._makers.more_maker.tolist())) - first
        for choice in dict.fromkeys((Choice(frozenset(first), later), Choice(frozenset(first)))):
            self._try(choice, EVICTION_PERTURBATIONS[:2])
        return built

    def _flip(self, until: float) -> None:
        """Change the choice of one group, or of all that are alike, while that helps."""
        state = self._state
        since = 0
        while self._best is not None and since == 0 and not state.enough():
            since = 1
            for choice in self._neighbours(self._best):
                if time.perf_counter() >= until or state.enough():
                    return
                before = self._best
                self._try(choice, EVICTION_PERTURBATIONS[:1])
                if self._best != before:
                    since = 0
                    break

    def _neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Yield choices that differ in one op or in all of an equivalence class, the latter first.

        A later maker is added or left out; a way takes the place of those that make the same.
        """
        wiring, makers = self._state.wiring, self._makers
        ops = wiring.graph.ops
        alike: dict[object, list[int]] = {}
        for op in dict.fromkeys((*makers.more_maker.tolist(), *makers.groups())):
            alike.setdefault(ops[op].equivalence or op, []).append(op)
        single = [[op] for group in alike.values() if len(group) > 1 for op in group]
        for group in (*alike.values(), *single):
            yield Choice(choice.first - set(group), choice.later ^ (set(group) - choice.first))
            first = choice.first
            for op in group:
                first = self._with_way(first, op)
            if first != choice.first:
                yield Choice(first, choice.later - first)

    def _with_way(self, first: frozenset[int], op: int) -> frozenset[int]:
        """Let an op run first, in place of those that overlap with it, and the rest by parts."""
        wiring, makers = self._state.wiring, self._makers
        if op in first or not makers.opens[op]:
            return first
        members = makers.members(int(makers.group[op])).tolist()
        others = {p for p in members if p in first}
        rest = set(wiring.outputs[makers.group[op]]) - set(wiring.outputs[op])
        found = {op}
        for p in sorted(members, key=lambda p: wiring.time_list[p]):
            if rest and set(wiring.outputs[p]) <= rest:
                found.add(p)
                rest -= set(wiring.outputs[p])
        return first if rest else (first - others) | found

    def _owed(self) -> Choice:
        """Choose what is owed: a plan that may choose is not to be slower than one that may not."""
        return Choice(frozenset(self._makers.groups()))

    def _plan_each(self, choices: list[Choice]) -> None:
        """Refine the graphs of some choices, each with a share of the time."""
        for choice in dict.fromkeys(choices):
            if self._state.enough():
                break
            self._plan(choice, _FIRST_SHARE * self._state.left())
        self._state.say("refined the first choices of makers")

    def _plan_best(self) -> None:
        """Refine the graph of the best choice with what is left of the time."""
        state = self._state
        best = self._best
        if best is None or best == self._planned or state.closed(GAP) or state.left() <= 0:
            return
        self._planned = best
        self._plan(best, state.left())
        state.say("refined the best choice of makers")

    def _plan(self, choice: Choice, seconds: float) -> None:
        """Refine the graph of a choice, and offer the schedule that comes of it."""
        state = self._state
        selection = select(state.wiring, self._makers, choice)
        if selection is None:
            return
        limit = Limit.starting_now(seconds)
        inner = State(
            selection.wiring, state.budget_bytes, time.perf_counter() + seconds, limit, silent
        )
        Rounds(inner).run()
        found = np.inf
        if inner.best is not None:
            sequence = selection.translate(state.wiring, self._makers, inner.best.sequence)
            found = self._offer(sequence)
        self._keep(choice, found)
