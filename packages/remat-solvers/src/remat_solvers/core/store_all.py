"""Store everything: each op once, in the order of the graph, every value freed after its last use.

What plain autograd would hold at best.

Guarantee: no schedule is faster, so it is optimal wherever it fits; but for alternatives that are
faster and read what is optional. Complexity: linear.
Limits: where it does not fit it says so, and nothing else.
Source: the "checkpoint all" of Jain et al. 2020, section 6.1 and table 1: the ideal for the time.
"""

from __future__ import annotations

from typing import ClassVar

from remat_graph import Graph, Schedule, Solution
from remat_solvers.core.alternatives import store_all_sequence
from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.problem import Limit, PlainSolver, Problem, Report
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring, expand

__all__ = ["StoreAll", "store_all"]


def store_all(graph: Graph) -> Schedule:
    """Compute every op once, in order; free values right after their last use, results never.

    Where there are alternatives, in the fastest ways of all that read nothing optional.
    """
    wiring = Wiring.of(graph)
    return expand(wiring, store_all_sequence(wiring))


class StoreAll(PlainSolver):
    """The schedule without recomputation: optimal if it fits, else nothing (`LIMIT`)."""

    name: ClassVar[str] = "store-all"
    takes_alternatives: ClassVar[bool] = True
    citation: ClassVar[str] = (
        "The schedule of reverse-mode automatic differentiation, without a method; as a baseline "
        "in P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, "
        "J. Gonzalez: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization. "
        "MLSys 2020."
    )

    def can_solve(self, problem: Problem) -> str | None:
        """Take any problem."""
        return None

    def solve(self, problem: Problem, limit: Limit, report: Report) -> Solution:
        """Say whether storing everything is within the budget."""
        wiring = problem.wiring
        incumbent = Incumbent(self.name, wiring, problem.budget_bytes, limit, report)
        stored = trace(wiring, store_all_sequence(wiring))
        incumbent.say("fits" if incumbent.offer(stored) else f"needs {stored.peak_bytes} bytes")
        return incumbent.solution()
