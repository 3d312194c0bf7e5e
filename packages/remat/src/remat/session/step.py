"""The step under way: where it stands, its calls, and what is recorded of it.

    OPEN ──forward──► FORWARD ──return──► RETURNED      OPEN: no forward is known to be under way
     │                   │ ▲                 │ │
     │                   │ └─────forward─────┘ │
     └────backward────┐  │backward             │backward
                      ▼  ▼                     ▼
                AGAIN ◄──forward── BACKWARD ◄──┘
                      ──return──►

`begin` leads from all that is no forward back to OPEN. A forward is AGAIN where a backward has
begun: it differentiates within itself, or another's turn comes. Where `torch.compile` runs regions,
no forward is seen, and calls come while the step is OPEN or in BACKWARD.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch

from remat.session.calls import Call
from remat.session.kinds import RegionPlan
from remat.session.recording import Recorded, RecordedCall, StepRecording
from remat_graph.torch import Mark, flatten
from remat_solvers.step import RegionOption

__all__ = ["Event", "Phase", "StepState", "within_backward"]


class Phase(Enum):
    """Where a step stands."""

    OPEN = auto()
    FORWARD = auto()
    RETURNED = auto()
    BACKWARD = auto()
    AGAIN = auto()


class Event(Enum):
    """What moves a step on."""

    BEGIN = auto()
    FORWARD = auto()
    RETURN = auto()
    BACKWARD = auto()


_NEXT = {
    (Phase.OPEN, Event.BEGIN): Phase.OPEN,
    (Phase.RETURNED, Event.BEGIN): Phase.OPEN,
    (Phase.BACKWARD, Event.BEGIN): Phase.OPEN,
    (Phase.OPEN, Event.FORWARD): Phase.FORWARD,
    (Phase.RETURNED, Event.FORWARD): Phase.FORWARD,
    (Phase.BACKWARD, Event.FORWARD): Phase.AGAIN,
    (Phase.FORWARD, Event.RETURN): Phase.RETURNED,
    (Phase.AGAIN, Event.RETURN): Phase.BACKWARD,
    (Phase.OPEN, Event.BACKWARD): Phase.BACKWARD,
    (Phase.FORWARD, Event.BACKWARD): Phase.AGAIN,
    (Phase.RETURNED, Event.BACKWARD): Phase.BACKWARD,
    (Phase.BACKWARD, Event.BACKWARD): Phase.BACKWARD,
    (Phase.AGAIN, Event.BACKWARD): Phase.AGAIN,
}


class StepState:
    """The calls of a step, those of them that are `live` between their halves, and its record.

    `optimizer_steps` is called where an optimizer begins a step after the record's end. The record
    is of the whole step; or it `begun_late`, with a region that earlier steps did not call; or it
    is that of the one call of a region that has the budget for itself, which is `recorded` from its
    backward on. A step that `runs_plain` is recorded for what plain autograd takes.
    """

    def __init__(self, optimizer_steps: Callable[[], None]) -> None:
        self.phase = Phase.OPEN
        self.calls: list[tuple[RegionPlan, RegionOption]] = []
        self.noted: list[RecordedCall] = []
        self.live: weakref.WeakSet[Call] = weakref.WeakSet()
        self.recording = StepRecording(optimizer_steps)
        self.is_provisional = self._next_is_provisional = False
        self.is_new = self._next_is_new = False
        self.begun_late = self.runs_plain = False
        self.recorded: Call | None = None
        self._recorded: weakref.ref[Call] | None = None
        self._awaited: list[weakref.ref[Call]] = []

    def move(self, event: Event) -> None:
        """Move on to the next phase."""
        self.phase = _NEXT[self.phase, event]

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

    def begin(self) -> bool:
        """Begin a step; say whether a region was found that it begins with."""
        self.move(Event.BEGIN)
        is_new, self._next_is_new = self._next_is_new, False
        self.is_provisional, self._next_is_provisional = self._next_is_provisional, False
        self.forget_calls()
        return is_new

    def forget_calls(self) -> None:
        """Begin the list of the calls of a step."""
        self.calls, self.noted, self._awaited = [], [], []
        self.is_new = False

    def forget_open(self) -> None:
        """Count the live calls that share a budget no more: what they hold was there before."""
        for call in self.open_calls:
            self.live.discard(call)

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

    def await_backward(self, returned: Any) -> None:
        """See the backward also if no region has a part in it."""
        before_backward(returned, self.backward_begins)

    def backward_begins(self) -> None:
        """End the step with the backward that is under way, unless another one follows."""
        self.move(Event.BACKWARD)
        if self._recorded is None:
            self.recording.await_end()

    def record_call(self, call: Call, device: torch.device) -> None:
        """Record the step of one call from here on."""
        self.stop_recording()
        self.recording.start(device)
        self._recorded = weakref.ref(call, self._dropped)

    @property
    def records_call(self) -> bool:
        """Whether the record is that of one call."""
        return self._recorded is not None

    def recorded_backward_begins(self, call: Call) -> None:
        """Note that the backward of the one call that is recorded begins, if it is this one."""
        self.move(Event.BACKWARD)
        if self._recorded is not None and self._recorded() is call:
            self.recorded = call
            self.recording.mark("backward 0")
            self.recording.await_end()

    def record(self) -> Recorded | None:
        """Read the record of the whole step."""
        marks: Sequence[Mark] = self.recording.read() if self.noted else ()
        if not marks:
            return None
        return Recorded.of(self.noted, marks, provisional=self.is_provisional)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _dropped(self, _: object) -> None:
        """Record no further where what the forward returned is gone, and no backward can follow."""
        if self.records_call:
            is_over = self.recorded is None
        else:
            is_over = self.phase is Phase.RETURNED and not self.open_calls
        if is_over and not within_backward():
            self.stop_recording()

    def stop_recording(self) -> None:
        """Drop what is recorded of a step, which came to no end, or is judged."""
        self.begun_late = False
        self.recorded = self._recorded = None
        self.recording.stop()

    def stop_recording_steps(self) -> None:
        """Drop what is recorded, unless it is one call: that may still end, or has."""
        if not self.records_call:
            self.stop_recording()


def before_backward(tensors: Any, call: Callable[[], None]) -> None:
    """Call what is to be called where a backward comes to one of these tensors."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begins(_: Any) -> None:
        call()

    for tensor in flatten(tensors)[0]:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(begins)


def within_backward() -> bool:
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1
