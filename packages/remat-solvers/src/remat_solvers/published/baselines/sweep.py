"""Schedule one proposal after another and keep the fastest that fits.

Guarantee: the schedule is within the budget; `lower_bound` is the time of computing every op once;
`INFEASIBLE` only where one op alone needs more than the budget (`peak_bound`).
Complexity: one `Stages.least_run` and one trace per proposal.
"""

from __future__ import annotations

from collections.abc import Iterable

from remat_graph import Solution
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.incumbent import Incumbent
from remat_solvers.core.problem import Limit, Report
from remat_solvers.published.checkmate.stages import Bits, Stages

__all__ = ["cheapest"]

_DEFAULT_SECONDS = 60.0


def cheapest(
    solver: str,
    stages: Stages,
    budget_bytes: int,
    limit: Limit,
    report: Report,
    proposals: Iterable[tuple[str, Bits]],
) -> Solution:
    """Try all proposals (what they are, what they keep), at least one whatever the limit."""
    incumbent = Incumbent(solver, stages.wiring, budget_bytes, limit, report)
    for label, kept in proposals:
        fits = incumbent.offer(stages.schedule(kept))
        incumbent.say(f"{label}: {'fits' if fits else 'over budget'}")
        if limit.left(_DEFAULT_SECONDS) <= 0:
            break
    if peak_bound(stages.wiring).peak_bytes > budget_bytes:
        incumbent.refuse()
    return incumbent.solution()
