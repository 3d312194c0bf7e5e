"""`refine`: rounds of the stage-refined ILP, each certified, repaired and improved.

A first schedule comes of repairing storing everything (`evict`) or, where little fits, of running
the ops within the budget in one pass (`one_pass`). Memory binds only at a few time steps, so the
program has few checkpoints (`relaxation`): the first are chosen by linear relaxations or, where the
first program is small, are the ops that leave least room (`refinements`). A round solves it, while
the search goes on beside it on a second core (`background`), takes the back end's dual bound as a
lower bound on the time of every schedule in the order of the graph, builds a schedule from the
point, and simulates it. Within budget: done, and the gap is certified. Else the schedule is
repaired, pruned, improved by local search, and kept if it is the fastest so far, and checkpoints,
running-memory rows and cuts (`splits`) are added where it was over budget; far from the bound, by
turns with programs whose checkpoints are chosen by what they prove (`Programs.grow`). The first
program is also solved with reserves, less room than the budget, for schedules that overshoot less;
what they leave free is pruned back. Where a wide gap is left, a graph that is a chain of blocks is
planned as one (`chains`). On graphs of about a dozen ops a search of all states (`exhaust`) closes
what the program leaves open.

Where values have several implementations, the same rounds choose among them (`choice_rows`), after
a quick start by heuristics, and after those without alternatives and with the more exact ones,
which give schedules and checkpoints to begin with; the ordinary graph of the fastest schedule is
refined, too (`unfolding`).

Guarantee: `lower_bound` holds for every schedule that computes all ops (those that nothing reads
count too), first computations in the order of the graph; `OPTIMAL` means a time within 1e-6 of it,
`INFEASIBLE` that the program is.
Complexity: rounds of MILPs, stopped by the limit; large ones begin with their linear relaxation,
and very large ones end there. 100,000 ops of a GPT-2 take about 20 seconds
(`benchmarks/growth.py`).
Limits: the order of first computations is fixed; recomputations of one op in one segment count once
in the bound. Source: ours (docs/certified-bounds.md), after Checkmate (Jain et
al. 2020), section 4.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from remat_graph import Compute, Graph, Numerics, Schedule, Solution
from remat_solvers.core.alternatives import is_in_order, least_time
from remat_solvers.core.milp import HIGHS, missing_back_end
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Progress, Report
from remat_solvers.core.trace import Trace
from remat_solvers.core.wiring import Ints, Wiring, expand, in_order, sequence_of
from remat_solvers.refine.rounds import Rounds
from remat_solvers.refine.state import State
from remat_solvers.search.descent import minimal_peak_trace

__all__ = ["Refine"]

_DEFAULT_SECONDS = 30.0
_QUICK_START_SHARE = 1 / 20  # of the time, before all else where there is a choice
_LAST_SECONDS = 1.0  # after the limit, at most as long again, for a smallest peak to tell of
_PLAIN_SHARE = 1 / 4  # of the time, for what may choose nothing; the wider choices share the rest


@dataclass(frozen=True, slots=True)
class Refine(PlainSolver):
    """The stage-refined ILP; exact in the limit on most graphs, with a certified bound always.

    `back_end` solves the programs: HiGHS, or another MILP solver that CVXPY has installed. One that
    takes no time limit makes a solve run past its own, and proves less.
    """

    name: ClassVar[str] = "refine"
    exact: ClassVar[bool] = True
    takes_alternatives: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "The stage-refined integer program of remat-solvers, a relaxation of the program of "
        "P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. Gonzalez: "
        "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization. MLSys 2020."
    )

    back_end: str = HIGHS

    def can_solve(self, problem: Problem) -> str | None:
        """Refuse graphs without ops, and back ends that are not installed."""
        return PlainSolver.can_solve(self, problem) or missing_back_end(self.back_end)

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Refine until the gap is closed or the limit is reached.

        If none is set: 30 s at most, less where little can be gained and nothing was for a while.
        """
        seconds = limit.left(_DEFAULT_SECONDS)
        until = time.perf_counter() + seconds
        begin = _Begin(() if problem.start is None else (problem.start,))
        narrower, relay = _narrower(problem.graph), _improvements(report, limit)
        fastest, everything = math.inf, None
        if narrower:
            some = Limit.starting_now(_QUICK_START_SHARE * seconds)
            state, rounds = self._rounds(problem.wiring, problem.budget_bytes, begin, some, relay)
            rounds.quick_start()
            begin, fastest = _Begin((*begin.starts, *_best_schedules(state))), state.best_time
            everything = rounds.everything
        for position, graph in enumerate(narrower):
            if time.perf_counter() >= until and begin.starts:
                break
            share = 1 / (len(narrower) + 1 - position) if position else _PLAIN_SHARE
            some = Limit.starting_now(max(0.0, share * (until - time.perf_counter())))
            wiring = Wiring.of(graph)
            if least_time(wiring) < fastest:
                _, begin = self._refined(wiring, problem.budget_bytes, begin, some, relay)
        state, _ = self._refined(
            problem.wiring, problem.budget_bytes, begin, limit, report, everything
        )
        if state.best is None:
            last = min(seconds, _LAST_SECONDS)
            state.offer(minimal_peak_trace(state.wiring, time.perf_counter() + last))
        return state.solution()

    def _refined(
        self, wiring: Wiring, budget_bytes: int, begin: _Begin, limit: Limit, report: Report,
        everything: list[Trace] | None = None,
    ) -> tuple[State, _Begin]:  # fmt: skip
        """Refine a graph; return also what is known then for one with more choice."""
        state, rounds = self._rounds(wiring, budget_bytes, begin, limit, report, everything)
        rounds.run()
        checkpoints = tuple(wiring.graph.ops[c].name for c in rounds.checkpoints)
        return state, _Begin((*begin.starts, *_best_schedules(state)), checkpoints)

    def _rounds(
        self, wiring: Wiring, budget_bytes: int, begin: _Begin, limit: Limit, report: Report,
        everything: list[Trace] | None = None,
    ) -> tuple[State, Rounds]:  # fmt: skip
        """Prepare the rounds of one graph, and what comes of them."""
        until = time.perf_counter() + limit.left(_DEFAULT_SECONDS)
        state = State(wiring, budget_bytes, until, limit, report, back_end=self.back_end)
        checkpoints = frozenset(wiring.graph.op_index[name] for name in begin.checkpoints)
        in_this_graph = (_as_sequence(wiring, start) for start in begin.starts)
        sequences = [sequence for sequence in in_this_graph if sequence is not None]
        return state, Rounds(state, sequences, checkpoints, everything)


class _Begin(NamedTuple):
    """Schedules to begin with, and at which ops memory was found to bind."""

    starts: tuple[Schedule, ...]
    checkpoints: tuple[str, ...] = ()


def _narrower(graph: Graph) -> list[Graph]:
    """List a graph with less choice: without alternatives, then with those of each exactness."""
    kinds = sorted({op.numerics for op in graph.ops if not op.owed}, key=list(Numerics).index)
    if not kinds:
        return []
    return [graph.without_alternatives(), *map(graph.with_numerics, kinds[:-1])]


def _best_schedules(state: State) -> tuple[Schedule, ...]:
    """Give the fastest schedule, if there is one."""
    return () if state.best is None else (expand(state.wiring, state.best.sequence),)


def _improvements(report: Report, limit: Limit) -> Report:
    """Report what the quick start and narrower choices find: each time the fastest so far.

    What is proved with less choice says nothing of more.
    """
    best: Progress | None = None

    def relay(progress: Progress, /) -> None:
        nonlocal best
        if best is None or _time_of(progress) < _time_of(best):
            best = progress
        passed_on = replace(best, round=progress.round, message=progress.message)
        report(replace(passed_on, lower_bound=None, seconds=limit.elapsed))

    return relay


def _time_of(progress: Progress) -> float:
    return math.inf if progress.incumbent_time is None else progress.incumbent_time


def _as_sequence(wiring: Wiring, start: Schedule) -> Ints | None:
    """List the computations of a given schedule; `None` if this graph has no such one in order."""
    index = wiring.graph.op_index
    if not all(step.op in index for step in start if isinstance(step, Compute)):
        return None
    if not wiring.graph.has_alternatives:
        return in_order(wiring, start)
    sequence = sequence_of(wiring, start)
    return sequence if is_in_order(wiring, sequence) else None
