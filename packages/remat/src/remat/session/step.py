"""What the calls of a step are, and what is recorded of it, which is judged after it."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.errors import BudgetWarning
from remat.planning.settings import Settings
from remat.planning.solving import KNOWN_SCHEDULE
from remat.planning.task import RunnablePlan
from remat.session.backwards import before_backward, within_backward
from remat.session.calls import Call, HandedOut
from remat.session.deferring import OutputUses
from remat.session.judge import Judge
from remat.session.kinds import CapturedRegion
from remat.session.phases import NEXT, Phase
from remat.session.planned_patterns import PlannedPattern, PlannedPatterns
from remat.session.recording import Recorded, RecordedCall, StepRecording, peak_as_if_new
from remat.session.step_bound import StepBound
from remat.session.step_planner import StepPlanner
from remat_graph.torch import Mark
from remat_solvers.step import RegionOption

__all__ = ["StepState"]

_MOST_BLOCKED = 2  # steps that are not recorded and have no plan, before a warning says so
_BLOCKED = (
    "another profiler runs in this thread, beside which no step can be recorded: until one is, "
    "nothing is planned, calls of regions run by the schedules that keep the least, and what runs "
    "between them is not held against the budget. Gradients are right"
)


class StepState:
    """The step under way, and what is known from those before.

    `live` are its calls between their halves, those of earlier steps that have the budget each for
    itself among them. The record is of the whole step; or it `begun_late`, with a region that
    earlier steps did not call; or it is that of one call of a region that has the budget for
    itself. A step that `runs_plain` is recorded for what plain autograd takes; nothing is planned
    by one that `is_odd`: it asked for what nothing has room for, and was told of so many bytes
    (`told_bytes`). Without any plan it is judged if it took more than that. `hooked` counts
    the calls of the step that have a leaf with a hook, by its `id`. `done` counts the steps of
    several regions that are over, on the `device` of the region that was found last.
    `lone_budget` is what calls that have the budget each for itself have plans within, if any do.
    `between` is called between two steps, when the one before has been judged.
    """

    def __init__(
        self, settings: Settings, on_plan: Callable[[Any], None], planner: StepPlanner
    ) -> None:
        self.planner = planner
        self.patterns = PlannedPatterns()
        self.outputs = OutputUses(settings)
        self.recording = StepRecording(self._optimizer_steps)
        self._judge = Judge(
            settings, on_plan, planner, self.patterns, self.outputs, settings.step_plan
        )
        self.bound = StepBound(self._judge, self.recording, lambda: self.pattern)
        self.between: Callable[[], None] = lambda: None
        self.phase = Phase.OPEN
        self.device: torch.device | None = None
        self.lone_budget: int | None = None
        self.done = self._blocked = 0
        self.calls: list[tuple[CapturedRegion, RegionOption]] = []
        self.noted: list[RecordedCall] = []
        self.handed_on: list[HandedOut] = []  # of calls whose backward is over
        self.hooked = Counter[int]()
        self.live: weakref.WeakSet[Call] = weakref.WeakSet()
        self.is_provisional = self._next_is_provisional = False
        self.is_new = self._next_is_new = self.is_odd = self.overlaps = False
        self.begun_late = self.runs_plain = False
        self.told_bytes = 0
        self._recorded: Call | None = None
        self._recorded_ref: weakref.ref[Call] | None = None
        self._awaited: list[weakref.ref[Call]] = []

    def move(self, event: str) -> None:
        """Move on to the next phase."""
        self.phase = NEXT[event][self.phase]

    @property
    def within_forward(self) -> bool:
        """Whether a forward is under way that is known to be one."""
        return self.phase in (Phase.FORWARD, Phase.AGAIN)

    @property
    def backward_over(self) -> bool:
        """Whether a backward of this step has begun, and none is under way."""
        return self.phase is Phase.BACKWARD and not within_backward()

    @property
    def open_calls(self) -> list[Call]:
        """The live calls that share a budget."""
        return [call for call in self.live if call.planned is None]

    @property
    def lone_calls(self) -> list[Call]:
        """The live calls that have the budget each for itself."""
        return [call for call in self.live if call.planned is not None]

    @property
    def pattern(self) -> tuple[int, ...]:
        """The kinds of the calls so far."""
        return tuple(plan.kind for plan, _ in self.calls)

    @property
    def has_several(self) -> bool:
        """Whether several calls have been alive at a time, those of earlier steps among them."""
        return self.overlaps or len(self.calls) > 1

    @property
    def known_budget(self) -> int | None:
        """The budget of a step of the calls so far, if it is known, and there is a plan to keep."""
        return self._judge.known_budget(self.pattern)

    def forget_calls(self) -> None:
        """Begin the list of the calls of a step."""
        self.calls, self.noted, self.handed_on, self._awaited = [], [], [], []
        self.hooked = Counter()
        self.outputs.clear()
        self.is_new = self.is_odd = self.overlaps = False
        self.told_bytes = 0

    def begin_again(self, calls: int) -> None:
        """Forget all calls but the first ones: the forward that made the others is run again."""
        is_recorded = self.recording.under_way and not (calls or self.records_call)
        gc.collect()  # errors leave what it held in cycles
        if calls:
            del self.calls[calls:]
        else:
            self.forget_calls()
        go_on = self.recording.start_again if is_recorded else self.stop_recording_steps
        go_on()

    def add_region(self, *, runs_first: bool) -> None:
        """See a region that earlier steps did not call, and whose code `runs_first` here."""
        if self.within_forward or self.open_calls:
            self.is_new = True
            self.is_provisional |= runs_first
        else:  # the step begins with this region
            self._next_is_new = True
            self._next_is_provisional |= runs_first

    def await_call(self, call: Call) -> None:
        """Count a call as live, until its backward ends; if it goes without one, see that."""
        self.live.add(call)
        if self.recording.under_way:
            self._awaited.append(weakref.ref(call, self._dropped))

    def forward_returns(self, returned: Any, *, shared: bool) -> None:
        """See what a forward returned, and its backward also if no region has a part in it."""
        self.outputs.read_kept(self.live, returned)
        if shared:
            self.outputs.see_returned(returned)
            before_backward(returned, self.backward_begins)

    def see_backward(self, call: Call) -> bool:
        """See whose backward begins, and say whether its forward was in this step.

        If it was not, the step `overlaps` with an earlier one, as in a loop that runs the next
        forward before the last backward.
        """
        is_own = call in self.live
        self.overlaps |= not is_own
        return is_own

    def backward_begins(self, call: Call | None = None) -> None:
        """End the step with the backward that is under way, unless another one follows."""
        self.move("backward")
        if call is not None and call.planned is not None:
            if self._recorded_ref is None or self._recorded_ref() is not call:
                return
            self._recorded = call
        elif self.records_call:
            return
        if call is not None:
            self.recording.mark(f"backward {call.position}")
        self.recording.await_end()

    def record_call(self, call: Call, planned: RunnablePlan) -> None:
        """Record the step of one call from here on; what planning it left is collected before."""
        self.stop_recording()
        self.recording.start(
            planned.capture.program.device,
            collect=planned.plan.measured_peak_bytes is not None,
            solved=planned.plan.solver != KNOWN_SCHEDULE,
        )
        self._recorded_ref = weakref.ref(call, self._dropped)

    @property
    def records_call(self) -> bool:
        """Whether the record is that of one call."""
        return self._recorded_ref is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _dropped(self, _: object) -> None:
        """Record no further where what the forward returned is gone, and no backward can follow."""
        if self.records_call:
            is_over = self._recorded is None
        else:
            is_over = self.phase is Phase.RETURNED and not self.open_calls
        if is_over and not within_backward():
            self.stop_recording()

    def stop_recording(self) -> None:
        """Drop what is recorded of a step, which came to no end, or is judged."""
        self.begun_late = False
        self._recorded = self._recorded_ref = None
        self.recording.stop()

    def stop_recording_steps(self) -> None:
        """Drop what is recorded, unless it is one call: that may still end, or has."""
        if not self.records_call:
            self.stop_recording()

    @property
    def _is_superseded(self) -> bool:
        """Whether some of its calls are planned anew from now on."""
        return any(plan.is_superseded for plan, _ in self.calls)

    def _record(self) -> Recorded | None:
        marks = self.recording.read() if self.noted else ()
        if marks and self.is_odd and not self._is_over_untold(marks):
            marks = ()
        provisional, read = self.is_provisional or self._is_superseded, self.outputs.was_read
        return Recorded.of(self.noted, marks, read, provisional=provisional) if marks else None

    def _is_over_untold(self, marks: Sequence[Mark]) -> bool:
        """Whether a step without any plan took more beyond the budget than was told of."""
        budget = None if self.patterns.planned else self.known_budget
        most = max(mark.peak_bytes for mark in marks)
        return budget is not None and most > budget + self.told_bytes

    def is_under_way(self, *, seen_forward: bool) -> bool:
        """Whether a call that comes now is of this step, since others wait for their backward.

        Those that have the budget each for itself do so until a backward is over.
        """
        alone = bool(self.lone_calls) and not self.backward_over
        return alone or self._is_open(seen_forward=seen_forward)

    def _is_open(self, *, seen_forward: bool) -> bool:
        """Whether calls that share the budget wait for their backward.

        A forward that is seen is of a step of its own if a backward is over: what is alive then got
        no gradient, as an output that is in no loss, or its backward raised, and its memory was
        there before.
        """
        return bool(self.open_calls) and not (seen_forward and self.backward_over)

    def begin(self, device: torch.device | None) -> None:
        """Begin a step of several regions, unless one is under way.

        Without a device it is a forward that begins.

        Raises:
            BudgetTooSmall: if no plan of the regions is within the budget.
            BudgetExceeded: if the steps of four plans in a row took more than the budget.
        """
        self.end_record_of_call()
        if self._is_open(seen_forward=device is None):
            return
        self.end(device)
        self.between()
        self.refuse()
        self.start(device)

    def end(self, device: torch.device | None) -> None:
        """End the step under way, and plan by what was recorded of it.

        One of a single call is only told of, if it took more than the budget, where such calls have
        plans of their own.
        """
        self.end_record_of_call()
        self.live.clear()
        device = device or self.device
        recording, pattern = self.recording, self.pattern
        lone_budget = self.lone_budget if len(pattern) == 1 else None
        record, at_least, plain = None, 0, None
        if recording.ended:
            if self.runs_plain:
                plain = self._plain_peak()
            elif self.begun_late:
                at_least = self.bound.at_least(recording.read())
            else:
                record = self._record()
        self.stop_recording()
        before: PlannedPattern | None = None
        if self.calls:
            before = self.patterns.end_step(pattern)
            self.done += 1
        self.move("begin")
        is_superseded = self._is_superseded
        self.forget_calls()
        if lone_budget is not None:
            seen = record.peak_bytes if record else max(at_least, plain[0] if plain else 0)
            budget = lone_budget if before is None else before.plan.budget_bytes
            self._judge.see_lone(seen, budget, self.done)
        elif self.runs_plain and device is not None:
            self._judge.see_plain(plain, device)
        elif record is not None and device is not None:
            self._judge.take(record, before, self.done, device)
            if self.lone_budget is not None and self._judge.is_refused:
                self._judge.see_refused(record)  # which only the next such step raises
        elif not (at_least and self._judge.see_part(at_least, self.done, pattern)):
            self.bound.tell(pattern)
        if is_superseded:
            self.patterns.record_next = True
            self.planner.forget_need(pattern)
        self.bound.begin_step(self.done)
        self.runs_plain = False

    def start(self, device: torch.device | None, *, may_run_plain: bool = True) -> None:
        """Start a step of calls that share the budget; record it if need be."""
        device, recording = device or self.device, self.recording
        is_new, self._next_is_new = self._next_is_new, False
        self.is_provisional, self._next_is_provisional = self._next_is_provisional, False
        wanted = self.patterns.wanted or is_new
        if wanted and device is not None and torch.is_grad_enabled():
            recording.start(device)
            awaits_plain = may_run_plain and self._judge.awaits_plain
            self.runs_plain = awaits_plain and recording.under_way
            if not (recording.under_way or self.patterns.planned):
                self._blocked += 1
                if self._blocked == _MOST_BLOCKED:
                    warnings.warn(_BLOCKED, BudgetWarning, stacklevel=2)

    @property
    def is_refused(self) -> bool:
        """Whether steps of several calls are refused."""
        return self._judge.is_refused

    def refuse(self) -> None:
        """Raise what no plan was found for, if there is such."""
        self._judge.refuse()

    def forget_refusal(self) -> Exception | None:
        """Let steps of several calls go on, and give what they were refused for."""
        return self._judge.forget_refusal()

    def _plain_peak(self) -> tuple[int, int] | None:
        """Give what the step that ran plain took, and what its regions keep if all is stored."""
        marks = self.recording.read()
        stored = self.planner.stored_bytes(self.pattern)
        return (peak_as_if_new(marks), stored) if marks else None

    def record_first(self, device: torch.device) -> None:
        """Record the first step, of which it is not known yet whether it has several regions."""
        if self.done == 0 and not self.recording.under_way:
            self.recording.start(device)

    def end_record_of_call(self) -> None:
        """Judge the step of one call, if it was recorded to its end; record no more of it.

        Not within a backward, where a checkpoint runs a forward again: it is part of the step.

        Warns:
            BudgetWarning: if it took more than the budget.
        """
        if not self.records_call or within_backward():
            return
        try:
            if self.recording.ended:
                self._judge_call()
        finally:
            self.stop_recording()

    def _judge_call(self) -> None:
        marks, call, self._recorded = self.recording.read(), self._recorded, None
        if call is not None:
            self._judge.see_call(call, marks)

    def _optimizer_steps(self) -> None:
        """Record no longer than that, for others who want to profile, unless a backward goes on."""
        if within_backward():
            return
        if self.records_call:
            self._judge_call()
        elif not self.open_calls:
            self.recording.read()

    def rest(self) -> None:
        """Record no further where a forward without gradients runs between two steps."""
        if self.records_call:
            if self.recording.ended:
                self.end_record_of_call()
        elif not (self.within_forward or self.open_calls or within_backward()):
            if self.recording.ended:
                self.recording.read()
            else:
                self.stop_recording()
