"""One budget for a step of several regions: recorded once, then planned as one.

In its first step each region runs by a schedule that keeps little. The step is recorded: what
is held at the start and end of each half of each region, and the most in between. From that follow
the moments at which the step must be within the budget, and one program chooses a schedule for
every region (`remat_solvers.step`). The step after it is recorded, too, and planned again if it
takes more than was predicted. Between two steps nothing is alive between its halves.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.auto_budget import AutoBudget
from remat.cache import remembered_costs
from remat.errors import BudgetWarning
from remat.known_patterns import KnownPattern, KnownPatterns
from remat.misfit import warn_of_misfit
from remat.planning import Settings, refuse_other_profilers
from remat.plans import StepPlan
from remat.recording import Recorded, StepRecording, gradients_present, moments_of, peak_of
from remat.region_calls import RegionCall, RegionKind, RegionPlan
from remat_exec import BudgetExceeded, Runnable, get_executor
from remat_graph.torch import Capture, Cost, LossCost
from remat_solvers import BudgetTooSmall
from remat_solvers.step import (
    Moment,
    RegionFront,
    RegionOption,
    StepChoice,
    choose,
    refined_options,
    region_front,
    step_bound,
)

__all__ = ["StepPlanner"]

logger = logging.getLogger(__name__)

_SECONDS, _SECONDS_PER_OP = 0.5, 0.02  # for the options of a region
_CHOICE_SECONDS = 5.0
_ATTEMPTS = 4  # plans in a row whose steps may go over the budget
_WORTH_REFINING = 0.01  # of the budget, left over
_NAMED = 1.02  # times what a step needs: a budget that is said to be enough
_TOLERANCE = 1.002  # of the budget, by which fixed parts may be off from step to step


@dataclass(eq=False)
class StepPlanner:
    """Plans the regions of a model's steps, and runs them.

    A step begins with a forward while nothing is alive between its halves, and ends when all
    backwards have; two forwards before a backward are of one step. `within_forward` is set while a
    forward runs that is known to be one; otherwise each call of a region may begin a step. Such a
    forward begins a step, too, if a backward is over: what is alive then got no gradient, as an
    output that is in no loss, or its backward raised, and its memory was there before.
    """

    settings: Settings
    told: Callable[[Any], None]
    auto: AutoBudget
    breaks: list[str] = field(default_factory=list)
    within_forward: bool = False
    live: weakref.WeakSet[RegionCall] = field(default_factory=weakref.WeakSet)
    _kinds: list[RegionKind] = field(default_factory=list)
    _changes: dict[str, dict[int, bool]] = field(default_factory=dict)
    _device: torch.device | None = None
    _patterns: KnownPatterns = field(default_factory=KnownPatterns)
    _calls: list[tuple[RegionPlan, RegionOption]] = field(default_factory=list)
    _present: list[dict[int, int]] = field(default_factory=list)
    _recording: StepRecording = field(default_factory=StepRecording)
    _backward_began: bool = False
    _autocast: torch.dtype | None = None
    _set_aside: int = 0
    _stored: int = 0
    _steps: int = 0
    _over_in_a_row: int = 0
    _error: Exception | None = None
    _room: int | None = None

    def add(self, name: str, capture: Capture, costs: dict[str, Cost]) -> RegionPlan:
        """Find the options of a region, captured with estimated costs.

        What has been measured is in `costs`, and is added to. Nothing is measured or solved for a
        region of a known kind.
        """
        capture = capture.with_loss(LossCost(0, 0))  # what stands between the halves is measured
        numbers = range(len(self._kinds))
        number = next((n for n in numbers if self._kinds[n].has(capture.graph)), len(self._kinds))
        if number == len(self._kinds):
            if self.settings.costs == "measure":
                self.stop_recording()
                refuse_other_profilers(capture.program.device)
                with remembered_costs(costs, capture.program.device, self.settings.costs):
                    capture = capture.costed("measure", costs)
            limit = _SECONDS + _SECONDS_PER_OP * len(capture.graph.ops)
            if self.settings.limit_seconds is not None:
                limit = min(limit, self.settings.limit_seconds)
            solver = "refine" if self.settings.solver == "auto" else self.settings.solver
            front = region_front(capture.graph, solver=solver, limit_seconds=limit)
            self._kinds.append(RegionKind(name, front))
        self._device = capture.program.device
        least = self._kinds[number].front.options[0]
        changes = self._changes.setdefault(name, {})
        return RegionPlan(number, capture, least, get_executor(self.settings.executor), changes)

    def enter(self, device: torch.device | None) -> None:
        """Begin a step, unless one is under way: plan by what was recorded, record if need be.

        Raises:
            BudgetTooSmall: if no plan of the regions is within the budget.
            BudgetExceeded: if the steps of four plans in a row took more than the budget.
        """
        if self.live and (device is not None or not self._backward_over()):
            return
        self.live.clear()
        device = device or self._device
        recorded = self._recorded() if self._recording.ended else None
        self.stop_recording()
        before: KnownPattern | None = None
        if self._calls:
            if self._is_unknown:
                everything = [self._kinds[plan.kind].everything for plan, _ in self._calls]
                self._stored = sum(option.kept_bytes for option in everything)
            before = self._patterns.end_step(self._pattern)
            self._steps += 1
        self._backward_began = False
        self._calls, self._present = [], []
        if recorded is not None:
            self._take(recorded, before)
        if self._error is not None:
            raise self._error
        if self._patterns.wanted and device is not None:
            self._recording.start(device)

    @property
    def _pattern(self) -> tuple[int, ...]:
        return tuple(plan.kind for plan, _ in self._calls)

    def run(
        self,
        plan: RegionPlan,
        graph: Any,
        tensors: list[torch.Tensor],
        learn: Callable[[Runnable, frozenset[int], frozenset[int]], None],
    ) -> list[torch.Tensor]:
        """Run the forward of a region by its plan."""
        if not self.within_forward:
            self.enter(plan.capture.program.device)
        position = len(self._calls)
        option = self._patterns.option_for(self._pattern, plan.kind) or self._unplanned(plan)
        self._calls.append((plan, option))
        watched = plan.protect(tensors)
        if watched:
            self.stop_recording()  # of a step that holds them twice
        if self._recording.under_way:
            self._present.append(gradients_present(tensors))
        executable = plan.executable(option)
        call = RegionCall(self, position, learn, executable, plan, option, watched=watched)
        if self._patterns.off_plan:
            self._make_room(max(option.forward_bytes, option.kept_bytes), "forward")
        self.mark(f"forward {position}")
        outputs = executable(
            graph,
            tensors,
            call.started,
            call.finished,
            lambda drop: setattr(call, "drop", drop),
        )
        self.live.add(call)
        self.mark(f"kept {position}")
        return outputs

    def _unplanned(self, plan: RegionPlan) -> RegionOption:
        """Find the option that keeps the least of those whose halves fit beside the live calls."""
        if self._is_unknown and not self._stored:
            return plan.least
        room = self._room or self._budget(self._stored)
        left = room - sum(call.option.kept_bytes for call in self.live)
        options = self._kinds[plan.kind].front.options
        fitting = [option for option in options if option.peak_bytes <= left]
        if fitting:
            return min(fitting, key=lambda option: option.kept_bytes)
        return min(options, key=lambda option: option.peak_bytes)

    @property
    def _is_unknown(self) -> bool:
        """Whether the budget is a fraction of a peak that no step has shown yet."""
        return self._room is None and self.settings.budget.fraction is not None

    def live_regions(self) -> list[Any]:
        """Give the regions of the calls that are between their halves."""
        return list(dict.fromkeys(getattr(call.learn, "__self__", None) for call in self.live))

    def see_autocast(self, autocast: torch.dtype | None) -> None:
        """Record the next step if a backward's autocast is another than in those before it.

        Products in another type take memory for casts, which no earlier step has shown.
        """
        if autocast != self._autocast:
            self._autocast = autocast
            self._patterns.record_next = True

    def live_backward(self, call: RegionCall) -> None:
        """See, in a step that was not planned for, that there is room for a backward."""
        if self._patterns.off_plan:
            self._make_room(call.option.backward_bytes, "backward", call)

    def _make_room(self, needed: int, half: str, own: RegionCall | None = None) -> None:
        """Let earlier calls give back what they can make again, the largest first.

        What the code between regions holds is taken to be the most that it held at any time in
        this half of the steps that were recorded.
        """
        if self._room is None:
            return
        others = self._patterns.held(half)
        calls = sorted(self.live, key=lambda call: -call.droppable_bytes)
        held = sum(call.option.kept_bytes for call in calls if call is not own)
        room = self._room - others - needed
        for call in calls:
            if held <= room:
                return
            if call is not own and call.droppable_bytes > 0:
                held -= call.droppable_bytes
                call.go_lean()

    def mark(self, label: str) -> None:
        """Note a moment of the step, if it is recorded."""
        self._recording.mark(label)

    def await_end(self) -> None:
        """End the step with the backward that is under way, unless another one follows."""
        self._backward_began = True
        self._recording.await_end()

    def _backward_over(self) -> bool:
        """Whether a backward of this step has begun, and none is under way."""
        return self._backward_began and torch._C._current_graph_task_id() == -1

    def _recorded(self) -> Recorded:
        return Recorded(
            self._pattern,
            tuple(self._kinds[plan.kind].front.graph for plan, _ in self._calls),
            tuple(option for _, option in self._calls),
            tuple(self._present),
            self._recording.marks(),
        )

    def stop_recording(self) -> None:
        """Drop the recording of a step that came to no end, or in which something is measured."""
        self._recording.stop()

    def __del__(self) -> None:
        """Leave no profiler running."""
        self.stop_recording()

    def _take(self, record: Recorded, ran_by: KnownPattern | None) -> None:
        """See that a recorded step took no more than the budget; plan by it, if it is new."""
        self._patterns.recorded()
        if ran_by is not None:
            most = max(record.peak_bytes, ran_by.plan.measured_peak_bytes or 0)
            ran_by.plan = replace(ran_by.plan, measured_peak_bytes=most)
            if not _has_other_ranks():  # whose messages come sooner or later from step to step
                ran_by.awaited = 0
            if ran_by.fits:
                self.told(ran_by.plan)
        planned = self._patterns.of(record.pattern) or ran_by
        if planned is not None:
            over = record.peak_bytes - planned.plan.budget_bytes
            if over <= 0 or not planned.fits:
                self._over_in_a_row = 0
                return
            self._over_in_a_row += 1
            self._set_aside += over + over // 4
        was_unknown = self._is_unknown
        wanted = planned.record if planned and record.pattern != planned.record.pattern else record
        try:
            made = self._plan(wanted)
            if record.peak_bytes > made.plan.budget_bytes and not was_unknown:
                self._tell_over(record.peak_bytes, made.plan.budget_bytes, ran_by is not None)
        except (BudgetTooSmall, BudgetExceeded) as error:
            if self.settings.on_misfit == "raise":
                self._error = error
                return
            made = self._without_plan(wanted, error)
        except Exception as error:
            self._error = error
            return
        self._patterns.add(made)
        if made.fits:
            self.told(made.plan)

    def _tell_over(self, peak: int, budget: int, by_plan: bool) -> None:
        """Warn of a step over the budget.

        Raises:
            BudgetExceeded: after the steps of several plans in a row.
        """
        reason = (
            "what runs between the regions took more than in the step that was planned by"
            if by_plan
            else "it was not planned for, or its calls of regions were not"
        )
        text = (
            f"step {self._steps} took {peak:,} bytes, {peak - budget:,} more than the budget of "
            f"{budget:,}: {reason}. Its gradients are right"
        )
        if self._over_in_a_row >= _ATTEMPTS:
            text += f"; so did the steps of {_ATTEMPTS - 1} plans before it; raise the budget"
            raise BudgetExceeded(text, budget, peak)
        warnings.warn(
            f"{text}, and the next step is planned anew, with {self._set_aside:,} bytes set aside",
            BudgetWarning,
            stacklevel=2,
        )

    def _plan(self, record: Recorded) -> KnownPattern:
        moments = list(moments_of(record))
        plans = [self._kinds[number] for number in record.pattern]
        stored = peak_of(moments, [plan.everything for plan in plans])
        budget = self._budget(stored)
        self._room = room = max(1, int((budget - self._set_aside) / _TOLERANCE))
        try:
            choice = self._choose(plans, moments, room)
        except BudgetTooSmall as error:
            refused = BudgetTooSmall(
                budget,
                self._with_margin(error.smallest_bytes),
                error.least_bytes,
                error.least_at,
                error.status,
            )
            if self.breaks:
                where = "\n".join(f"  {reason}" for reason in dict.fromkeys(self.breaks))
                refused.add_note(f"Only what is within a region is computed again, and:\n{where}")
            raise refused from None
        calls = [1] * len(plans)
        bound = step_bound([plan.front for plan in plans], calls, moments, room,
                           limit_seconds=_CHOICE_SECONDS)  # fmt: skip
        options = [
            plan.front.options[index] for plan, index in zip(plans, choice.indices, strict=True)
        ]
        peak = choice.peak_bytes + self._set_aside
        made = self._known(record, moments, options, budget, peak, choice.time, bound)
        logger.info("planned: %s", str(made.plan).replace("\n", "; "))
        return made

    def _without_plan(
        self, record: Recorded, error: BudgetTooSmall | BudgetExceeded
    ) -> KnownPattern:
        """Store everything in steps of this pattern, which cannot be within the budget."""
        moments = list(moments_of(record))
        options = [self._kinds[number].everything for number in record.pattern]
        stored = peak_of(moments, options)
        time = sum(option.time for option in options)
        made = self._known(record, moments, options, self._budget(stored), stored, time, time)
        self.told(warn_of_misfit(f"a step of {len(options)} calls of regions", error))
        return replace(made, fits=False, awaited=0)

    def _budget(self, stored: int) -> int:
        asked = self.auto.fix() if self.settings.budget.is_auto else self.settings.budget
        return asked.resolve(lambda: stored)

    def _known(
        self,
        record: Recorded,
        moments: list[Moment],
        options: list[RegionOption],
        budget: int,
        peak: int,
        time: float,
        bound: float,
    ) -> KnownPattern:
        plans = [self._kinds[number] for number in record.pattern]
        made = StepPlan(
            tuple((plan.name, option) for plan, option in zip(plans, options, strict=True)),
            tuple(dict.fromkeys(self.breaks)),
            budget,
            peak,
            peak_of(moments, [plan.everything for plan in plans]),
            time,
            sum(plan.front.graph.time for plan in plans),
            min(bound, time),
        )
        forwards = (m.fixed_bytes for m in moments if m.running and m.running[1] == "forward")
        held = {
            "forward": max(forwards, default=0),
            "backward": max(moment.fixed_bytes for moment in moments),
        }
        return KnownPattern(record, made, tuple(options), held)

    def _with_margin(self, size: int) -> int:
        """Give a budget with room for this much, also where other steps need a little more."""
        return int(size * _NAMED) + 1 + self._set_aside

    def _choose(self, plans: list[RegionKind], moments: list[Moment], room: int) -> StepChoice:
        """Choose; then solve each kind of region again for what is left over, and choose again."""
        calls = [1] * len(plans)
        seconds = _CHOICE_SECONDS
        fronts = [plan.front.options for plan in plans]
        choice = choose(fronts, calls, moments, room, limit_seconds=seconds)
        left = room - choice.peak_bytes
        if left < _WORTH_REFINING * room:
            return choice
        wanted: dict[int, tuple[RegionFront, set[RegionOption]]] = {}
        for plan, index in zip(plans, choice.indices, strict=True):
            option = plan.front.options[index]
            if option.time > plan.front.graph.time:
                wanted.setdefault(id(plan.front), (plan.front, set()))[1].add(option)
        better: dict[int, RegionFront] = {}
        for key, (front, options) in wanted.items():
            better[key] = front
            for option in options:
                better[key] = refined_options(
                    better[key],
                    kept_bytes=option.kept_bytes + left // len(plans),
                    peak_bytes=option.peak_bytes + left,
                    limit_seconds=_SECONDS / len(options),
                )
        for plan in dict.fromkeys(plans):
            plan.front = better.get(id(plan.front), plan.front)
        fronts = [plan.front.options for plan in plans]
        return choose(fronts, calls, moments, room, limit_seconds=seconds)


def _has_other_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
