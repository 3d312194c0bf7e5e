"""One level within one budget: the program, started from what heuristics find.

Guarantee: what comes out is a legal sequence of computations within the budget, by its trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.attempt import solve_below
from remat_solvers.core.milp import Answer, BudgetedProgram, Outcome
from remat_solvers.core.problem import Limit, Problem, silent
from remat_solvers.core.trace import Trace, sequence_time, trace
from remat_solvers.core.wiring import MOST_BYTES, Ints, Wiring, sequence_of, total_bytes
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.published.hierarchical.blocks.adopt import follow
from remat_solvers.published.hierarchical.blocks.compose import (
    Pick,
    compose,
    expand_nodes,
    picks_of,
    selections,
)
from remat_solvers.published.hierarchical.blocks.level import Level
from remat_solvers.published.hierarchical.hilp.formulation import formulate
from remat_solvers.refine import Refine
from remat_solvers.search.evict import evict
from remat_solvers.search.perturbations import EVICTION_PERTURBATIONS
from remat_solvers.search.prune import prune

__all__ = ["LevelResult", "search"]

_PERTURBATIONS = tuple(each for each in EVICTION_PERTURBATIONS if each.noise == 0)
_REFINE_SECONDS = 1.0
_CHANGE_SHARE = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class LevelResult:
    """The fastest sequence of ops that fits, if any, and how the program ended."""

    sequence: Ints | None
    outcome: Outcome


class _Best:
    """The fastest runs of nodes that fit, and the fastest sequence of ops."""

    def __init__(self, level: Level, budget_bytes: int, tell: Callable[[Ints], object]) -> None:
        self.level = level
        self.budget_bytes = budget_bytes
        self._tell = tell
        self.staged: list[Pick] | None = None
        self.staged_time = np.inf
        self.now: Trace | None = None
        self.time = np.inf
        self.excess_bytes: float = np.inf

    def offer(self, picks: list[Pick]) -> bool:
        """Take runs of nodes if the ops inside fit; recomputations of no use are left out."""
        wiring = self.level.wiring
        sequence = np.array(expand_nodes(self.level, picks), dtype=np.int64)
        now = trace(wiring, sequence)
        self.excess_bytes = min(self.excess_bytes, max(0, now.peak_bytes - self.budget_bytes))
        if now.peak_bytes > self.budget_bytes:
            return False
        duration = sequence_time(wiring, sequence)
        if duration < self.staged_time and sorted(set(picks)) == picks:
            self.staged, self.staged_time = picks, duration
        now = prune(wiring, now, self.budget_bytes)
        duration = sequence_time(wiring, now.sequence)
        if duration < self.time:
            self.now, self.time = now, duration
            self._tell(now.sequence)
        return True


def search(
    level: Level,
    budget_bytes: int,
    *,
    deadline: float,
    gap: float,
    corrected: bool,
    back_end: str,
    tell: Callable[[Ints], object] = lambda _: None,
    starts: Sequence[Ints] = (),
) -> LevelResult:
    """Start from evictions at the level, then solve its program until `deadline` or the gap.

    `tell` is called with every sequence that is faster than those before. `starts` are sequences of
    ops to start from as well: as they are in a level without smaller blocks, if they have its
    order; else by the options that follow them.
    """
    best = _Best(level, budget_bytes, tell)
    if starts and not level.layers:
        wiring = compose(level, ())
        for former in starts:
            nodes = _as_nodes(level, former)
            if nodes is not None:
                _offer(best, (), wiring, trace(wiring, nodes))
    _start(best, deadline, starts)
    if best.now is not None and best.time <= float(level.wiring.time.sum()) * (1 + 1e-9):
        return LevelResult(best.now.sequence, Outcome.SOLVED)
    formulation = formulate(level, corrected=corrected)
    program = BudgetedProgram(formulation.program, formulation.per_byte, back_end)

    def solve(share: float, seconds: float) -> Answer:
        start = None if best.staged is None else formulation.embed(best.staged)
        return program.solve(budget_bytes * share, seconds=seconds, gap=gap, start=start)

    answer, _ = solve_below(solve, lambda point: best.offer(formulation.read(point)), deadline)
    sequence = None if best.now is None else best.now.sequence
    return LevelResult(sequence, Outcome.STOPPED if answer is None else answer.outcome)


def _as_nodes(level: Level, sequence: Ints) -> Ints | None:
    """Give ops as nodes of a level without smaller blocks; `None` if the order is another."""
    node_of = {node.choices[0].first.ops[0]: k for k, node in enumerate(level.nodes)}
    nodes = [node_of[op] for op in sequence.tolist()]
    first = list(dict.fromkeys(nodes))
    return np.array(nodes, dtype=np.int64) if first == sorted(first) else None


def _start(best: _Best, deadline: float, starts: Sequence[Ints]) -> None:
    """Solve the level with one option for every smaller block, for many selections of them.

    The first selections are those that follow the sequences in `starts`. With the options fixed the
    level is a plain graph. The best selection is then changed layer by layer while that helps.
    """
    level = best.level
    chosen: tuple[int, ...] | None = None
    followed = [follow(level, sequence) for sequence in starts]
    for selection in dict.fromkeys((*followed, *selections(level))):
        if _try(best, selection, deadline, thoroughly=True):
            chosen = selection
    until = min(deadline, time.perf_counter() + _CHANGE_SHARE * (deadline - time.perf_counter()))
    changed = chosen is not None
    while chosen is not None and changed:
        changed = False
        for layer in range(len(level.layers)):
            for option in (chosen[layer] - 1, chosen[layer] + 1):
                if time.perf_counter() > until:
                    return
                if 0 <= option < len(level.layers[layer].options):
                    other = (*chosen[:layer], option, *chosen[layer + 1 :])
                    if _try(best, other, until, thoroughly=False):
                        chosen, changed = other, True


def _try(best: _Best, selection: tuple[int, ...], deadline: float, *, thoroughly: bool) -> bool:
    """Offer what is found for a selection, as it is and in the stages of the program.

    Says whether it is faster, or while nothing fits less over budget, than all before.
    """
    level, before = best.level, (best.excess_bytes, best.time)
    wiring = compose(level, selection)
    for now in _fixed(wiring, best.budget_bytes, deadline, thoroughly=thoroughly):
        _offer(best, selection, wiring, now)
    return (best.excess_bytes, best.time) < before


def _offer(best: _Best, selection: tuple[int, ...], wiring: Wiring, now: Trace) -> None:
    """Offer a schedule of the composed level in the stages of the program, and as it is."""
    stages = Stages.of(wiring)
    staged = stages.sequence(stages.least_run(stages.read_off(now)))
    best.offer(picks_of(best.level, selection, staged.tolist()))
    best.offer(picks_of(best.level, selection, now.sequence.tolist()))


def _fixed(
    wiring: Wiring, budget_bytes: int, deadline: float, *, thoroughly: bool
) -> Iterator[Trace]:
    """Schedule a composed level by eviction, and if asked by `refine` where there is time.

    What is over budget here may fit where values are freed inside the runs.
    """
    everything = np.arange(wiring.op_count)
    yield trace(wiring, everything)
    for perturbation in _PERTURBATIONS:
        if time.perf_counter() > deadline:
            return
        schedule = evict(
            wiring, everything, budget_bytes, perturbation=perturbation, deadline=deadline
        )
        yield prune(wiring, schedule, budget_bytes)
        if schedule.peak_bytes <= budget_bytes:
            break
    seconds = min(_REFINE_SECONDS, (deadline - time.perf_counter()) / 10)
    if thoroughly and seconds > 0 and total_bytes(wiring.graph) <= MOST_BYTES:
        answer = Refine().solve(
            Problem(wiring.graph, budget_bytes), Limit.starting_now(seconds), silent
        )
        if answer.schedule is not None:
            yield trace(wiring, sequence_of(wiring, answer.schedule))
