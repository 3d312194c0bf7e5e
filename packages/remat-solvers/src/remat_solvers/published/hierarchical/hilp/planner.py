"""How H-ILP plans one level within one budget: by `refine` where that proves enough, else its own.

A schedule of the ops inside that is proved to be within the gap of the fastest needs no program of
the level, whose schedules are among those of the ops. Large levels are left to the program.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from remat_graph import Status
from remat_solvers.core.milp import HIGHS
from remat_solvers.core.problem import Limit, Problem, silent
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Ints, sequence_of
from remat_solvers.published.hierarchical.blocks.level import Level
from remat_solvers.published.hierarchical.hilp.search import search
from remat_solvers.refine import Refine

__all__ = ["LevelPlanner"]

_REFINE_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class LevelPlanner:
    """Plans the levels below the top; a `Planner` of `blocks.bottom_up`."""

    gap: float = 0.005
    back_end: str = HIGHS

    def __call__(self, level: Level, budget_bytes: int, seconds: float) -> list[Ints]:
        """Find sequences of computations within the budget; none where there is no room."""
        deadline = time.perf_counter() + seconds
        wiring = level.wiring
        everything = np.arange(wiring.op_count)
        if trace(wiring, everything).peak_bytes <= budget_bytes:
            return [everything]
        sequences: list[Ints] = []
        problem = Problem(wiring.graph, budget_bytes)
        limit = Limit.starting_now(_REFINE_SHARE * seconds)
        answer = Refine().solve(problem, limit, silent)
        if answer.status is Status.INFEASIBLE:
            return []
        if answer.schedule is not None:
            sequences.append(sequence_of(wiring, answer.schedule))
            if answer.gap is not None and answer.gap <= self.gap:
                return sequences
        own = search(
            level,
            budget_bytes,
            deadline=deadline,
            gap=self.gap,
            corrected=False,
            back_end=self.back_end,
        )
        if own.sequence is not None:
            sequences.append(own.sequence)
        return sequences
