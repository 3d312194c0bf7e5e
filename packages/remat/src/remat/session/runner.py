"""Runs the regions of a model's steps under one budget: recorded first, then by one plan.

In its first step each region runs by a schedule that keeps little. The step is recorded: what
is held at the start and end of each half of each region, and the most in between. By that a
schedule is chosen for every call (`choosing.py`). What is made but once counts in it, so the first
step like it in which no region is planned is recorded, too, and planned by if it took less; nothing
is refused before. So is the first by that plan, and planned again if it takes more than predicted.
A step in which a region is found that earlier ones did not call is recorded from there on, to tell
whether it was over the budget. Between two steps nothing is alive between its halves.

A plan of an earlier process brings the options of its regions, and what was chosen, which is taken
if the step is recorded to make the same calls and to fit. Its own record of the step is no more
than what was: what the code between the regions holds is the code's to say.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from remat.budgets.auto import AutoBudget
from remat.errors import BudgetWarning
from remat.planning.settings import Settings
from remat.session.choosing import StepChooser
from remat.session.kind_finder import KindFinder
from remat.session.known_bytes import HandedOut, KnownBytes, NewGradients
from remat.session.known_patterns import KnownPattern, KnownPatterns
from remat.session.recording import Call, Recorded, StepRecording, peak_as_if_new
from remat.session.region_calls import RegionCall, RegionKind, RegionPlan
from remat.session.step_planner import StepPlanner
from remat_exec import Runnable, get_executor
from remat_graph.torch import Capture, Cost, LossCost, flatten
from remat_solvers.step import RegionOption

__all__ = ["StepRunner"]

logger = logging.getLogger(__name__)

_MOST_BLOCKED = 2  # steps that are not recorded and have no plan, before that is told
_BLOCKED = (
    "another profiler runs in this thread, beside which no step can be recorded: until one is, "
    "nothing is planned, calls of regions run by the schedules that keep the least, and what runs "
    "between them is not held against the budget. Gradients are right"
)


class StepRunner:
    """Runs the regions of a model's steps, and has them planned.

    A step begins with a forward while nothing is alive between its halves, and ends when all
    backwards have; two forwards before a backward are of one step. `within_forward` is set while a
    forward runs that is known to be one; otherwise each call of a region may begin a step. Such a
    forward begins a step, too, if a backward is over: what is alive then got no gradient, as an
    output that is in no loss, or its backward raised, and its memory was there before.
    """

    def __init__(self, settings: Settings, told: Callable[[Any], None], auto: AutoBudget) -> None:
        self.within_forward = False
        self.live: weakref.WeakSet[RegionCall] = weakref.WeakSet()
        self._settings = settings
        self._chooser = StepChooser(settings, auto, told)
        self._changes: dict[str, dict[int, bool | None]] = {}
        self._device: torch.device | None = None
        self._patterns = KnownPatterns()
        self._calls: list[tuple[RegionPlan, RegionOption]] = []
        self._noted: list[Call] = []
        self._recording = StepRecording(self._optimizer_steps)
        self._backward_began = False
        self._is_provisional = self._next_is_provisional = False
        self._next_is_new = False
        self._is_new = self._begun_late = self._is_plain = False
        self._forward_done = False
        self._awaited: list[weakref.ref[RegionCall]] = []
        self._autocast: torch.dtype | None = None
        self._steps = 0
        self._blocked = 0
        given = settings.given_step
        self._planner = StepPlanner(settings, told, self._chooser, self._patterns, given)
        self.known_bytes = KnownBytes(self._planner, self._recording, lambda: self._pattern)
        self._finder = KindFinder(settings, self._kinds, given)

    @property
    def breaks(self) -> list[str]:
        """Why the forward is not one region."""
        return self._chooser.breaks

    @property
    def _kinds(self) -> list[RegionKind]:
        return self._chooser.kinds

    @property
    def _is_first(self) -> bool:
        """Whether no step has ended."""
        return self._steps == 0

    def add(self, name: str, capture: Capture, costs: dict[str, Cost]) -> RegionPlan:
        """Find the options of a region, captured with estimated costs.

        What has been measured is in `costs`, and is added to. Nothing is solved for a region of a
        known kind, or of a plan that was given.

        Raises:
            PlanMismatch: in the first step, if it is none of the regions of that plan.
        """
        capture = capture.with_loss(LossCost(0, 0))  # what stands between the halves is measured
        self._device = capture.program.device
        runs_first = name not in self._changes  # else code has run that differs in sizes alone
        if self.within_forward or self.live:
            self._is_new = True
            self._is_provisional |= runs_first
        else:  # the step begins with this region
            self._next_is_new = True
            self._next_is_provisional |= runs_first
        position = len(self._calls) if self._is_first else None
        number, capture = self._finder.find(name, capture, costs, position)
        changes = self._changes.setdefault(name, {})
        executor = get_executor(self._settings.executor)
        return RegionPlan(number, capture, self._kinds[number], executor, changes)

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
        recorded, at_least, plain = None, 0, None
        if self._recording.ended:
            if self._is_plain:
                plain = self._plain_peak()
            elif self._begun_late:
                at_least = self.known_bytes.at_least(self._recording.read())
            else:
                recorded = self._recorded()
        self.stop_recording()
        before: KnownPattern | None = None
        if self._calls:
            before = self._patterns.end_step(self._pattern)
            self._steps += 1
        self._backward_began = False
        is_new, self._next_is_new = self._next_is_new, False
        self._is_provisional, self._next_is_provisional = self._next_is_provisional, False
        pattern = self._pattern
        self.forget_calls()
        if self._is_plain and device is not None:
            self._planner.see_plain(plain, device)
        elif recorded is not None and device is not None:
            self._planner.take(recorded, before, self._steps, device)
        elif not (at_least and self._planner.see_part(at_least, self._steps, pattern)):
            self.known_bytes.tell(pattern)
        self.known_bytes.begin_step(self._steps)
        self._planner.refuse()
        wanted = self._patterns.wanted or is_new
        self._is_plain = False
        if wanted and device is not None and torch.is_grad_enabled():
            self._recording.start(device)
            self._is_plain = self._planner.awaits_plain and self._recording.under_way
            if not (self._recording.under_way or self._patterns.known):
                self._blocked += 1
                if self._blocked == _MOST_BLOCKED:
                    warnings.warn(_BLOCKED, BudgetWarning, stacklevel=2)

    def forget_calls(self) -> None:
        """Begin the list of the calls of a step."""
        self._calls, self._noted, self._awaited = [], [], []
        self._is_new = self._forward_done = False

    def enter_first(self, device: torch.device) -> None:
        """Begin the first step, of which it is not known yet whether it has several regions."""
        if self._is_first and not self._recording.under_way:
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
        plain: Callable[[], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Run the forward of a region by its plan, or `plain` in a step that runs so."""
        if not self.within_forward:
            self.enter(plan.capture.program.device)
        if self._recording.under_way and not self._recording.is_on(plan.capture.program.device):
            self.stop_recording()  # of a first step, whose device was not known
        if self._is_new and not self._recording.under_way:
            self._is_new = False
            self._begin_late(plan.capture.program.device)
        if self._is_plain:
            return self._run_plain(plan, tensors, learn, plain)
        position = len(self._calls)
        option = self._option_for(plan)
        if self._patterns.off_plan and not self._recording.under_way:
            self._begin_late(plan.capture.program.device, collect=False)  # each step may be so
        self._calls.append((plan, option))
        watched = plan.changes.protect_inputs(tensors)
        if any(plan.changes.is_new(position) for position, *_ in watched):
            self._is_provisional = True  # later steps most often do not hold them twice
        executable = plan.executable(option)
        if self._recording.under_way:
            self._noted.append(plan.noted(option, tensors))
        call = RegionCall(self, position, learn, executable, plan, option, watched=watched)
        call.gradients = NewGradients(tensors)
        if self._patterns.off_plan:
            self._make_room(max(option.forward_bytes, option.kept_bytes), "forward")
        self.known_bytes.see(self.live, option.forward_bytes)
        self.mark(f"forward {position}")
        outputs = executable(
            graph,
            tensors,
            call.started,
            call.finished,
            lambda drop: setattr(call, "drop", drop),
        )
        call.handed = HandedOut(outputs)
        self.live.add(call)
        if self._recording.under_way:
            self._awaited.append(weakref.ref(call, self._dropped))
        self.mark(f"kept {position}")
        watched = plan.changes.protect_outputs(outputs)
        if any(plan.changes.is_new(position) for position, *_ in watched):
            self._is_provisional = True
        call.watched += watched
        return outputs

    def _begin_late(self, device: torch.device, *, collect: bool = True) -> None:
        """Record the rest of a step, unless a checkpoint computes again in its backward."""
        if torch._C._current_graph_task_id() == -1:
            self._begun_late = True
            self.known_bytes.record_from(len(self._calls))
            self._recording.start(device, collect=collect)

    def _run_plain(
        self,
        plan: RegionPlan,
        tensors: list[torch.Tensor],
        learn: Callable[[Runnable, frozenset[int], frozenset[int]], None],
        plain: Callable[[], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Run the forward of a region as it is; it lives until its backward begins."""
        everything = self._kinds[plan.kind].everything
        executable = plan.executable(plan.least)
        call = RegionCall(self, len(self._calls), learn, executable, plan, everything)
        self._calls.append((plan, everything))
        self._recording.mark_present(tensors)
        outputs = plain()
        self.live.add(call)
        self._awaited.append(weakref.ref(call, self._dropped))
        call.end_before(outputs)
        return outputs

    def _plain_peak(self) -> tuple[int, int] | None:
        """Give what the step that ran plain took, and what its regions keep if all is stored."""
        marks = self._recording.read()
        return (peak_as_if_new(marks), self._chooser.stored_bytes(self._pattern)) if marks else None

    def _option_for(self, plan: RegionPlan) -> RegionOption:
        """Find the option of the next call: the planned one, or that of other sizes, if it fits."""
        calls = self._pattern
        planned = self._patterns.option_for(calls, plan.kind)
        if planned is not None:
            return planned
        families = tuple(self._kinds[number].family for number in calls)
        kind = self._kinds[plan.kind]
        alike = self._patterns.option_alike(families, kind.family)
        if alike is not None:
            option = kind.by(alike)
            if option.peak_bytes <= self._room_left():
                return option
        return self._unplanned(plan)

    def _room_left(self) -> int:
        """Give what the live calls, and the code between regions, leave of what a step may take.

        That code is taken to hold the most that it held at any time of a recorded step.
        """
        room = self._chooser.room or self._chooser.budget()
        held = self._patterns.held("backward") if self._patterns.known else 0
        return room - held - sum(call.option.kept_bytes for call in self.live)

    def _unplanned(self, plan: RegionPlan) -> RegionOption:
        """Find the option that keeps the least of those whose halves fit beside the live calls."""
        if self._chooser.is_unknown:
            return plan.least
        left = self._room_left()
        options = self._kinds[plan.kind].front.options
        fitting = [option for option in options if option.peak_bytes <= left]
        if fitting:
            return min(fitting, key=lambda option: option.kept_bytes)
        return min(options, key=lambda option: option.peak_bytes)

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
        self.known_bytes.backward_begins(self.live)
        if self._patterns.off_plan:
            self._make_room(call.option.backward_bytes, "backward", call)
        self.known_bytes.see(self.live, call.option.backward_bytes, call)

    def _make_room(self, needed: int, half: str, own: RegionCall | None = None) -> None:
        """Let earlier calls give back what they can make again, the largest first.

        What the code between regions holds is taken to be the most that it held at any time in
        this half of the steps that were recorded.
        """
        if self._chooser.room is None:
            return
        others = self._patterns.held(half)
        calls = sorted(self.live, key=lambda call: -call.droppable_bytes)
        held = sum(call.option.kept_bytes for call in calls if call is not own)
        room = self._chooser.room - others - needed
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

    def await_backward(self, returned: Any) -> None:
        """See a step's end also if no region has a part in the backward of its forward."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def begins(_: Any) -> None:
            self.await_end()

        for tensor in flatten(returned)[0]:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begins)
        self._forward_done = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _dropped(self, _: object) -> None:
        """Record no further where what the forward returned is gone, and no backward can follow."""
        in_use = self.within_forward or self._backward_began or any(True for _ in self.live)
        if self._forward_done and not in_use and torch._C._current_graph_task_id() == -1:
            self.stop_recording()

    def _backward_over(self) -> bool:
        """Whether a backward of this step has begun, and none is under way."""
        return self._backward_began and torch._C._current_graph_task_id() == -1

    def _recorded(self) -> Recorded | None:
        marks = self._recording.read() if self._noted else ()
        return Recorded.of(self._noted, marks, provisional=self._is_provisional) if marks else None

    def _optimizer_steps(self) -> None:
        """Record no longer than that, for others who want to profile."""
        if not self.live:
            self._recording.read()

    @property
    def is_recording(self) -> bool:
        """Whether the step is recorded."""
        return self._recording.under_way

    def rest(self) -> None:
        """Record no further where a forward without gradients runs between two steps."""
        if not self.within_forward and not self.live and torch._C._current_graph_task_id() == -1:
            if self._recording.ended:
                self._recording.read()
            else:
                self.stop_recording()

    def stop_recording(self) -> None:
        """Drop the recording of a step that came to no end, or in which something is measured."""
        self._begun_late = False
        self._recording.stop()
