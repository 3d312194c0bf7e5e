"""One training loop under one budget: the graphs that TorchDynamo finds, each run by its plan.

A model without graph breaks is one region: a step is one call, which has the whole budget, and its
plan is rehearsed before. A model with breaks is several; what stands between them runs in eager
autograd. In its first step each region runs by a schedule that keeps little. The step is recorded:
what is held at the start and end of each half of each region, and the most in between. By that a
schedule is chosen for every call. What is made but once counts in it, so the first step like it in
which no region is planned is recorded, too, and planned by if it took less; nothing is refused
before. So is the first by that plan, and planned again if it takes more than predicted. A step that
finds a region which earlier ones did not call is recorded from there on, to tell whether it was
over the budget. Between two steps nothing is alive between its halves.

A plan of an earlier process brings the options of its regions, and what was chosen, which is taken
if the step is recorded to make the same calls and to fit: what the code between them holds may be
other than it was.

A step is of one thread (`threads.py`, which has the lock); where it stands is drawn in `step.py`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch

from remat.budgets.auto import AutoBudget
from remat.dynamo import DynamoGraph
from remat.errors import BudgetWarning, RematError
from remat.planning.infeasible import NotPlanned, across_breaks, warn_infeasible, without_graph
from remat.planning.settings import Settings
from remat.planning.task import RunnablePlan
from remat.session.backwards import within_backward
from remat.session.call_counts import CallCounts
from remat.session.call_runner import CallRunner
from remat.session.counters import Counters
from remat.session.cuts import Cuts
from remat.session.kernels import plan_by_kernels
from remat.session.kinds import CapturedRegion
from remat.session.region import Prepared, Region, device_of, is_computed, keep, requires_grad
from remat.session.region_planner import RegionPlanner, leads_to
from remat.session.run_again import Before
from remat.session.step import StepState
from remat.session.step_planner import StepPlanner
from remat_exec import SecondDerivative, with_call
from remat_graph.torch import beside_profilers, flatten, process_lock

__all__ = ["Session"]


class Session:
    """The regions of one model, their plans, and what is known from earlier ones.

    `on_plan` is given each plan that a step begins to run by. `auto` fixes that budget.
    `one_region` says that a graph which is all of a function has the whole budget, unless a plan of
    several is given. `cuts` say where regions are cut into several. `model` gives the one whose
    forwards are `run`. `join` is called where a backward begins, to have what waits for one beside
    this planned with it from then on, and gives the number of such calls. `call_arguments` are of
    the call that is run. `times_met` counts calls of regions with something to differentiate, and
    `times_planned` those of them that are planned, or told of.
    """

    def __init__(
        self,
        settings: Settings,
        on_plan: Callable[[Any], None],
        auto: AutoBudget,
        cuts: Cuts,
        *,
        one_region: bool = True,
        model: Callable[[], torch.nn.Module] = torch.nn.Module,
        join: Callable[[Session], int] = lambda _: 0,
    ) -> None:
        self.call_arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.rebuild: Callable[[Any], Any] = lambda returned: returned
        self.times_met = self.times_planned = self._met_before = 0
        self.breaks: list[str] = []
        self._one_region = one_region and settings.step_plan is None
        self._counts, self._cuts = CallCounts(), cuts
        self._has_several = self._was_several = self._had_backward = False
        self._settings, self._on_plan, self._model, self._join = settings, on_plan, model, join
        self._before = Before(torch.nn.Module(), (), lambda: None, first=False)
        self._before_code: Callable[[], None] = lambda: None
        self._answer = self._last = cast("Any", None)
        self._not_planned: NotPlanned | None = None
        self._has_run = self._preparing = False
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()
        planner = StepPlanner(settings, auto, self._tell, cuts.outputs, breaks=self.breaks)
        self._planner = RegionPlanner(settings, auto, planner.kinds, self.breaks)
        self.step = StepState(settings, self._tell, planner)
        self.step.between = lambda: self._planner.kernels.see_step(self.step, self._regions)
        self._runner = CallRunner(self.step, settings)

    def add(self, dynamo_graph: DynamoGraph, counters: Counters) -> Region:
        """Make a region of a graph that was found.

        Raises:
            RematError: if the forward differs when it is run again to measure a loss.
        """
        region = Region(dynamo_graph, counters)
        if self._answer is not None and all(region.place != one.place for one in self._regions):
            raise RematError(
                "loss= is measured by running the forward again, and this one differs then; leave "
                "it out, or compute the loss in the model's forward"
            )
        if dynamo_graph.break_reason is not None:
            self.breaks.append(dynamo_graph.break_reason)
        if dynamo_graph.caller is not None:
            self.breaks.append(leads_to(dynamo_graph.caller))
        if self._one_region and not dynamo_graph.whole:
            self._share_budget()
        if self._shares:
            self._before.copy_buffers()
        for other in self._regions:  # of other sizes, say, whose backwards were seen
            if other.place == region.place:
                region.know_as(other)
        self._regions.add(region)
        return region

    @property
    def _shares(self) -> bool:
        """Whether the calls of the step under way share the budget."""
        return self._has_several or not self._one_region

    def _share_budget(self) -> None:
        """Have one budget for several regions from now on."""
        self._one_region, self.step.lone_budget = False, None
        for region in self._regions:
            self.step.planner.know_plain(region.plans.values())
            region.plans.clear()  # they had the whole budget

    def _plan_apart(self) -> None:
        """Have a budget for each region again, after a forward that failed: it may have met parts.

        A part that is met again has the others planned with it.
        """
        self._one_region = True
        self.step.forget_calls()
        for region in self._regions:
            region.plans.clear()

    def _begin(self, device: torch.device | None) -> None:
        """Begin a step of a model that is one region, unless one is under way.

        Its only call has the whole budget, unless several are expected, as in the steps before.
        """
        step = self.step
        if step.is_under_way(seen_forward=device is None) or within_backward():
            return
        if self._had_backward:
            self._counts.end_step(several=self._was_several or step.has_several)
        self._was_several = self._had_backward = False
        step.end(device)
        step.between()
        self._has_several = (
            self._counts.expects_several
            and self._settings.region_plan is None
            and not step.is_refused
        )
        if self._has_several:
            step.start(device, may_run_plain=self._counts.is_sure)

    def _refuse_another(self, region: Region, numbers: tuple[Any, ...]) -> None:
        """Refuse a call beside one that has the whole budget, if they cannot share it.

        Raises:
            BudgetTooSmall: if no plan of several is within the budget.
            BudgetExceeded: if the steps of four plans in a row took more.
            PlanMismatch: if a plan of one was given, and this is not the first such step.
        """
        if self._counts.met_several:
            self._planner.refuse_user_plan()
        self.step.refuse()
        is_raised = self._settings.on_infeasible == "raise"
        if is_raised and (refusal := self.step.planner.refusal(region.shared.get(numbers))):
            raise refusal

    def _backward_begins(self) -> None:
        """See that no other call that has the budget for itself waits for its backward.

        Warns:
            BudgetWarning: if one does.
        """
        self._had_backward = True
        calls = 1 + len(self.step.lone_calls) * (not self._shares) + self._join(self)
        if calls == 1:
            return
        self._was_several = True
        reason = f"{calls} calls were made before a backward"
        self.breaks.append(reason)
        warnings.warn(
            f"{reason}: in this step each of them had the budget for itself; from the next step on "
            f"such calls are planned together, within one. Gradients are right",
            BudgetWarning,
            stacklevel=2,
        )

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward all of whose regions are of this model.

        Raises:
            RematError: if there is something to differentiate, but no region with a plan, unless
                such a call is to run as it is.
        """
        step, outermost = self.step, not self.step.within_forward
        if outermost:
            (self._begin if self._one_region else step.begin)(None)
        first = outermost and not self._has_run and torch.is_grad_enabled() and not self._preparing
        if first:
            self.step.record_first(device_of(self._model().parameters()))
        if outermost:
            step.move("forward")
            self._met_before = self.times_met
        one_region = self._one_region
        try:
            returned = self._forward(partial(forward, *args, **kwargs), outermost, first)
            if outermost:
                step.forward_returns(returned, shared=self._shares)
            if first and not self._shares:
                step.stop_recording_steps()
            self._has_run |= first
        except BaseException as error:
            step.stop_recording_steps()
            if isinstance(error, Exception) and one_region and not self._one_region:
                self._plan_apart()
            raise
        finally:
            if outermost:
                step.move("return")
        if self.times_met == self._met_before and is_computed(returned, (args, kwargs)):
            self._ran_as_it_is()
        return returned

    def leave(self, region: Region, why: str) -> None:
        """Have a region run as it is from now on."""
        region.runs_as_it_is = True
        self.breaks.append(f"{region.name} runs as it is: {why}")

    def _forward(self, forward: Callable[[], Any], outermost: bool, first: bool) -> Any:
        """Run a forward; again, if it asks for a gradient that is not there yet."""
        if not outermost or not (first or self._shares):
            return forward()
        again = partial(self.step.begin_again, len(self.step.calls))
        with Before(self._model(), self.call_arguments, again, first=first) as self._before:
            return self._before.run(forward, self._leave_open, self._cuts)

    def _leave_open(self, error: SecondDerivative) -> None:
        """Have what the forward differentiates twice itself run as it is from then on."""
        regions = dict.fromkeys(call.region for call in self.step.open_calls)
        if not (self._shares and regions):
            raise across_breaks(self.breaks) from error
        for region in regions:
            self.leave(region, "the forward takes a gradient of a gradient")
        self._last = None  # it is told again

    def _ran_as_it_is(self) -> None:
        """Refuse, or tell of, a forward without a region that has a plan.

        Raises:
            RematError: unless such a call is to run as it is.
        """
        error = without_graph(self.breaks)
        if self._settings.on_infeasible == "raise":
            raise error
        self.times_planned += 1
        self._not_planned = self._not_planned or warn_infeasible("the model", error)
        self._use(self._not_planned)

    def prepare(self, forward: Callable[[], Any], before_code: Callable[[], None]) -> None:
        """Plan for a call; `before_code` is called where some of it runs, before that does."""
        self._preparing, self._before_code = True, before_code
        try:
            with suppress(Prepared):
                forward()
        finally:
            self._preparing, self._before_code = False, lambda: None

    def runs_as_it_is(self, reason: str) -> None:
        """Note why code is in no graph, before it runs."""
        self.breaks.append(reason)
        self._before_code()

    def call(self, region: Region, inputs: Sequence[Any]) -> Any:
        """Run a region as Dynamo does: by its plan, or as it is where nothing needs a gradient."""
        counters = region.counters
        inputs = tuple(counters.with_numbers(inputs))
        self.step.outputs.see_inputs(inputs)
        if self._answer is not None:
            return counters.put_back(self._answer, inputs)
        self.step.end_record_of_call()
        if region.runs_as_it_is:
            return region.as_it_is(inputs)
        if self._preparing and not any(map(requires_grad, inputs)):
            raise Prepared
        if not torch.is_grad_enabled() or not any(map(requires_grad, inputs)):
            self.step.rest()
            self._before_code()
            return region.as_it_is(inputs)
        numbers = region.numbers(inputs)
        if self._one_region and not self.step.within_forward:
            self._begin(device_of(inputs))
        if self.step.lone_calls and not self._shares:
            self._refuse_another(region, numbers)
        plan = self._plan_of(region, numbers, inputs)
        is_first = self._one_region and self._has_several and not self.step.calls
        if is_first and not self.step.planner.may_fit(plan):  # it may be the only call
            self._has_several = False
            self.step.stop_recording()
            plan = self._plan_of(region, numbers, inputs)
        if isinstance(plan, RunnablePlan):
            self._use(plan.plan)
            self.step.lone_budget = plan.plan.budget_bytes
            self.step.device = plan.capture.program.device
        if self._preparing:
            raise Prepared
        if plan is None:
            returned = region.as_it_is(inputs)
            if any(map(requires_grad, flatten(returned)[0])):  # views of inputs, say
                computed = is_computed(inputs, self.call_arguments)  # by eager code
                self.times_met += not (self._planner.could_not_plan(region) or computed)
            return returned
        self.times_met += 1
        self.times_planned += 1
        if isinstance(plan, NotPlanned):
            self._use(plan)
            return region.as_it_is(inputs)
        if isinstance(plan, RunnablePlan):
            outputs = self._runner.run_one(region, numbers, plan, inputs, self._backward_begins)
        else:
            if not (self._one_region or self.step.within_forward):
                self.step.begin(plan.capture.program.device)
                plan = self._plan_of(region, numbers, inputs)  # kernels may have come
            outputs = self._runner.run_shared(region, plan, inputs, self._backward_begins)
            if self._one_region and self.step.patterns.plan is not None:
                self._use(self.step.patterns.plan)
        return counters.put_back(plan.capture.output_structure.rebuild(iter(outputs)), inputs)

    def _plan_of(self, region: Region, numbers: tuple[Any, ...], inputs: Sequence[Any]) -> Any:
        """Find the plan of a call that has the whole budget, or shares it, or make it."""
        plans = region.plans_of(shared=self._shares)
        if numbers not in plans:
            plan = self.plan(region, numbers, inputs)  # which may find that the region is a part
        elif self._planner.has_new_kernels(region, numbers, plans[numbers]):
            make, before = partial(self.plan, region, numbers, inputs), plans[numbers]
            plan = plan_by_kernels(make, before, region.name)
        else:
            return plans[numbers]
        keep(region.plans_of(shared=self._shares), numbers, plan)
        return plan

    def _use(self, plan: Any) -> None:
        """Note the plan that a step runs by, or why it runs without one."""
        if plan is not self._last or isinstance(plan, NotPlanned):
            self._tell(plan)

    def _tell(self, plan: Any) -> None:
        """Tell of a plan, or why there is none."""
        self._last = plan
        self._on_plan(plan)

    def plan(
        self, region: Region, numbers: tuple[Any, ...], inputs: Sequence[Any]
    ) -> RunnablePlan | CapturedRegion | NotPlanned | None:
        """Plan for a call of a region; it is to run as it is if none fits, or for `None`."""
        with process_lock, self.step.recording.paused():
            work = partial(self._plan_undisturbed, region, numbers, inputs)
            return beside_profilers(device_of(inputs), work)

    def _plan_undisturbed(
        self, region: Region, numbers: tuple[Any, ...], inputs: Sequence[Any]
    ) -> RunnablePlan | CapturedRegion | NotPlanned | None:
        self._planner.see_call(region, inputs)
        if self._one_region and not region.whole:
            self._share_budget()
        if self._one_region and self._planner.communicates(region, inputs):
            self._one_region = False
        if self._shares:
            if not self._cuts.outputs:
                self._planner.refuse_user_plan()
            return self._planner.plan_shared(region, inputs, self.step)
        return self._planner.plan_one(region, numbers, inputs, self._loss(), self._rebuilt)

    def _loss(self) -> Callable[[Any], Any] | None:
        """Give what makes the loss that was asked for of what the only region returns."""
        if self._settings.loss is None:
            return None
        loss = with_call(self._settings.loss, *self.call_arguments)
        return lambda returned: loss(self._rebuilt(returned))

    def _rebuilt(self, returned: Any) -> Any:
        """Give what the function returns, if its only region returns this."""
        before, self._answer = self._answer, returned
        try:
            return self.rebuild(returned)
        finally:
            self._answer = before
