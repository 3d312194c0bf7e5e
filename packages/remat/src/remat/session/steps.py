"""From one step to the next: the record of the last is judged, the next recorded if need be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from remat.errors import BudgetWarning
from remat.planning.settings import Settings
from remat.session.judge import Judge
from remat.session.known_bytes import KnownBytes
from remat.session.known_patterns import KnownPattern, KnownPatterns
from remat.session.recording import peak_as_if_new
from remat.session.step import StepState, within_backward
from remat.session.step_planner import StepPlanner

__all__ = ["Steps"]

_MOST_BLOCKED = 2  # steps that are not recorded and have no plan, before that is told
_BLOCKED = (
    "another profiler runs in this thread, beside which no step can be recorded: until one is, "
    "nothing is planned, calls of regions run by the schedules that keep the least, and what runs "
    "between them is not held against the budget. Gradients are right"
)


class Steps:
    """The step under way, what is known of those before it, and what a record of one means.

    `done` counts those of several regions that are over. The step under way is on the `device` of
    the region that was found last.
    """

    def __init__(
        self, settings: Settings, on_plan: Callable[[Any], None], planner: StepPlanner
    ) -> None:
        self.planner = planner
        self.patterns = KnownPatterns()
        self.judge = Judge(settings, on_plan, planner, self.patterns, settings.given_step)
        self.step = step = StepState(self._optimizer_steps)
        self.known_bytes = KnownBytes(self.judge, step.recording, lambda: step.pattern)
        self.device: torch.device | None = None
        self.done = self._blocked = 0

    def begin(self, device: torch.device | None) -> None:
        """Begin a step, unless one is under way: plan by what was recorded, record if need be.

        Without a device it is a forward that begins, which is of a step of its own if a backward is
        over: what is alive then got no gradient, as an output that is in no loss, or its backward
        raised, and its memory was there before.

        Raises:
            BudgetTooSmall: if no plan of the regions is within the budget.
            BudgetExceeded: if the steps of four plans in a row took more than the budget.
        """
        self.end_record_of_call()
        step, recording = self.step, self.step.recording
        if step.open_calls and (device is not None or not step.backward_over):
            return
        step.forget_open()
        device = device or self.device
        record, at_least, plain = None, 0, None
        if recording.ended:
            if step.runs_plain:
                plain = self._plain_peak()
            elif step.begun_late:
                at_least = self.known_bytes.at_least(recording.read())
            else:
                record = step.record()
        step.stop_recording()
        before: KnownPattern | None = None
        if step.calls:
            before = self.patterns.end_step(step.pattern)
            self.done += 1
        pattern = step.pattern
        is_new = step.begin()
        if step.runs_plain and device is not None:
            self.judge.see_plain(plain, device)
        elif record is not None and device is not None:
            self.judge.take(record, before, self.done, device)
        elif not (at_least and self.judge.see_part(at_least, self.done, pattern)):
            self.known_bytes.tell(pattern)
        self.known_bytes.begin_step(self.done)
        self.judge.refuse()
        wanted = self.patterns.wanted or is_new
        step.runs_plain = False
        if wanted and device is not None and torch.is_grad_enabled():
            recording.start(device)
            step.runs_plain = self.judge.awaits_plain and recording.under_way
            if not (recording.under_way or self.patterns.known):
                self._blocked += 1
                if self._blocked == _MOST_BLOCKED:
                    warnings.warn(_BLOCKED, BudgetWarning, stacklevel=2)

    def _plain_peak(self) -> tuple[int, int] | None:
        """Give what the step that ran plain took, and what its regions keep if all is stored."""
        marks = self.step.recording.read()
        stored = self.planner.stored_bytes(self.step.pattern)
        return (peak_as_if_new(marks), stored) if marks else None

    def record_first(self, device: torch.device) -> None:
        """Record the first step, of which it is not known yet whether it has several regions."""
        if self.done == 0 and not self.step.recording.under_way:
            self.step.recording.start(device)

    def end_record_of_call(self) -> None:
        """Judge the step of one call, if it was recorded to its end; record no more of it.

        Not within a backward, where a checkpoint runs a forward again: it is part of the step.

        Warns:
            BudgetWarning: if it took more than the budget.
        """
        if not self.step.records_call or within_backward():
            return
        try:
            if self.step.recording.ended:
                self._judge_call()
        finally:
            self.step.stop_recording()

    def _judge_call(self) -> None:
        marks, call, self.step.recorded = self.step.recording.read(), self.step.recorded, None
        if call is not None:
            self.judge.see_call(call, marks)

    def _optimizer_steps(self) -> None:
        """Record no longer than that, for others who want to profile."""
        if self.step.records_call:
            self._judge_call()
        elif not self.step.open_calls:
            self.step.recording.read()

    def rest(self) -> None:
        """Record no further where a forward without gradients runs between two steps."""
        step = self.step
        if step.records_call:
            if step.recording.ended:
                self.end_record_of_call()
        elif not (step.within_forward or step.open_calls or within_backward()):
            if step.recording.ended:
                step.recording.read()
            else:
                step.stop_recording()
