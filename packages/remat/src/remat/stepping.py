"""A model's training step as regions: the graphs that TorchDynamo finds, each run by its plan.

A model without graph breaks is one region, and its plan is the plan of the step. What stands
between regions runs in eager autograd.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.auto_budget import AutoBudget
from remat.cache import remembered_costs
from remat.counters import Counters
from remat.dynamo import Found
from remat.errors import PlanMismatch, RematError
from remat.misfit import NotPlanned, warn_of_misfit
from remat.planning import (
    Planned,
    Settings,
    for_missing,
    make_plan,
    refuse_other_profilers,
)
from remat.plans import Plan
from remat.region_calls import RegionPlan
from remat.solving import have_same_ops
from remat.step_planning import StepPlanner
from remat_exec import BudgetExceeded, Runnable, SecondDerivative, get_executor, with_call
from remat_graph import Graph
from remat_graph.torch import (
    Capture,
    CaptureError,
    Cost,
    Costs,
    NoBackward,
    RealStrides,
    flatten,
    get_capture,
    process_lock,
    quietly,
)
from remat_solvers import BudgetTooSmall

__all__ = ["Region", "Stepper"]

logger = logging.getLogger(__name__)


_SURE = 3  # backwards in a row over the same outputs
_MOST_NUMBERS = 64  # that a graph is captured and planned for, at a time


class _Prepared(Exception):
    """Ends a forward that was run to make a plan, before it changes anything."""


class Region:
    """One graph of Dynamo's, and the plans to run it by, one for each set of numbers that it reads.

    Called as Dynamo calls it, with a flat list of inputs, parameters and buffers among them.
    """

    def __init__(self, stepper: Stepper, found: Found) -> None:
        self.stepper = stepper
        self.graph = found.graph
        self._counters = Counters(found.graph)
        self.name = f"{found.name}, {sum(n.op != 'placeholder' for n in found.graph.graph.nodes)}"
        self.plans: dict[tuple[Any, ...], Planned | RegionPlan | NotPlanned | None] = {}
        self.runs_as_it_is = False
        self.came: frozenset[int] = frozenset()
        self.expected: frozenset[int] | None = None
        self._before: dict[tuple[Any, ...], Planned | RegionPlan | NotPlanned | None] = {}
        self.let_go: frozenset[int] | None = None
        self._captures: dict[tuple[Any, ...], Capture] = {}
        self._in_a_row = 0
        self._last_missing: frozenset[int] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the region: by its plan, or as it is where nothing needs a gradient."""
        stepper = self.stepper
        if stepper.answer is not None:
            return self._counters.put_back(stepper.answer, inputs)
        if self.runs_as_it_is:
            return self._as_it_is(inputs)
        if stepper.preparing and not any(map(_requires_grad, inputs)):
            raise _Prepared
        if not torch.is_grad_enabled() or not any(map(_requires_grad, inputs)):
            return self._as_it_is(inputs)
        stepper.met()
        key = self.numbers(inputs)
        if key not in self.plans:
            made = stepper.plan(self, inputs)
            _put(self.plans, key, self.settle(key, made) if isinstance(made, Planned) else made)
        planned = self.plans[key]
        if isinstance(planned, Planned):
            stepper.used(planned)
        if stepper.preparing:
            raise _Prepared
        if isinstance(planned, NotPlanned):
            stepper.used_none(planned)
            return self._as_it_is(inputs)
        if planned is None:
            return self._as_it_is(inputs)
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        if isinstance(planned, RegionPlan):
            outputs = stepper.together.run(planned, self.graph, tensors, self.learn)
        else:
            executable = planned.executable
            learn = functools.partial(self.learn, executable)
            outputs = executable(self.graph, tensors, learn)
        returned = planned.capture.output_structure.rebuild(iter(outputs))
        return self._counters.put_back(returned, inputs)

    def _as_it_is(self, inputs: Sequence[Any]) -> Any:
        with quietly():  # torch warns of tensors where the user's code had arrays
            return self._counters.put_back(self.graph(*inputs), inputs)

    def numbers(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Give what the graph reads among its inputs that is no tensor."""
        found = (inputs[position] for position in self._counters.matter)
        return tuple(item for item in found if not isinstance(item, torch.Tensor))

    def captured(self, inputs: Sequence[Any], costs: Costs, *, loss_alone: bool = True) -> Capture:
        """Give the graph of a call: traced once, whatever is planned for."""
        key = (loss_alone, *self.numbers(inputs))
        known = self._captures.get(key)
        if known is None:
            with quietly():  # the original has warned of the same
                known = self.stepper.capture_region(
                    self.graph,
                    inputs,
                    costs=costs,
                    loss_alone=loss_alone,
                    real=self.stepper.real_strides,
                )
                numerics = self.stepper.numerics
                if loss_alone and numerics is not None:
                    known = known.with_alternatives(numerics)
            _put(self._captures, key, known)
        return known

    def learn(self, executable: Runnable, missing: frozenset[int], let_go: frozenset[int]) -> None:
        """Plan from now on for the gradients that came, and for what the user still held.

        Not at once where the plan for fewer gradients could not be followed by a backward with all
        of them within the budget: it may be that outputs are used in turn.
        """
        self._in_a_row = self._in_a_row + 1 if missing == self._last_missing else 1
        self._last_missing = missing
        self.came |= executable.differentiable - missing
        expected = executable.differentiable - self.came
        changed = expected != executable.capture.missing and (
            expected != self.expected or self._in_a_row >= _SURE
        )
        if self.let_go is None or self.let_go - let_go:
            self.let_go = let_go if self.let_go is None else self.let_go & let_go
            changed = changed or executable.capture.with_other_results(self.let_go)
        if changed or self.expected is not None:
            self.expected = expected
        if changed:
            logger.info("the backward differs from what was planned for: planning anew")
            self._before, self.plans = self.plans, {}

    def settle(self, key: tuple[Any, ...], planned: Planned) -> Planned:
        """Choose between a plan for the gradients that came and the one before it."""
        before = self._before.get(key)
        if before is None or self._in_a_row >= _SURE or not isinstance(before, Planned):
            return planned
        expected = planned.capture.missing
        if expected <= before.capture.missing or planned.executable.takes_all:
            return planned
        return before


def _is_equal(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same but for costs."""
    return one.values == other.values and all(
        a.equivalence == b.equivalence for a, b in zip(one.ops, other.ops, strict=True)
    )


def _put(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], item: Any) -> None:
    """Keep what was made last, for so many numbers."""
    known[key] = item
    if len(known) > _MOST_NUMBERS:
        del known[next(iter(known))]


def _requires_grad(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.requires_grad


class Stepper:
    """The regions of one model, their plans, and what is known from earlier ones.

    `told` is given each plan that a step begins to run by. `auto` fixes that budget. `alone` says
    that a graph which is all of a function has the whole budget. `call` are the arguments of the
    call that is run, for a loss that asks for them.
    """

    def __init__(
        self,
        settings: Settings,
        told: Callable[[Any], None],
        auto: AutoBudget,
        *,
        alone: bool = True,
    ) -> None:
        self.together = StepPlanner(settings, told, auto)
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.answer: Any = None
        self.preparing = False
        self.rebuild: Callable[[Any], Any] = _no_rebuilding
        self.capture_region = get_capture(settings.capture)
        self.numerics = settings.numerics
        self._settings = settings
        self._auto = auto
        self._told = told
        self._last: Plan | None = None
        self._known: list[Planned] = []
        self._costs: dict[str, Cost] = {}
        self.real_strides = RealStrides() if settings.costs == "measure" else None
        self._granted_bytes = 0
        self._alone = alone
        self._met = False
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()

    def add(self, found: Found) -> Region:
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
        if self._alone and not found.whole:
            self._alone = False
            for region in self._regions:
                region.plans.clear()  # they had the whole budget
        region = Region(self, found)
        for other in self._regions:  # of other sizes, say, whose backwards were seen
            if other.name == region.name:
                region.came, region.expected = other.came, other.expected
                region.let_go = other.let_go
        self._regions.add(region)
        return region

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run a forward all of whose regions are of this model.

        Raises:
            RematError: if no region was met, and there is something to differentiate.
        """
        outermost = not self.together.within_forward
        if outermost and not self._alone:
            self.together.enter(None)
        self.together.within_forward = True
        self._met = self._met and not outermost
        try:
            returned = self._tried(forward)
        except BaseException:
            self.together.stop_recording()
            raise
        finally:
            self.together.within_forward = not outermost
        if not self._met and any(tensor.requires_grad for tensor in flatten(returned)[0]):
            reason = "; ".join(self.together.breaks[-3:]) or (
                "is it switched off, by torch.compiler.set_stance or torch._dynamo.config.disable?"
            )
            raise RematError(
                f"the forward ran as it is, without a plan: TorchDynamo made no graph of it "
                f"that could be planned ({reason})"
            )
        return returned

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

    def prepare(self, forward: Callable[[], Any]) -> None:
        """Plan for a call, and change nothing."""
        self.preparing = True
        try:
            forward()
        except _Prepared:
            pass
        finally:
            self.preparing = False

    def met(self) -> None:
        """Note that a region was called."""
        self._met = True

    def used(self, planned: Planned) -> None:
        """Note the plan that a step runs by."""
        if planned.plan is not self._last:
            self._last = planned.plan
            self._told(planned.plan)

    def used_none(self, misfit: NotPlanned) -> None:
        """Note that a step runs without a plan, because none fits."""
        self._last = None
        self._told(misfit)

    def plan(
        self, region: Region, inputs: Sequence[Any]
    ) -> Planned | RegionPlan | NotPlanned | None:
        """Plan for a call of a region; it is to run as it is if none fits, or for `None`."""
        with process_lock:
            return self._plan(region, inputs)

    def _plan(
        self, region: Region, inputs: Sequence[Any]
    ) -> Planned | RegionPlan | NotPlanned | None:
        logger.info("planning for %s", region.name)
        if self._settings.budget.is_auto:
            self._auto.see(inputs, _device(inputs))
        if self._alone and self._communicates(region, inputs):
            self._alone = False  # rehearsed, it would send what the other ranks do not wait for
        if self._settings.given is not None and not self._alone:
            self._refuse_given()
        if self._alone:
            try:
                with remembered_costs(self._costs, _device(inputs), self._settings.costs):
                    return self._plan_alone(region, inputs)
            except NoBackward:
                return None
            except (BudgetTooSmall, BudgetExceeded) as error:
                if self._settings.on_misfit == "raise":
                    raise
                return warn_of_misfit(f"a call of {region.name}", error)
        try:
            captured = region.captured(inputs, self._first_costs, loss_alone=False)
            if region.expected is not None:
                captured = for_missing(captured, region.expected)
            return self.together.add(region.name, captured, self._costs)
        except NoBackward:
            return None
        except CaptureError as error:
            logger.warning("%s runs as it is, its memory is not planned: %s", region.name, error)
            self.together.breaks.append(f"{region.name} runs as it is: {error}")
            return None

    def _refuse_given(self) -> None:
        where = "; ".join(dict.fromkeys(self.together.breaks)) or "other ranks take part in it"
        raise PlanMismatch(
            f"plan= is for a model whose forward is one region, and this one's is not: {where}. "
            f"Leave plan= out; a step of several regions is recorded and planned in each process"
        )

    def _communicates(self, region: Region, inputs: Sequence[Any]) -> bool:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return False
        with contextlib.suppress(NoBackward):
            return region.captured(inputs, self._first_costs).communicates
        return False

    @property
    def _first_costs(self) -> Costs:
        """With which a graph is captured, before it is known whether it must be measured."""
        return "estimate" if self._settings.costs == "measure" else self._settings.costs

    def _plan_alone(self, region: Region, inputs: Sequence[Any]) -> Planned:
        """Plan for a region that is all of the function.

        The graph is captured with estimated costs first: if it is known, or has the ops of one that
        is, its plan is too, and nothing is measured or solved.
        """
        settings = self._settings
        measured = settings.costs == "measure"
        start = time.perf_counter()
        captured = region.captured(inputs, self._first_costs)
        if region.expected is not None:
            captured = for_missing(captured, region.expected)
        kin = [
            known
            for known in self._known
            if known.capture.missing == captured.missing
            and have_same_ops(known.capture.graph, captured.letting_go(known.capture.let_go).graph)
        ]
        if region.let_go:
            captured = captured.letting_go(region.let_go)
        for known in kin:
            if known.capture.let_go == captured.let_go and _is_equal(
                known.capture.graph, captured.graph
            ):
                same = replace(captured, graph=known.capture.graph, loss=known.capture.loss)
                executable = get_executor(settings.executor)(
                    same, known.plan.schedule, budget_bytes=known.plan.budget_bytes
                )
                return Planned(known.plan, same, executable)
        if measured:
            refuse_other_profilers(_device(inputs))
        if measured and not kin:
            captured = captured.costed("measure", self._costs)
        if settings.loss is not None:
            told = with_call(settings.loss, *self.call)
            settings = replace(settings, loss=lambda returned: told(self._rebuilt(returned)))
        if settings.budget.is_auto:
            settings = replace(settings, budget=self._auto.fix())
        planned = make_plan(
            region.graph,
            tuple(inputs),
            {},
            settings,
            captured,
            run=True,
            missing=region.expected,
            let_go=region.let_go or frozenset(),
            granted_bytes=self._granted_bytes,
            schedules=[known.plan.schedule for known in kin],
            given=None if self._known else settings.given,
            started=start,
        )
        self._granted_bytes = max(self._granted_bytes, planned.plan.budget_bytes)
        self._known.append(planned)
        return planned

    def _rebuilt(self, returned: Any) -> Any:
        """Give what the function returns, if its only region returns this."""
        before, self.answer = self.answer, returned
        try:
            return self.rebuild(returned)
        finally:
            self.answer = before


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [item.device for item in inputs if isinstance(item, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _no_rebuilding(returned: Any) -> Any:
    return returned
