"""Store everything: each op once, in the order of the graph, every value freed after its last use.

What plain autograd would hold at best.

Guarantee: no schedule is faster, so it is optimal wherever it fits; but for alternatives that are
faster and read what is optional. Complexity: linear.
Limits: where it does not fit it says so, and nothing else.
Source: the "checkpoint all" of Jain et al. 2020, section 6.1 and table 1: the ideal for the time.
"""

from __future__ import annotations

from typing import ClassVar

from remat_graph import Graph, Schedule, Solution, Status, simulate
from remat_solvers.core.incumbent import TOLERANCE
from remat_solvers.core.makers import least_time, store_all_sequence
from remat_solvers.core.problem import Limit, Problem, Progress, Report
from remat_solvers.core.wiring import Wiring, expand

__all__ = ["StoreAll", "store_all"]


def store_all(graph: Graph) -> Schedule:
    """Compute every op once, in order; free values right after their last use, results never.

    Where there are alternatives, in the fastest ways of all that read nothing optional.
    """
    return _store_all(Wiring.of(graph))


def _store_all(wiring: Wiring) -> Schedule:
    return expand(wiring, store_all_sequence(wiring))


_STATUS = {True: Status.OPTIMAL, False: Status.FEASIBLE}


class StoreAll:
    """The schedule without recomputation: optimal if it fits, else nothing (`LIMIT`)."""

    name: ClassVar[str] = "store-all"
    exact: ClassVar[bool] = False
    needs_hierarchy: ClassVar[bool] = False
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
        schedule = _store_all(problem.wiring)
        timeline = simulate(problem.graph, schedule)
        fits = timeline.peak_bytes <= problem.budget_bytes
        bound = min(timeline.time, least_time(problem.wiring))
        fastest = timeline.time <= bound * (1 + TOLERANCE)
        message = "fits" if fits else f"needs {timeline.peak_bytes} bytes"
        report(
            Progress(
                solver=self.name,
                round=1,
                incumbent_time=timeline.time if fits else None,
                incumbent_peak_bytes=timeline.peak_bytes if fits else None,
                lower_bound=bound,
                seconds=limit.elapsed,
                message=message,
            )
        )
        return Solution(
            status=_STATUS[fastest] if fits else Status.LIMIT,
            schedule=schedule if fits else None,
            time=timeline.time,
            peak_bytes=timeline.peak_bytes,
            lower_bound=bound,
            solver=self.name,
            solve_seconds=limit.elapsed,
        )
