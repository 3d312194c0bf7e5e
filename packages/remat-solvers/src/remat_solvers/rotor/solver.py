"""`rotor`: the optimal memory-persistent schedule of a chain of blocks.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory" (Inria RR-9302, 2019), and the slides
"rotor: Rematerializing Optimally with pyTORch" (2021). The graph is cut into a chain (`chain`),
each stage is measured (`costs`), and a dynamic programme chooses (`program`, with the recursion).

Guarantee: never over budget; the fastest of the schedules that run whole stages of the chain, that
keep a stored input or record until the backward of its stage and held values until their last use,
and whose memory, rounded up to slots, fits. It is no bound for other schedules (of parts of stages,
or not persistent), so none is claimed, except that nothing is faster than computing every op once.
Where a carried value is held too (a result), the programme does not see that a recomputation could
start from it, and what it recomputes in vain is left out afterwards.
How a stage runs is a little better than in the paper: a later run leaves out ops that lead to
nothing needed, and values are given up op by op.
Complexity: O(stages^3 * slots); chains of more than `most_stages` stages are merged to that number.
Limits: cuts are looked for in execution order; where that gives several chains (`chain`), each is
tried. What is not replayable runs once; its outputs are held until their last use, like results and
masks. If the backward ops of the stages alternate in the graph, they are computed stage by stage,
which is another order of first computations than the graph's. Rounding costs up to a slot per
stored input or record, so 4 and 16 times as many slots are tried too, where the tables stay small.
"""

from __future__ import annotations

import math
import time
from typing import ClassVar

import numpy as np

from remat_graph import Schedule, Solution, Status, Timeline, simulate
from remat_solvers.errors import UnsuitableSolver
from remat_solvers.problem import Limit, Problem, Progress, Report
from remat_solvers.prune import drop_unused
from remat_solvers.rotor.chain import Chain, find_chains, merged
from remat_solvers.rotor.costs import measure_stages
from remat_solvers.rotor.program import fastest, least_bytes
from remat_solvers.trace import trace
from remat_solvers.wiring import Wiring, expand

__all__ = ["Rotor"]

_DEFAULT_SECONDS = 30.0
_FINER = 4
_ROUNDS = 3
# Entries of a table of 16 bytes and more; the larger where nothing was found before.
_MOST_ENTRIES, _MOST_ENTRIES_AT_NEED = 6_000_000, 20_000_000


class Rotor:
    """The dynamic programme of rotor; `slots` of memory, at most `most_stages` stages."""

    name: ClassVar[str] = "rotor"
    exact: ClassVar[bool] = False
    needs_hierarchy: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "Olivier Beaumont, Lionel Eyraud-Dubois, Julien Herrmann, Alexis Joly, Alena Shilova. "
        "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with "
        "limited memory. Inria Research Report RR-9302, 2019."
    )

    def __init__(self, *, slots: int = 500, most_stages: int = 200) -> None:
        self._slots = slots
        self._most_stages = most_stages

    def can_solve(self, problem: Problem) -> str | None:
        """Take chains of blocks; say where a graph is none."""
        found = find_chains(Wiring.of(problem.graph))
        return found if isinstance(found, str) else None

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Fill the tables; `LIMIT` if no schedule of this kind fits, or at the limit (30 s)."""
        wiring = Wiring.of(problem.graph)
        chains = find_chains(wiring)
        if isinstance(chains, str):
            raise UnsuitableSolver(self.name, chains)
        search = _Search(wiring, problem, limit, report)
        for chain in chains:
            search.run(merged(wiring, chain, self._most_stages), self._slots)
        if search.best is None:
            least = search.least_bytes
            return Solution(Status.LIMIT, None, math.inf, least, None, self.name, limit.elapsed)
        schedule, timeline = search.best
        once = search.done
        return Solution(
            status=Status.OPTIMAL if once else Status.FEASIBLE,
            schedule=schedule,
            time=timeline.time,
            peak_bytes=timeline.peak_bytes,
            lower_bound=problem.graph.time if once else None,
            solver=self.name,
            solve_seconds=limit.elapsed,
        )


class _Search:
    """The best schedule so far, over chains and numbers of slots."""

    def __init__(self, wiring: Wiring, problem: Problem, limit: Limit, report: Report) -> None:
        self.best: tuple[Schedule, Timeline] | None = None
        self._wiring = wiring
        self._problem = problem
        self._limit = limit
        self._report = report
        self._round = 0
        self._least: list[int] = []
        self._deadline = time.perf_counter() + limit.left(_DEFAULT_SECONDS)

    @property
    def least_bytes(self) -> int:
        """The least budget with which any of the chains can be run."""
        return min(self._least)

    @property
    def done(self) -> bool:
        """Say whether nothing can be faster."""
        return self.best is not None and self.best[1].time <= self._problem.graph.time

    def run(self, chain: Chain, slots: int) -> None:
        """Fill a table for a chain, and finer ones while they stay small."""
        if self.done:
            return
        budget = self._problem.budget_bytes
        costs = measure_stages(self._wiring, chain)
        self._least.append(least_bytes(costs))
        if self._least[-1] > budget:
            return
        for _ in range(_ROUNDS):
            sequence = fastest(costs, budget, slots, self._deadline)
            if sequence is not None:
                self._offer(sequence)
            self._tell(f"{len(costs)} stages, {min(slots, budget)} slots")
            entries = len(costs) ** 2 // 2 * slots * _FINER
            if (
                self.done
                or slots >= budget
                or time.perf_counter() > self._deadline
                or entries > (_MOST_ENTRIES_AT_NEED if sequence is None else _MOST_ENTRIES)
            ):
                return
            slots *= _FINER

    def _offer(self, sequence: list[int]) -> None:
        now = trace(self._wiring, np.array(sequence, dtype=np.int64))
        schedule = expand(self._wiring, drop_unused(self._wiring, now).sequence)
        timeline = simulate(self._problem.graph, schedule)
        if self.best is None or timeline.time < self.best[1].time:
            self.best = schedule, timeline

    def _tell(self, message: str) -> None:
        self._round += 1
        self._report(
            Progress(
                solver=Rotor.name,
                round=self._round,
                incumbent_time=self.best[1].time if self.best else None,
                incumbent_peak_bytes=self.best[1].peak_bytes if self.best else None,
                lower_bound=None,
                seconds=self._limit.elapsed,
                message=message,
            )
        )
