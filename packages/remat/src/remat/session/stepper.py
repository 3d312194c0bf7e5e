"""A model's training step as regions: the graphs that TorchDynamo finds, each run by its plan.

A model without graph breaks is one region, and its plan is the plan of the step. What stands
between regions runs in eager autograd.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from remat.budgets.auto import AutoBudget
from remat.cache import remembered_costs
from remat.dynamo import Found
from remat.errors import BudgetWarning, PlanMismatch, RematError
from remat.planning.given import Given
from remat.planning.misfit import NotPlanned, warn_of_misfit
from remat.planning.planner import Planned, for_missing
from remat.planning.settings import Settings
from remat.plans.plan import Plan
from remat.session.counters import Counters
from remat.session.first_steps import FirstSteps
from remat.session.region import Prepared, Region
from remat.session.region_calls import RegionPlan
from remat.session.region_planner import RegionPlanner
from remat.session.runner import StepRunner
from remat_exec import BudgetExceeded, SecondDerivative, with_call
from remat_graph.torch import (
    AllocationRecorder,
    CaptureError,
    Cost,
    NoBackward,
    RealStrides,
    beside_profilers,
    flatten,
    get_capture,
    process_lock,
)
from remat_solvers import BudgetTooSmall

__all__ = ["Stepper", "is_computed"]

logger = logging.getLogger(__name__)


class Stepper:
    """The regions of one model, their plans, and what is known from earlier ones.

    `told` is given each plan that a step begins to run by. `auto` fixes that budget. `alone` says
    that a graph which is all of a function has the whole budget, unless a plan of several is given.
    `parameters` are those of the model whose forwards are `run`. `join` is called where a backward
    begins, to have whatever waits for one beside this planned with it from then on, and gives the
    number of such calls. `call` are the arguments of the call that is run, for a loss that asks for
    them. `times_met` counts calls of regions that have something to differentiate.
    """

    def __init__(
        self,
        settings: Settings,
        told: Callable[[Any], None],
        auto: AutoBudget,
        *,
        alone: bool = True,
        parameters: Callable[[], Iterable[torch.nn.Parameter]] = tuple,
        join: Callable[[Stepper], int] = lambda _: 0,
    ) -> None:
        self._parameters = parameters
        self._join = join
        self.together = StepRunner(settings, told, auto)
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.answer: Any = None
        self.preparing = False
        self.before_code: Callable[[], None] = _nothing
        self.rebuild: Callable[[Any], Any] = _no_rebuilding
        self.capture_region = get_capture(settings.capture)
        self.numerics = settings.numerics
        self._settings = settings
        self._auto = auto
        self._told = told
        self._last: Plan | None = None
        self._not_planned: NotPlanned | None = None
        self._planner = RegionPlanner(settings, auto)
        self.real_strides = RealStrides() if settings.costs == "measure" else None
        self._alone = alone and settings.given_step is None
        self.times_met = self._met_before = 0
        self._has_run = False
        self._unplanned: set[str] = set()
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self.calls: weakref.WeakSet[object] = weakref.WeakSet()
        self.first_steps = FirstSteps()

    def add(self, found: Found, counters: Counters) -> Region:
        """Make a region of a graph that was found.

        Raises:
            RematError: if the forward differs when it is run again to measure a loss.
        """
        if self.answer is not None:
            raise RematError(
                "loss= is measured by running the forward again, and this one differs then; leave "
                "it out, or compute the loss in the model's forward"
            )
        if found.break_reason is not None:
            self.together.breaks.append(found.break_reason)
        if found.caller is not None:
            self.together.breaks.append(_leads_to(found.caller))
        if self._alone and not found.whole:
            self._plan_together()
        region = Region(self, found, counters)
        for other in self._regions:  # of other sizes, say, whose backwards were seen
            if other.name == region.name:
                region.came, region.expected = other.came, other.expected
                region.released_outputs, region.seen_loss = other.released_outputs, other.seen_loss
        self._regions.add(region)
        return region

    def _plan_together(self) -> None:
        """Have one budget for several calls of regions from now on."""
        self._alone = False
        for region in self._regions:
            region.plans.clear()  # they had the whole budget

    def _plan_apart(self) -> None:
        """Have a budget for each region again, after a forward that failed: it may have met parts.

        A part that is met again has the others planned with it.
        """
        self._alone = True
        self.together.forget_calls()
        for region in self._regions:
            region.plans.clear()

    def backward_begins(self, call: object = None) -> None:
        """See that no other call that has the budget for itself waits for its backward."""
        if call is not None:
            self.calls.discard(call)
        calls = 1 + len(self.calls) * self._alone + self._join(self)
        if calls == 1:
            return
        self._plan_together()
        reason = f"{calls} calls were made before a backward"
        self.together.breaks.append(reason)
        warnings.warn(
            f"{reason}: in this step each of them had the budget for itself; from the next step on "
            f"they are planned together, within one. Gradients are right",
            BudgetWarning,
            stacklevel=2,
        )

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward all of whose regions are of this model.

        Raises:
            RematError: if there is something to differentiate, but no region with a plan, unless
                such a call is to run as it is.
        """
        outermost = not self.together.within_forward
        if outermost and not self._alone:
            self.together.enter(None)
        first = outermost and not self._has_run and torch.is_grad_enabled() and not self.preparing
        if first:
            self.together.enter_first(_device(tuple(self._parameters())))
        self.together.within_forward = True
        if outermost:
            self._met_before = self.times_met
        alone = self._alone
        try:
            returned = self._tried(lambda: forward(*args, **kwargs))
            if outermost and not self._alone:
                self.together.await_backward(returned)
            elif first:
                self.together.stop_recording()
            self._has_run |= first
        except BaseException as error:
            self.together.stop_recording()
            if isinstance(error, Exception) and alone and not self._alone:
                self._plan_apart()
            raise
        finally:
            self.together.within_forward = not outermost
        if self.times_met == self._met_before and is_computed(returned, (args, kwargs)):
            reason = "; ".join(self.together.breaks[-3:]) or (
                "is it switched off, by torch.compiler.set_stance or torch._dynamo.config.disable?"
            )
            ran_as_it_is = RematError(
                f"the forward ran as it is, without a plan: TorchDynamo made no graph of it "
                f"that could be planned ({reason}); train this module without remat"
            )
            if self._settings.on_infeasible == "raise":
                raise ran_as_it_is
            if self._not_planned is None:
                self._not_planned = warn_of_misfit("the model", ran_as_it_is)
            self.used_none(self._not_planned)
        return returned

    @property
    def waiting(self) -> int:
        """How many calls wait for their backward."""
        return len(self.calls) + len(self.together.live)

    @property
    def is_recording(self) -> bool:
        """Whether a step is recorded, by a profiler of its thread."""
        return self.first_steps.is_recording or self.together.is_recording

    def rest(self) -> None:
        """Record no further where a forward without gradients runs between two steps."""
        self.first_steps.rest()
        self.together.rest()

    def stop_recording(self) -> None:
        """Drop what is recorded; not within a backward: torch's profiler cannot stop there."""
        if torch._C._current_graph_task_id() == -1:
            self.first_steps.stop()
            self.together.stop_recording()

    def _tried(self, forward: Callable[[], Any]) -> Any:
        """Run a forward; what it differentiates twice itself runs as it is from then on."""
        generator = torch.get_rng_state() if not self._alone else None
        try:
            return forward()
        except SecondDerivative:
            regions = self.together.live_regions()
            if generator is None or not regions:
                raise
            for region in regions:
                region.runs_as_it_is = True
                self.together.breaks.append(
                    f"{region.name} runs as it is: the forward takes a gradient of a gradient"
                )
            torch.set_rng_state(generator)
        return self._tried(forward)

    def prepare(self, forward: Callable[[], Any], before_code: Callable[[], None]) -> None:
        """Plan for a call; `before_code` is called where some of it runs, before that does."""
        self.preparing, self.before_code = True, before_code
        try:
            forward()
        except Prepared:
            pass
        finally:
            self.preparing, self.before_code = False, _nothing

    def runs_as_it_is(self, reason: str) -> None:
        """Note why code is in no graph, before it runs."""
        self.together.breaks.append(reason)
        self.before_code()

    def met(self) -> None:
        """Note that a region was called that has something to differentiate."""
        self.times_met += 1

    def met_nothing_to_plan(self, region: Region, inputs: Sequence[Any]) -> None:
        """Note it of a region whose gradients take no memory.

        Not of one that could not be captured, or that goes on from what eager code computed.
        """
        if region.name not in self._unplanned and not is_computed(inputs, self.call):
            self.times_met += 1

    def used(self, planned: Planned) -> None:
        """Note the plan that a step runs by."""
        if planned.plan is not self._last:
            self._last = planned.plan
            self._told(planned.plan)

    def used_none(self, misfit: NotPlanned) -> None:
        """Note that a step runs without a plan, because none fits."""
        self._last = None
        self._told(misfit)

    @property
    def measured(self) -> dict[str, Cost] | None:
        """What operators were measured to cost; `None` if none is to be."""
        return self._planner.costs if self._settings.costs == "measure" else None

    def plan(
        self, region: Region, inputs: Sequence[Any]
    ) -> Planned | RegionPlan | NotPlanned | None:
        """Plan for a call of a region; it is to run as it is if none fits, or for `None`."""
        with process_lock, AllocationRecorder.paused():
            return beside_profilers(_device(inputs), lambda: self._plan(region, inputs))

    def _plan(
        self, region: Region, inputs: Sequence[Any]
    ) -> Planned | RegionPlan | NotPlanned | None:
        logger.info("planning for %s", region.name)
        if region.caller is not None and is_computed(inputs, ()):
            warnings.warn(
                f"{_leads_to(region.caller)}: what it holds there is not counted, beside the "
                f"budget; remat.rematerialize counts it",
                BudgetWarning,
                stacklevel=2,
            )
            region.caller = None
        if self._settings.budget.is_auto:
            self._auto.see(inputs, _device(inputs))
        if self._alone and not region.whole:
            self._plan_together()
        if self._alone and self._communicates(region, inputs):
            self._alone = False  # rehearsed, it would send what the other ranks do not wait for
        if self._settings.given_region is not None and not self._alone:
            self._refuse_given(self._settings.given_region)
        if self._alone:
            try:
                with remembered_costs(self._planner.costs, _device(inputs), self._settings.costs):
                    return self._planner.plan(region, inputs, self._loss())
            except NoBackward:
                return None
            except (CaptureError, BudgetTooSmall, BudgetExceeded) as error:
                if self._settings.on_infeasible == "raise":
                    raise
                return warn_of_misfit(f"a call of {region.name}", error)
        try:
            captured = region.captured(inputs, self._planner.first_costs, loss_alone=False)
            if region.expected is not None:
                captured = for_missing(captured, region.expected)
            return self.together.add(region.name, captured, self._planner.costs)
        except NoBackward:
            return None
        except CaptureError as error:
            told = logging.INFO if region.name in self._unplanned else logging.WARNING
            self._unplanned.add(region.name)  # which may be found again for each new number
            reason = str(error)  # which holds no frames, whoever keeps what is logged
            logger.log(told, "%s runs as it is, its memory is not planned: %s", region.name, reason)
            self.together.breaks.append(f"{region.name} runs as it is: {reason}")
            return None

    def _refuse_given(self, given: Given) -> None:
        where = "; ".join(dict.fromkeys(self.together.breaks)) or "other ranks take part in it"
        raise PlanMismatch(
            f"{given.name} is for a model whose forward is one region, and this one's is not: "
            f"{where}. Leave plan= out, and save the plan that is made"
        )

    def _communicates(self, region: Region, inputs: Sequence[Any]) -> bool:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return False
        with contextlib.suppress(CaptureError):  # which planning raises again
            return region.captured(inputs, self._planner.first_costs).communicates
        return False

    def _loss(self) -> Callable[[Any], Any] | None:
        """Give what makes the loss that was told of what the only region returns."""
        if self._settings.loss is None:
            return None
        told = with_call(self._settings.loss, *self.call)
        return lambda returned: told(self._rebuilt(returned))

    def _rebuilt(self, returned: Any) -> Any:
        """Give what the function returns, if its only region returns this."""
        before, self.answer = self.answer, returned
        try:
            return self.rebuild(returned)
        finally:
            self.answer = before


def _leads_to(caller: str) -> str:
    return f"TorchDynamo made no graph of what leads to {caller}"


def is_computed(tensors: Any, given: Any) -> bool:
    """Whether any of these has a gradient, is no leaf, and is no view of what was given."""
    known = set(map(_storage, flatten(given)[0]))
    return any(
        tensor.grad_fn is not None and _storage(tensor) not in known
        for tensor in flatten(tensors)[0]
    )


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [item.device for item in inputs if isinstance(item, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _nothing() -> None:
    pass


def _no_rebuilding(returned: Any) -> Any:
    return returned
