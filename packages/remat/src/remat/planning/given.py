"""A plan that is handed over instead of solving: `rematerialize(model, plan=...)`.

It is used where a fresh capture has the same outline, by positions instead of names, and passes the
simulator, the budget and a measured run as any plan does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remat.errors import PlanMismatch, RematError
from remat.planning.given_step import GivenStep
from remat.plans.file import PLAN, STEP_PLAN, kind_of
from remat.plans.outlines import Outline
from remat.plans.plan import Plan, least_exact
from remat.plans.step import StepPlan
from remat_exec import BudgetExceeded
from remat_graph import (
    Graph,
    InvalidSchedule,
    Numerics,
    Schedule,
    Solution,
    Status,
    canonical_hash,
    decode,
    simulate,
)
from remat_graph.torch import Capture

__all__ = ["GivenPlan", "PlanLike", "read_given"]

PlanLike = Plan | StepPlan | Schedule | Solution | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """A plan, or a bare schedule in the names of the model's own graph; `name` is told in errors.

    `budget_bytes` is what it was made for, `None` for a schedule.
    """

    plan: Plan | Schedule
    name: str

    @property
    def budget_bytes(self) -> int | None:
        """The budget that it was made for; `None` for a bare schedule."""
        return self.plan.budget_bytes if isinstance(self.plan, Plan) else None

    def fit(self, captured: Capture, numerics: Numerics | None) -> tuple[Capture, Schedule]:
        """Give its schedule in the names of a capture, for the gradients and outputs it is for.

        The capture is given with the alternatives and layouts that a plan was made with, which must
        run nothing less exact than `numerics`, that is what was asked for.

        Raises:
            PlanMismatch: if it is of another graph, saying where that first differs, or less exact.
        """
        if isinstance(self.plan, Schedule):
            try:
                simulate(captured.graph, self.plan)
            except InvalidSchedule as error:
                raise PlanMismatch(
                    f"{self.name} is no schedule of the model's graph: {error}. Names differ from "
                    f"capture to capture; give the schedule with the graph that it was made for, "
                    f"as remat.Plan.of(graph, schedule, budget)"
                ) from None
            return captured, self.plan
        run = self.plan.numerics
        if run is not None and not (numerics is not None and numerics.allows(run)):
            asked = "was not given" if numerics is None else f"is {numerics.value!r}"
            raise PlanMismatch(
                f"{self.name} makes values in other ways, numerics={run.value!r}, and numerics= "
                f"{asked} here; give numerics={run.value!r}, or make the plan again without"
            )
        there = Outline.of(self.plan.graph)
        difference: str | None = None
        plain = captured.without_alternatives()
        for traced in (plain, _as_planned(plain, self.plan)):
            variant = _with_ways_of(traced, self.plan)
            here = Outline.of(variant.graph)
            differs = there.difference(here, self.name, "the model")
            if differs is None:
                return variant, there.translate(self.plan.schedule, here)
            difference = difference or differs
        raise PlanMismatch(
            f"{self.name} was made for another graph: {difference}. Make the plan again for this "
            f"model and call, or leave plan= out"
        )

    def solution(self, graph: Graph, schedule: Schedule, target: int, budget: int) -> Solution:
        """Judge its schedule on a graph, which must not take more than `target`.

        What was proved of it holds where costs and budget are the same.

        Raises:
            BudgetExceeded: if it takes more, speaking of the budget.
        """
        timeline = simulate(graph, schedule)
        if timeline.peak_bytes > target:
            raise self.over(timeline.peak_bytes + budget - target, budget)
        if isinstance(self.plan, Plan):
            solution = replace(
                self.plan.solution,
                schedule=schedule,
                time=timeline.time,
                peak_bytes=timeline.peak_bytes,
            )
            same = canonical_hash(self.plan.graph) == canonical_hash(graph)
            if same and self.plan.budget_bytes == budget:
                return solution
            return replace(
                solution, status=Status.FEASIBLE, lower_bound=graph.least_time, trials=()
            )
        return Solution(
            Status.FEASIBLE,
            schedule,
            timeline.time,
            timeline.peak_bytes,
            graph.least_time,
            "given",
            0.0,
        )

    def over(self, peak: int, budget: int) -> BudgetExceeded:
        """Say that it takes more than the budget here."""
        return BudgetExceeded(
            f"{self.name} takes {peak:,} bytes here, over the budget of {budget:,}; raise the "
            f"budget, or leave plan= out and have another plan made",
            budget,
            peak,
        )


def read_given(given: PlanLike) -> GivenPlan | GivenStep:
    """Take a plan, a schedule, a solution, or a file of one of these.

    Raises:
        DocumentError: if the file is damaged.
        OSError: if it cannot be read.
        RematError: if it holds something else, or no schedule.
    """
    name = "the plan"
    found: object = given
    if isinstance(given, str | os.PathLike):
        name = os.fspath(given)
        data = Path(name).read_bytes()
        readers: dict[str | None, Any] = {PLAN: Plan.decode, STEP_PLAN: StepPlan.decode}
        found = readers.get(kind_of(data), decode)(data, source=name)
    if isinstance(found, StepPlan):
        return GivenStep(found, name)
    if isinstance(found, Solution):
        found = found.schedule
    if not isinstance(found, Plan | Schedule):
        raise RematError(
            f"plan={given!r} has no schedule; give a plan, a Schedule, a Solution with a schedule, "
            f"or the path of a file with one of these"
        )
    return GivenPlan(found, name)


def _with_ways_of(captured: Capture, plan: Plan) -> Capture:
    """Give a capture the alternatives and layouts of a plan's graph."""
    numerics = least_exact(plan.graph.ops)
    if numerics is None:
        return captured
    return captured.with_alternatives(numerics, laid_out=plan.laid_out)


def _as_planned(captured: Capture, plan: Plan) -> Capture:
    """Expect the gradients that a plan expects, and hold the outputs that it holds."""
    if plan.missing and plan.missing < set(captured.program.tangents.values()) | captured.missing:
        captured = captured.variant(plan.missing)
    positions = range(len(captured.program.returned))
    return captured.with_released_outputs(plan.released_outputs.intersection(positions))
