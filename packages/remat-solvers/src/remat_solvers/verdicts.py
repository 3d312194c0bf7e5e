"""What solvers claim of all schedules, held against every schedule in hand.

A claim speaks of the schedules whose first computations are in the order of the graph: within so
many bytes none takes less than some time; where that is infinite, there is none. `OPTIMAL`,
`INFEASIBLE`, a bound on the time, a minimal peak are all of this form. Any such schedule, whoever
found it, for this budget or a smaller one, can refute it. Storing everything is always in hand.

A refuted claim is dropped. If a MILP back end is behind it, by a solver of this package, that back
end is believed no more (`core.trust`), and what was found is not certified; any other solver is
broken.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from remat_graph import Schedule, Solution, Status, simulate
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.alternatives import is_in_order, least_time, store_all_sequence
from remat_solvers.core.incumbent import TOLERANCE
from remat_solvers.core.milp import HIGHS
from remat_solvers.core.trust import distrust, doubt_of
from remat_solvers.core.wiring import Wiring, expand, sequence_of
from remat_solvers.errors import BrokenSolver, BudgetTooSmall
from remat_solvers.registry import Chosen

__all__ = [
    "Claim",
    "Verdicts",
    "claim_of",
    "doubt_about",
    "doubt_or_raise",
    "minimal_peak_claim",
    "uncertified",
    "unproved",
]


@dataclass(frozen=True, slots=True)
class Claim:
    """No schedule within `budget_bytes` takes less than `time`, in the words of `text`.

    `by` is `None` where it comes of several solvers of this package.
    """

    by: Chosen | None
    budget_bytes: int
    time: float
    text: str


def claim_of(by: Chosen | None, budget_bytes: int, answer: Solution) -> Claim:
    """Say what the answer of a solver claims of all schedules within a budget."""
    bound = 0.0 if answer.lower_bound is None else answer.lower_bound
    text = f"claims the bound {bound} at {budget_bytes} bytes"
    if answer.status is Status.INFEASIBLE:
        bound, text = math.inf, f"claims that nothing fits {budget_bytes} bytes"
    elif answer.status is Status.OPTIMAL and answer.time > bound:
        bound, text = answer.time, f"claims that {answer.time} is optimal at {budget_bytes} bytes"
    return Claim(by, budget_bytes, bound, text)


def minimal_peak_claim(least_bytes: int, by: Chosen | None = None) -> Claim:
    """Say that no schedule has a smaller peak."""
    below = least_bytes - 1
    return Claim(by, below, math.inf, f"claims that nothing fits {below} bytes")


class Verdicts:
    """The schedules in hand of one graph, and what is claimed of all."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._least_time = least_time(wiring)
        self._witnesses: list[_Witness] = []
        self._claims: list[Claim] = []

    def show(self, by: str, schedule: Schedule, time: float, peak_bytes: int) -> None:
        """Take a legal schedule, with the simulator's figures, and who found it."""
        self._witnesses.append(_Witness(self._wiring, by, schedule, time, peak_bytes))

    def claim(self, claim: Claim) -> None:
        """Take a claim, unless it says no more than what everyone knows."""
        if claim.time > self._least_time * (1 + TOLERANCE):
            self._claims.append(claim)

    def bound(self, budget_bytes: int) -> float:
        """Return the time that none within a budget takes less than; infinity if there is none."""
        claimed = (claim.time for claim in self._claims if claim.budget_bytes >= budget_bytes)
        return max(claimed, default=self._least_time)

    @property
    def least_bytes(self) -> int:
        """Return the peak that none goes below, by all claims; 0 if there are none."""
        claimed = (claim.budget_bytes + 1 for claim in self._claims if claim.time == math.inf)
        return max(claimed, default=0)

    def refuted(self) -> list[tuple[Claim, str]]:
        """Drop the claims that a schedule in hand refutes, and give them, each with what does."""
        causes = [(claim, self._refute(claim)) for claim in self._claims]
        self._claims = [claim for claim, cause in causes if cause is None]
        return [(claim, cause) for claim, cause in causes if cause is not None]

    def _refute(self, claim: Claim) -> str | None:
        for witness in (self._stored, *self._witnesses):
            fits = witness.peak_bytes <= claim.budget_bytes
            if fits and witness.time * (1 + TOLERANCE) < claim.time and witness.is_in_order:
                return (
                    f"{claim.text}, but a schedule of {witness.by!r} takes {witness.time} within "
                    f"{witness.peak_bytes} bytes"
                )
        return None

    @functools.cached_property
    def _stored(self) -> _Witness:
        schedule = expand(self._wiring, store_all_sequence(self._wiring))
        timeline = simulate(self._wiring.graph, schedule)
        return _Witness(self._wiring, "store-all", schedule, timeline.time, timeline.peak_bytes)


@dataclass(frozen=True)
class _Witness:
    wiring: Wiring
    by: str
    schedule: Schedule
    time: float
    peak_bytes: int

    @functools.cached_property
    def is_in_order(self) -> bool:
        """Whether claims speak of it."""
        return is_in_order(self.wiring, sequence_of(self.wiring, self.schedule))


def doubt_or_raise(claim: Claim, cause: str) -> str:
    """Believe the back end behind a false claim no more, and say so.

    Raises:
        BrokenSolver: if there is none of this package behind it.
    """
    by = claim.by
    if by is None:
        return distrust(HIGHS, f"remat-solvers, by its word, {cause}")
    back_end = _back_end_of(by)
    if back_end is None:
        raise BrokenSolver(by.name, by.origin, f"it {cause}")
    return distrust(back_end, f"{by.name}, by its word, {cause}")


def doubt_about(by: Chosen) -> str | None:
    """Say why the back end behind a solver is not believed; `None` if it is, or there is none."""
    back_end = _back_end_of(by)
    return None if back_end is None else doubt_of(back_end)


def _back_end_of(by: Chosen) -> str | None:
    """Name the MILP back end by whose word a solver of this package claims things."""
    back_end = getattr(by.solver, "back_end", None)
    ours = type(by.solver).__module__.startswith("remat_solvers.")
    return back_end if ours and isinstance(back_end, str) else None


def uncertified(answer: Solution, doubt: str) -> Solution:
    """Take from an answer what it claims of all schedules."""
    status = {Status.OPTIMAL: Status.FEASIBLE, Status.INFEASIBLE: Status.LIMIT}
    return dataclasses.replace(
        answer, status=status.get(answer.status, answer.status), lower_bound=None, doubt=doubt
    )


def unproved(error: BudgetTooSmall, wiring: Wiring) -> BudgetTooSmall:
    """Take from a refusal what it claims beyond what the ops need one by one."""
    floor = peak_bound(wiring)
    proved = floor.peak_bytes > error.budget_bytes
    return BudgetTooSmall(
        error.budget_bytes,
        error.smallest_bytes,
        floor.peak_bytes,
        floor.op,
        Status.INFEASIBLE if proved else Status.LIMIT,
        error.results_bytes,
        error.schedule,
    )
