"""Plans for a region that has the whole budget: all of a function, as most models are.

A graph that is known keeps its plan, and one with the ops of a known graph and other sizes takes
the fastest known schedule that fits; what is new is measured and solved.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.budgets.auto import AutoBudget
from remat.planning.planner import (
    SCALAR_BYTES,
    Planned,
    for_missing,
    make_plan,
)
from remat.planning.settings import Settings
from remat.planning.solving import have_same_ops
from remat.session.first_steps import SeenLoss
from remat.session.region import Region
from remat_exec import BudgetExceeded, autocast_type, get_executor
from remat_graph import Graph, simulate
from remat_graph.torch import Capture, Cost, Costs, LossCost
from remat_solvers import BudgetTooSmall

__all__ = ["RegionPlanner"]

Loss = Callable[[Any], Any]


@dataclass(eq=False)
class RegionPlanner:
    """Plans for regions that are alone, and what is known from earlier ones.

    `auto` fixes that budget. `costs` are what operators were measured to cost, and are added to.
    """

    settings: Settings
    auto: AutoBudget
    costs: dict[str, Cost] = field(default_factory=dict)
    _known: list[Planned] = field(default_factory=list)
    _plain_bytes: dict[torch.dtype | None, dict[frozenset[int], int]] = field(default_factory=dict)

    @property
    def first_costs(self) -> Costs:
        """With which a graph is captured, before it is known whether it must be measured."""
        return "estimate" if self.settings.costs == "measure" else self.settings.costs

    def plan(self, region: Region, inputs: Sequence[Any], loss: Loss | None) -> Planned:
        """Plan with room for what a loss was seen to take, or without if no plan has.

        `loss` makes it of what the region returns, to be measured.
        """
        seen = region.seen_loss
        if seen is None or region.numbers(inputs) in region.left:
            return self._plan(region, inputs, loss, None)
        try:
            return self._plan(region, inputs, loss, seen)
        except (BudgetTooSmall, BudgetExceeded) as error:
            made = self._plan(region, inputs, loss, None)
            region.leave_loss(inputs, error)
            return made

    def _plan(
        self,
        region: Region,
        inputs: Sequence[Any],
        loss: Loss | None,
        seen_loss: SeenLoss | None,
    ) -> Planned:
        """Plan for a region that is all of the function.

        The graph is captured with estimated costs first: if it is known, or has the ops of one that
        is, its plan is too, and nothing is measured or solved.
        """
        settings = self.settings
        measured = settings.costs == "measure"
        start = time.perf_counter()
        captured = region.captured(inputs, self.first_costs)
        if region.expected is not None:
            captured = for_missing(captured, region.expected)
        kin = self._kin(captured)
        if not kin:  # the layouts that were traced may have been faster within the budget
            traced = captured.in_traced_layouts()
            kin = self._kin(traced)
            captured = traced if kin else captured
        if region.released_outputs:
            captured = captured.with_released_outputs(region.released_outputs)
        seen = None if seen_loss is None else seen_loss.of(captured)
        if seen is not None:
            captured = captured.with_loss(captured.loss.at_least(seen))
        for known in kin:
            if (
                known.capture.released_outputs == captured.released_outputs
                and _is_equal(known.capture.graph, captured.with_loss(known.capture.loss).graph)
                and (seen is None or known.plan is not region.exceeded)
                and (seen is None or _has_room(known, known.capture.loss.at_least(seen)))
            ):
                same = replace(captured, graph=known.capture.graph, loss=known.capture.loss)
                executable = get_executor(settings.executor)(
                    same, known.plan.schedule, budget_bytes=known.plan.budget_bytes
                )
                return Planned(known.plan, same, executable)
        same_sizes = any(_have_same_costs(known.capture.graph, captured.graph) for known in kin)
        of_other_sizes = measured and kin and not same_sizes
        if measured and not of_other_sizes:  # of the same sizes all is measured already
            captured = captured.costed("measure", self.costs)
        if loss is not None:
            settings = replace(settings, loss=loss)
        if settings.budget.is_auto:
            settings = replace(settings, budget=self.auto.fix())
        plain_bytes = self._plain_bytes.setdefault(autocast_type(captured.program.device), {})
        made = functools.partial(
            make_plan,
            region.graph,
            tuple(inputs),
            {},
            settings,
            run=True,
            missing=region.expected,
            released_outputs=region.released_outputs or frozenset(),
            seen=seen,
            plain_bytes=plain_bytes,
            schedules=[
                known.plan.schedule
                for known in kin
                if known.capture.released_outputs == captured.released_outputs
            ],
            given=None if self._known else settings.given_region,
            started=start,
        )
        try:
            planned = made(captured)
        except BudgetExceeded:
            if not of_other_sizes:
                raise
            planned = made(captured.costed("measure", self.costs))  # estimates know no workspace
        if (
            region.expected is None
            and settings.given_region is None
            and self._is_for_too_few(planned)
        ):
            with contextlib.suppress(BudgetTooSmall, BudgetExceeded):
                planned = made(planned.capture, missing=frozenset(), schedules=[])
        plan = planned.plan
        missing = planned.capture.missing
        known_bytes = plain_bytes.get(missing, 0)
        plain_bytes[missing] = max(known_bytes, plan.plain_peak_bytes or 0)
        self._known.append(planned)
        return planned

    def _kin(self, captured: Capture) -> list[Planned]:
        """Find the plans of graphs with the ops of this one, for the same gradients."""
        return [
            known
            for known in self._known
            if known.capture.missing == captured.missing
            and have_same_ops(
                known.capture.graph,
                captured.with_released_outputs(known.capture.released_outputs).graph,
            )
        ]

    def _is_for_too_few(self, planned: Planned) -> bool:
        """Whether a backward over more than what was taken for the loss is likely, or impossible.

        That is, where it would not fit: likely if some parameters get no gradient of that, as of a
        penalty beside the outputs; impossible, whatever the budget, if it needs again what may be
        computed only once, for it reads what the forward overwrites.
        """
        capture = planned.capture
        if not capture.missing or planned.executable.takes_all:
            return False
        if not set(capture.differentiable) <= capture.program.gradients.keys():
            return True
        executor = get_executor(self.settings.executor)
        return not executor(capture, planned.plan.schedule, budget_bytes=None).takes_all


def _has_room(known: Planned, loss: LossCost) -> bool:
    """Whether a plan stays within its budget where a loss takes so much."""
    capture, plan = known.capture, known.plan
    graphs = capture.graph, capture.with_loss(loss).graph
    before, after = (simulate(graph, plan.schedule).peak_bytes for graph in graphs)
    unforeseen = max(0, (plan.measured_peak_bytes or 0) - before)
    aside = SCALAR_BYTES["cuda" if capture.program.device.type == "cuda" else "cpu"]
    return after + unforeseen + aside <= plan.budget_bytes


def _is_equal(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same but for costs."""
    return one.values == other.values and _have_same_costs(one, other)


def _have_same_costs(one: Graph, other: Graph) -> bool:
    """Whether the operators of two graphs of as many ops run on the same sizes."""
    return all(a.equivalence == b.equivalence for a, b in zip(one.ops, other.ops, strict=True))
