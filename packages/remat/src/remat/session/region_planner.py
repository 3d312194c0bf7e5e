"""Plans for a region that has the whole budget: all of a function, as most models are.

A graph that is known keeps its plan, and one with the ops of a known graph and other sizes takes
the fastest known schedule that fits; what is new is measured and solved.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.budgets.auto import AutoBudget
from remat.cache import remembered_costs
from remat.errors import BudgetWarning, PlanMismatch
from remat.planning.infeasible import NotPlanned, warn_infeasible
from remat.planning.planner import for_missing, is_for_too_few, make_plan
from remat.planning.settings import Settings
from remat.planning.task import RunnablePlan
from remat.session.awaited_plan import AwaitedPlan
from remat.session.deferring import (
    note_deferred,
    note_deferred_of_region,
    with_outputs,
    with_unread_deferred,
)
from remat.session.earlier_plans import has_room, have_same_costs, is_equal, with_kin
from remat.session.kind_finder import KindFinder
from remat.session.kinds import CapturedRegion
from remat.session.leaving import able_to_leave, may_leave
from remat.session.near_kinds import Kinds
from remat.session.nearby_sizes import plan_nearby
from remat.session.region import Region, device_of, forget_last, is_computed
from remat.session.region_captures import RegionCaptures
from remat.session.shown import SeenLoss
from remat.session.step import StepState
from remat.session.step_kernels import StepKernels
from remat_exec import BudgetExceeded, Executor, autocast_type, get_executor
from remat_graph.torch import (
    Capture,
    CaptureError,
    Cost,
    KernelsMissing,
    LossCost,
    NoBackward,
    collector_at_rest,
    kernels_there_alone,
)
from remat_solvers import BudgetTooSmall

__all__ = ["RegionPlanner", "leads_to"]

logger = logging.getLogger(__name__)

Loss = Callable[[Any], Any]


class RegionPlanner:
    """Captures regions, and plans for those that have the whole budget.

    `auto` fixes that budget. `costs` are what operators were measured to cost, and are added to.
    What is known from earlier plans is used for later ones.
    """

    def __init__(
        self, settings: Settings, auto: AutoBudget, kinds: Kinds, breaks: list[str]
    ) -> None:
        self.settings, self.auto = settings, auto
        self._kinds, self._breaks = kinds, breaks
        self.kernels = StepKernels(settings)
        self._finder = KindFinder(settings, kinds, settings.step_plan, self.kernels)
        self._changes: dict[Hashable, dict[int, bool | None]] = {}
        self._unplanned: set[str] = set()
        self.costs: dict[str, Cost] = {}
        self._captures = RegionCaptures(settings, self.costs)
        self._planned: list[RunnablePlan] = []
        self._awaited = AwaitedPlan(settings.region_plan)
        self._plain_bytes: dict[torch.dtype | None, dict[frozenset[int], int]] = {}

    @functools.cached_property
    def _executor(self) -> Executor:
        return get_executor(self.settings.executor)

    def communicates(self, region: Region, inputs: Sequence[Any]) -> bool:
        """Whether a region sends to other processes: rehearsed, it would send what none awaits."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return False
        with contextlib.suppress(CaptureError):  # which planning raises again
            return self._captures.of(region, inputs).communicates
        return False

    def see_call(self, region: Region, inputs: Sequence[Any]) -> None:
        """See a call that is to be planned for."""
        logger.info("planning for %s", region.name)
        if region.caller is not None and is_computed(inputs, ()):
            warnings.warn(
                f"{leads_to(region.caller)}: what it holds there is not counted, beside the "
                f"budget; remat.rematerialize counts it",
                BudgetWarning,
                stacklevel=2,
            )
            region.caller = None
        if self.settings.budget.is_auto:
            self.auto.see(inputs, device_of(inputs))

    def could_not_plan(self, region: Region) -> bool:
        """Whether a region was found that cannot be captured."""
        return region.name in self._unplanned

    def refuse_user_plan(self) -> None:
        """Refuse a plan of one region for a model of several.

        Raises:
            PlanMismatch: if the user brought one.
        """
        plan = self.settings.region_plan
        if plan is not None:
            where = "; ".join(dict.fromkeys(self._breaks)) or "other ranks take part in it"
            raise PlanMismatch(
                f"{plan.name} is for a model whose forward is one region, and this one's is not: "
                f"{where}. Leave plan= out, and save the plan that is made"
            )

    def plan_shared(
        self, region: Region, inputs: Sequence[Any], step: StepState
    ) -> CapturedRegion | None:
        """Find the options of a region that shares the budget; `None` if it is to run as it is.

        Raises:
            PlanMismatch: in the first step, if it is none of the regions of the user's plan.
        """
        try:
            capture = self._for_expected(region, inputs, loss_alone=False)
            able = able_to_leave(self._executor, capture, region.graph, inputs)
            leaving = may_leave(able, region.leaving.get(True), self.settings.step_plan)[0]
            capture = with_unread_deferred(self.settings, region, capture)
            capture = capture.with_leaving_gradients(leaving)
            capture = capture.with_loss(LossCost(0, 0))  # what is between the halves is measured
            capture = capture.with_released_outputs(frozenset(range(len(capture.program.returned))))
            step.device = capture.program.device
            step.add_region(runs_first=region.place not in self._changes)  # not of sizes alone
            position = len(step.calls) if step.done == 0 else None
            number, capture = self._finder.find(
                region.name,
                capture,
                self.costs,
                position,
                step.planner.known_budget or step.lone_budget,
            )
            kind = self._kinds[number]
            kind.room = kind.room or step.lone_budget  # it may be the only call
        except NoBackward:
            return None
        except CaptureError as error:
            level = logging.INFO if self.could_not_plan(region) else logging.WARNING
            self._unplanned.add(region.name)  # which may be found again for each new number
            reason = str(error)  # which holds no frames, whoever keeps what is logged
            logger.log(
                level, "%s runs as it is, its memory is not planned: %s", region.name, reason
            )
            self._breaks.append(f"{region.name} runs as it is: {reason}")
            return None
        changes = self._changes.setdefault(region.place, {})
        plan = CapturedRegion(number, capture, kind, self._executor, changes)
        note_deferred_of_region(self.settings, region, plan)
        return plan

    def plan_one(
        self,
        region: Region,
        numbers: tuple[Any, ...],
        inputs: Sequence[Any],
        loss: Loss | None,
        rebuilt: Callable[[Any], Any],
    ) -> RunnablePlan | NotPlanned | None:
        """Plan for a region that has the whole budget; `None` if it is to run as it is.

        `loss` makes it of what the region returns, to be measured; `rebuilt` gives what the
        function returns, if its region returns this.
        """
        nearby = plan_nearby(self.settings, self._executor, region, numbers, inputs, loss)
        if nearby is not None:
            if self.settings.runs_groups_on(device_of(inputs)):
                region.kernels.meet(nearby)
            return nearby
        try:
            with (
                remembered_costs(self.costs, device_of(inputs), self.settings.costs),
                # of a size beside others that takes milliseconds
                collector_at_rest() if region.plans else contextlib.nullcontext(),
            ):
                planned = self._first_that_fits(region, numbers, inputs, loss, rebuilt)
        except NoBackward:
            return None
        except PlanMismatch:  # of a plan that was made in steps
            if not self._captures.switch_to_steps(region, inputs):
                raise
        except KernelsMissing as missing:
            region.kernels.compile_others(numbers, missing)
        except (CaptureError, BudgetTooSmall, BudgetExceeded) as error:
            if not isinstance(error, CaptureError) and region.room_again.give_up():
                pass  # steps that need more are told of
            elif not isinstance(error, CaptureError) and self._captures.switch_to_steps(
                region, inputs
            ):
                logger.warning(
                    "%s: no plan by the layers of its LSTMs fits, so they run step by step, which "
                    "takes longer: %s", region.name, error,
                )  # fmt: skip
            elif isinstance(error, CaptureError) or not forget_last([region], error):
                if self.settings.on_infeasible == "raise":
                    raise
                return warn_infeasible(f"a call of {region.name}", error)
        else:
            return region.settle(numbers, planned)
        return self.plan_one(region, numbers, inputs, loss, rebuilt)  # with less, or in steps

    def _first_that_fits(
        self,
        region: Region,
        numbers: tuple[Any, ...],
        inputs: Sequence[Any],
        loss: Loss | None,
        rebuilt: Callable[[Any], Any],
    ) -> RunnablePlan:
        """Plan in the first of several ways that has a plan within the budget."""
        whole = self._for_expected(region, inputs)
        seen_loss = None if numbers in region.left else region.seen_loss
        able = able_to_leave(self._executor, whole, region.graph, inputs)
        ways = [
            (make, leaving, seen)
            for leaving in may_leave(able, region.leaving.get(False), self.settings.region_plan)
            for make in with_outputs(self.settings, region, whole, rebuilt)
            for seen in dict.fromkeys((seen_loss, None))
        ]

        def plan(captured: Capture, **which: bool) -> RunnablePlan:
            grouped = self._runs_groups(region, inputs, captured)
            waits = grouped and not self.settings.wait  # for kernels, beside the steps
            with kernels_there_alone() if waits else contextlib.nullcontext():
                return self._plan(region, inputs, captured, loss, seen, grouped=grouped, **which)

        while True:
            make, leaving, seen = ways.pop(0)
            is_last = not ways and region.learned.asked_more_at < 0
            gives_way = bool(ways) and ways[0][0] is not make and ways[0][1] == leaving
            try:
                captured = make().with_leaving_gradients(leaving)
                planned = plan(captured, is_last=is_last, gives_way=gives_way)
                break
            except (BudgetTooSmall, BudgetExceeded) as error:
                if not ways:
                    raise
                reason = str(error)
        if seen is None and seen_loss is not None:
            region.leave_loss(inputs, reason)
        return note_deferred(self.settings, region, whole, planned, inputs, plan)

    def _for_expected(
        self, region: Region, inputs: Sequence[Any], *, loss_alone: bool = True
    ) -> Capture:
        captured = self._captures.of(region, inputs, loss_alone=loss_alone)
        expected = region.shown.expected
        return captured if expected is None else for_missing(captured, expected)

    def _plan(
        self,
        region: Region,
        inputs: Sequence[Any],
        captured: Capture,
        loss: Loss | None,
        seen_loss: SeenLoss | None,
        *,
        grouped: bool,
        is_last: bool = False,
        gives_way: bool = False,
    ) -> RunnablePlan:
        """Plan for a region that is all of the function, by kernels if it is `grouped`.

        If its graph is known, or has the ops of one that is, nothing is measured or solved.
        """
        start, settings = time.perf_counter(), self.settings
        captured, kin = with_kin(captured, self._planned, grouped=grouped)
        released = region.shown.released_outputs or frozenset()
        if released:
            captured = captured.with_released_outputs(released)
        seen = None if seen_loss is None else seen_loss.of(captured)
        if region.room_again.bytes:
            cost = captured.loss if seen is None else captured.loss.at_least(seen)
            seen = replace(cost, kept_bytes=cost.kept_bytes + region.room_again.bytes)
        if seen is not None:
            captured = captured.with_loss(captured.loss.at_least(seen))
        for other in kin:
            if (
                other.capture.released_outputs == captured.released_outputs
                and is_equal(other.capture.graph, captured.with_loss(other.capture.loss).graph)
                and (seen is None or other.plan is not region.exceeded)
                and (seen is None or has_room(other, other.capture.loss.at_least(seen)))
            ):
                same = replace(captured, graph=other.capture.graph, loss=other.capture.loss)
                same.compile_groups()
                executable = self._executor(
                    same, other.plan.schedule, budget_bytes=other.plan.budget_bytes
                )
                return RunnablePlan(other.plan, same, executable)
        if captured.sliced:
            captured, kin = captured.in_slices(()), []
        same_sizes = any(have_same_costs(other.capture.graph, captured.graph) for other in kin)
        measures = self._captures.measures
        of_other_sizes = measures and kin and not same_sizes
        if measures and not of_other_sizes:  # of the same sizes all is measured already
            captured = captured.costed("measure", self.costs)
        if grouped and not kin:
            captured = captured.in_groups()
        if loss is not None:
            settings = replace(settings, loss=loss)
        if settings.budget.is_auto:
            settings = replace(settings, budget=self.auto.fix())
        plain_bytes = self._plain_bytes.setdefault(autocast_type(captured.program.device), {})
        make = self._awaited.planning(
            make_plan,
            region.graph,
            tuple(inputs),
            {},
            settings,
            run=True,
            is_last=is_last,
            gives_way=gives_way,
            missing=region.shown.expected,
            released_outputs=released,
            seen=seen,
            plain_bytes=plain_bytes,
            schedules=[
                other.plan.schedule
                for other in kin
                if other.capture.released_outputs == captured.released_outputs
            ],
            started=start,
        )
        try:
            planned = make(captured)
        except (BudgetTooSmall, BudgetExceeded):
            if not of_other_sizes:
                raise
            planned = make(captured.costed("measure", self.costs))  # estimates know no workspace
        if (
            region.shown.expected is None
            and settings.region_plan is None
            and not planned.capture.program.deferred
            and is_for_too_few(planned, self._executor)
        ):
            with contextlib.suppress(BudgetTooSmall, BudgetExceeded):
                planned = make(planned.capture, missing=frozenset(), schedules=[])
        plan = planned.plan
        missing = planned.capture.missing
        known_bytes = plain_bytes.get(missing, 0)
        plain_bytes[missing] = max(known_bytes, plan.plain_peak_bytes or 0)
        self._planned.append(planned)
        return planned

    def has_new_kernels(self, region: Region, numbers: tuple[Any, ...], plan: Any) -> bool:
        """Whether kernels have come that a plan does not run; some may be compiled from now on."""
        if not isinstance(plan, RunnablePlan):
            return False
        if not self.settings.runs_groups_on(plan.capture.program.device):
            return False
        return region.kernels.have_come(numbers, plan)

    def _runs_groups(self, region: Region, inputs: Sequence[Any], captured: Capture) -> bool:
        """Whether a call is planned with compiled groups, which are there or are waited for."""
        if not self.settings.runs_groups_on(captured.program.device):
            return False
        return region.kernels.serve(region.numbers(inputs), captured, wait=self.settings.wait)


def leads_to(caller: str) -> str:
    """Say that code is in no graph which leads to a graph."""
    return f"TorchDynamo made no graph of what leads to {caller}"
