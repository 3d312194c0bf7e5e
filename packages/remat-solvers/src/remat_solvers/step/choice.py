"""Chooses one option for every region of a training step, within one budget, by integer program.

At each time step of the step, what the code between regions holds, what each region keeps that is
between its halves, and what the half at work holds must fit. One option of every region; the least
sum of times: a multiple-choice knapsack with a row per time step. Options that another of the
region beats, time steps that cannot bind, and time steps that another implies are left out before.

Guarantee: the choice is within the budget in whole numbers; `OPTIMAL` is proved to 1e-6 of the
time, which is tried for most of a second; after that, a proof to 0.1% is enough.
Complexity: a MILP of one column per option and one row per time step; less than a second for 100
regions of 10 options and 200 time steps, as a rule.
Source: HiRemate (top level of H-ILP), with blocks that are regions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from remat_graph import Schedule, Status
from remat_solvers.core.incumbent import TOLERANCE
from remat_solvers.core.milp import HIGHS
from remat_solvers.core.problem import Limit, check_whole
from remat_solvers.core.trust import distrust, doubt_of
from remat_solvers.errors import BudgetTooSmall, InvalidProblem, format_bytes
from remat_solvers.step.options import (
    ANY_BYTES,
    RegionFront,
    RegionOption,
    front_of,
    incoming_bytes,
)
from remat_solvers.step.table import Table

__all__ = ["StepChoice", "StepTooLarge", "TimeStep", "choose", "step_bound"]

_SECONDS = 10.0
_SHARE = 0.7  # of the time, before the least budget is looked for


@dataclass(frozen=True, slots=True)
class TimeStep:
    """A time step of the step: `fixed_bytes` held by others, and what regions hold then.

    `live` are pairs of a region and how many calls of it are between their halves. `running` is the
    region whose half is at work; what that half holds includes what its own call keeps, so that
    call is not in `live`.
    """

    fixed_bytes: int
    live: tuple[tuple[int, int], ...]
    running: tuple[int, Literal["forward", "backward"]] | None


@dataclass(frozen=True, slots=True)
class StepChoice:
    """One option per region, by its position: `indices[r]` in the options of region r.

    `time` is the sum over regions of calls and time. No choice of options within the budget takes
    less than `lower_bound`. `peak_bytes` is the most at any of the time steps. `doubt` is as that
    of a `Solution`.
    """

    indices: tuple[int, ...]
    time: float
    lower_bound: float
    status: Status
    peak_bytes: int
    doubt: str | None = None


class StepTooLarge(BudgetTooSmall):
    """No choice of options is within the budget, or none was found within the limit.

    `smallest_bytes` is the most at any time step under the choice of options for which that is
    least, as far as found; no choice of these options goes below `least_bytes`.
    """

    def __init__(
        self, budget_bytes: int, smallest_bytes: int, least_bytes: int, status: Status
    ) -> None:
        super().__init__(budget_bytes, smallest_bytes, least_bytes, None, status)
        shown = [format_bytes(n) for n in (budget_bytes, smallest_bytes, least_bytes)]
        if shown[0] == shown[1]:
            shown = [f"{n} B" for n in (budget_bytes, smallest_bytes, least_bytes)]
        self.args = (
            f"budget {shown[0]} is below {shown[1]}, the least that a choice of options was found "
            f"for (none goes below {shown[2]}); raise the budget, find options that keep less, or "
            f"make the batch smaller",
        )


def choose(
    options: Sequence[Sequence[RegionOption]],
    calls: Sequence[int],
    time_steps: Sequence[TimeStep],
    budget_bytes: int,
    *,
    limit_seconds: float | None = None,
) -> StepChoice:
    """Choose for each region the option with which the step is fastest within the budget.

    `calls[r]` is how often region r runs in the step, all with one option; a region whose calls may
    differ is listed once for each. Ends when the choice is proved the fastest, or after about a
    second when it is proved within 0.1% of it, or at the limit (10 s if none is set).

    Raises:
        InvalidProblem: if a region has no options or no calls, a time step names no region, or a
            number is not what it should be.
        StepTooLarge: if nothing fits, or nothing was found within the limit; a `BudgetTooSmall`.
    """
    table = tabulate(options, calls, time_steps, budget_bytes)
    limit = Limit.starting_now(limit_seconds)
    until = limit.started + limit.left(_SECONDS)
    soon = limit.started + _SHARE * limit.left(_SECONDS)
    chosen = table.fastest(budget_bytes, soon)
    bound, columns = chosen.lower_bound, chosen.columns
    if columns is None:
        smallest = table.smallest(until)
        if smallest.peak_bytes > budget_bytes:
            infeasible = bound == math.inf and doubt_of(HIGHS) is None
            proved = infeasible or smallest.least_bytes > budget_bytes
            least = max(smallest.least_bytes, budget_bytes + 1) if proved else smallest.least_bytes
            status = Status.INFEASIBLE if proved else Status.LIMIT
            raise StepTooLarge(budget_bytes, smallest.peak_bytes, least, status)
        columns = smallest.columns
    step_time = table.time_of(columns)
    if bound > step_time * (1 + TOLERANCE):
        claim = f"the bound {bound:g} to a step within {budget_bytes} bytes"
        distrust(HIGHS, f"it gave {claim}, but a choice takes {step_time:g}")
        bound = table.least_time
    closed = step_time <= bound * (1 + TOLERANCE)
    return StepChoice(
        indices=tuple(c - first for c, first in zip(columns, table.start.tolist(), strict=False)),
        time=step_time,
        lower_bound=min(bound, step_time),
        status=Status.OPTIMAL if closed else Status.FEASIBLE,
        peak_bytes=table.peak_bytes(columns),
        doubt=None if closed else doubt_of(HIGHS),
    )


def step_bound(
    fronts: Sequence[RegionFront],
    calls: Sequence[int],
    time_steps: Sequence[TimeStep],
    budget_bytes: int,
    *,
    limit_seconds: float | None = None,
) -> float:
    """Bound the time of the step within the budget for any schedules of the regions.

    Not only for the options that were found. It is infinity where nothing fits, and holds for
    schedules in the order of their graphs, one for all calls of a region.

    Proof. Take schedules that fit, one of each region. The limits of what is proved (`bounds`) cut
    the plane of kept bytes and peak into cells, so that the schedule of region r, which keeps k and
    peaks at p, is in one cell: `K' < k <= K` and `P' < p <= P`. It is within the box of K and P, so
    its time is at least `front.bound(K, P)`. It keeps more than K', and at least the least that any
    keeps. The half in which it peaks holds more than P', the other at least what any does; and
    since the step after the boundary starts from what was kept and the incoming gradients, the
    backward half holds at least these. So for each cell and each of the two halves there is an
    option, of those bytes and that time, which is nowhere more than the schedule it stands for. The
    options that stand for the schedules fit at every time step, since memory is a sum of theirs,
    with weights that are not negative; and take no more time. Hence the least time over choices of
    such options is a bound, and so is every lower bound on it, such as that of the integer program.

    Raises:
        InvalidProblem: as `choose`.
    """
    limit = Limit.starting_now(limit_seconds)
    cells = [_cells(front) for front in fronts]
    if not all(cells):
        return math.inf
    table = tabulate(cells, calls, time_steps, budget_bytes)
    return table.fastest(budget_bytes, limit.started + limit.left(_SECONDS)).lower_bound


def _cells(front: RegionFront) -> tuple[RegionOption, ...]:
    """List options that are nowhere more than any schedule, one or more for each cell."""
    limits = [(b.kept_bytes, b.peak_bytes) for b in front.bounds]
    keeps = sorted({ANY_BYTES, *(kept for kept, _ in limits)})
    peaks = sorted({ANY_BYTES, *(peak for _, peak in limits)})
    least = front.least_kept_bytes, front.least_forward_bytes, front.least_backward_bytes
    incoming = incoming_bytes(front.graph)
    runs_after = front.graph.boundary_index + 1 < len(front.graph.ops)
    cells: list[RegionOption] = []
    for below_kept, kept in zip([-1, *keeps], keeps, strict=False):
        for below_peak, peak in zip([-1, *peaks], peaks, strict=False):
            time = front.bound(kept, peak)
            if time == math.inf:
                continue
            holds = max(least[0], below_kept + 1)
            before = least[1]
            after = max(least[2], holds + incoming if runs_after else 0)
            for forward, backward in (
                (max(before, below_peak + 1), after),
                (before, max(after, below_peak + 1)),
            ):
                if max(forward, backward) <= peak:
                    cells.append(RegionOption(Schedule(()), holds, forward, backward, time, None))
    return front_of(cells)


def tabulate(
    options: Sequence[Sequence[RegionOption]],
    calls: Sequence[int],
    time_steps: Sequence[TimeStep],
    budget_bytes: int,
) -> Table:
    """Check, and add up what each option holds at each time step.

    Raises:
        InvalidProblem: as `choose`.
    """
    check_whole("budget_bytes", budget_bytes)
    _check(options, calls, time_steps)
    start = np.cumsum([0, *(len(row) for row in options)])
    rows = list(dict.fromkeys(time_steps))
    kept, forward, backward = (
        [np.array([getattr(o, name) for o in row], dtype=np.int64) for row in options]
        for name in ("kept_bytes", "forward_bytes", "backward_bytes")
    )
    weight = np.zeros((len(rows), int(start[-1])), dtype=np.int64)
    for at, step in enumerate(rows):
        for region, count in step.live:
            weight[at, start[region] : start[region + 1]] += count * kept[region]
        if step.running is not None:
            region, half = step.running
            held = forward if half == "forward" else backward
            weight[at, start[region] : start[region + 1]] += held[region]
    return Table(
        start=start,
        time=np.array(
            [count * o.time for row, count in zip(options, calls, strict=True) for o in row]
        ),
        weight=weight,
        fixed=np.array([step.fixed_bytes for step in rows], dtype=np.int64),
    )


def _check(
    options: Sequence[Sequence[RegionOption]], calls: Sequence[int], time_steps: Sequence[TimeStep]
) -> None:
    """Refuse what does not go together.

    Raises:
        InvalidProblem: as `choose`.
    """
    if not options:
        raise InvalidProblem("there are no regions; give the options of one or more")
    if len(calls) != len(options):
        raise InvalidProblem(f"{len(options)} regions, but calls={list(calls)}; give one for each")
    for region, (row, count) in enumerate(zip(options, calls, strict=True)):
        if not row:
            raise InvalidProblem(f"region {region} has no options; give one or more")
        check_whole(f"calls[{region}]", count)
    for step in time_steps:
        check_whole("fixed_bytes", step.fixed_bytes, least=0)
        named = [region for region, _ in step.live]
        for _, count in step.live:
            check_whole("the count of a live region", count, least=0)
        if step.running is not None:
            region, half = step.running
            named.append(region)
            if half not in ("forward", "backward"):
                raise InvalidProblem(f"half {half!r} of {step}; 'forward' or 'backward'")
        for region in named:
            if not 0 <= region < len(options):
                raise InvalidProblem(f"{step} names region {region} of {len(options)}")
