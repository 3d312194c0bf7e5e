"""`refine`: rounds of the stage-refined ILP, each certified, repaired and improved.

A first schedule comes of repairing storing everything (`evict`) or, where little fits, of running
the ops within the budget in one pass (`paging`). Memory binds only at a few moments, so the program
has few checkpoints (`relaxation`): the first are chosen by linear relaxations or, where the first
program is small, are the ops that leave least room (`moments`). A round solves it, while the search
goes on beside it on a second core (`background`), takes the back end's dual bound as a lower bound
on the time of every schedule in the order of the graph, builds a schedule from the point, and
simulates it. Within budget: done, and the gap is certified. Else the schedule is repaired, pruned,
improved by local search, and kept if it is the fastest so far, and checkpoints and running-memory
rows are added where it was over budget. The first program is also solved with reserves, less room
than the budget, for schedules that overshoot less; what they leave free is pruned back. Where a
wide gap is left, a graph that is a chain of blocks is planned as one (`rotor`). On graphs of about
a dozen ops a search of all states (`exhaust`) closes what the program leaves open.

Guarantee: `lower_bound` holds for every schedule that computes all ops (those that nothing reads
count too), first computations in the order of the graph; `OPTIMAL` means a time within 1e-6 of it,
`INFEASIBLE` that the program is.
Complexity: rounds of MILPs, stopped by the limit; large ones begin with their linear relaxation,
and very large ones end there. 100,000 ops of a GPT-2 take about 20 seconds
(`benchmarks/growth.py`).
Limits: the order of first computations is fixed; recomputations of one op in one segment count once
in the bound. Source: ALGORITHMS.md, "Stage-refined ILP"; Checkmate (Jain et al. 2020), section 4.
"""

from __future__ import annotations

import time
from typing import ClassVar

from remat_graph import Solution
from remat_solvers.core.problem import Limit, Problem, Report
from remat_solvers.core.wiring import Wiring, in_order
from remat_solvers.refine.joint import Joint
from remat_solvers.refine.rounds import Rounds
from remat_solvers.refine.state import State
from remat_solvers.search.smallest import smallest_trace

__all__ = ["Refine"]

_DEFAULT_SECONDS = 30.0


class Refine:
    """The stage-refined ILP; exact in the limit on most graphs, with a certified bound always."""

    name: ClassVar[str] = "refine"
    exact: ClassVar[bool] = True
    needs_hierarchy: ClassVar[bool] = False
    takes_alternatives: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "The stage-refined integer program of remat-solvers, a relaxation of the program of "
        "P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. Gonzalez: "
        "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization. MLSys 2020."
    )

    def can_solve(self, problem: Problem) -> str | None:
        """Take any graph that has an op."""
        return None if problem.graph.ops else "the graph has no ops"

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Refine until the gap is closed or the limit is reached.

        If none is set: 30 s at most, less where little can be gained and nothing was for a while.
        """
        wiring = Wiring.of(problem.graph)
        last_moment = time.perf_counter() + limit.left(_DEFAULT_SECONDS)
        if problem.graph.has_alternatives:
            joint = State(wiring, problem.budget_bytes, last_moment, limit, report)
            Joint(joint, problem.start).run()
            return joint.solution()
        start = None if problem.start is None else in_order(wiring, problem.start)
        state = State(wiring, problem.budget_bytes, last_moment, limit, report)
        Rounds(state, start).run()
        if state.best is None:
            state.offer(smallest_trace(wiring, time.perf_counter() + 1.0))
        return state.solution()
