"""What is drawn of time against memory: the least time found within budgets, and the bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from remat.plans.plan import Plan
from remat_solvers import Tradeoff, tradeoff
from remat_solvers.step import RegionFront, StepTooLarge, TimeStep, choose

__all__ = ["Curve", "curve_of_step"]

_POINTS = 8
_SECONDS = 5.0  # for one choice; most take far less


@dataclass(frozen=True, slots=True)
class Curve:
    """Pairs of a budget in bytes and a time in seconds, by rising budget.

    Within the budgets of `points` a schedule takes that time; within those of `bounds` none takes
    less.
    """

    points: tuple[tuple[int, float], ...]
    bounds: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, curve: Tradeoff) -> Curve:
        """Read the curve of one graph."""
        points = curve.points
        return cls(
            tuple((p.budget_bytes, p.solution.time) for p in points if p.solution is not None),
            tuple((p.budget_bytes, p.lower_bound) for p in points if p.lower_bound is not None),
        )

    @classmethod
    def of_plan(cls, plan: Plan, limit_seconds: float | None) -> Curve:
        """Find the curve of the step of a plan."""
        if plan.is_one_region:
            return cls.of(tradeoff(plan.graph, limit_seconds=limit_seconds))
        fronts = [
            plan.kinds[kind].front.with_([everything], ())
            for (_, kind), everything in zip(plan.calls, plan.everything, strict=True)
        ]
        return curve_of_step(fronts, plan.moments, plan.store_all_peak_bytes, limit_seconds)


def curve_of_step(
    fronts: Sequence[RegionFront],
    moments: Sequence[TimeStep],
    most_bytes: int,
    limit_seconds: float | None,
) -> Curve:
    """Choose among the known options of each call for eight budgets.

    Nothing is proved of others: moments are what a recorded step showed.
    Budgets are spread from the smallest for which there is a choice up to `most_bytes`. All take
    `limit_seconds` at most, or some seconds each.
    """
    calls = [1] * len(fronts)
    options = [front.options for front in fronts]
    seconds = _SECONDS if limit_seconds is None else limit_seconds / (_POINTS + 1)
    try:
        choose(options, calls, moments, 1, limit_seconds=seconds)
        smallest = 1
    except StepTooLarge as error:
        smallest = error.smallest_bytes
    chosen = []
    for point in range(_POINTS):
        budget = smallest + max(0, most_bytes - smallest) * point // (_POINTS - 1)
        with contextlib.suppress(StepTooLarge):  # none was found in time
            choice = choose(options, calls, moments, budget, limit_seconds=seconds)
            chosen.append((budget, choice.time))
    return Curve(tuple(chosen), ())
