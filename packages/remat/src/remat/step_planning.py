"""One budget for a step of several regions: recorded once, then planned as one.

In its first step each region runs by the schedule that keeps the least. The step is recorded: what
is held at the start and end of each half of each region, and the most in between. From that follow
the moments at which the step must be within the budget, and one program chooses a schedule for
every region (`remat_solvers.step`). The step after it is recorded, too, and planned again if it
takes more than was predicted. Between two steps nothing is alive between its halves.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.planning import Settings, have_same_ops, refuse_other_profilers
from remat.recording import Recorded, gradients_present, is_part, moments_of, peak_of
from remat.step_plan import StepPlan
from remat_exec import Executor, Runnable, get_executor
from remat_graph import Graph
from remat_graph.torch import AllocationRecorder, Capture, Cost, LossCost, MeasurementError
from remat_solvers import BudgetTooSmall
from remat_solvers.step import (
    Moment,
    RegionFront,
    RegionOption,
    StepChoice,
    choose,
    measure_option,
    refined_options,
    region_front,
    step_bound,
)
from remat_solvers.store_all import store_all

__all__ = ["RegionPlan", "StepPlanner"]

logger = logging.getLogger(__name__)

_SECONDS, _SECONDS_PER_OP = 0.5, 0.02  # for the options of a region
_CHOICE_SECONDS = 5.0
_MOST_KNOWN = 8
_WORTH_REFINING = 0.01  # of the budget, left over
_NAMED = 1.02  # times what a step needs: a budget that is said to be enough
_TOLERANCE = 1.002  # of the budget, by which fixed parts may be off from step to step


class RegionPlan:
    """A captured region: the number of its kind, and the code of the options that were used."""

    def __init__(
        self, kind: int, capture: Capture, least: RegionOption, executor: Executor
    ) -> None:
        self.kind = kind
        self.executor = executor
        self.capture = capture
        self.least = least
        self._executables: dict[RegionOption, Runnable] = {}

    def executable(self, option: RegionOption) -> Runnable:
        """Give the code of an option."""
        made = self._executables.get(option)
        if made is None:
            leaner = None if option is self.least else self.executable(self.least)
            made = self.executor(self.capture, option.schedule, leaner=leaner)
            self._executables[option] = made
        return made


@dataclass(eq=False)
class _Kind:
    """Regions of the same operations and sizes, which have the same options."""

    name: str
    front: RegionFront

    def has(self, graph: Graph) -> bool:
        return self.front.graph.values == graph.values and have_same_ops(self.front.graph, graph)

    @property
    def everything(self) -> RegionOption:
        """What it costs to store everything."""
        return measure_option(self.front.graph, store_all(self.front.graph))


@dataclass(eq=False)
class _Call:
    """One call of a region, from its forward to the end of its backward."""

    planner: StepPlanner
    position: int
    learn: Callable[[Runnable, frozenset[int], frozenset[int]], None]
    executable: Runnable
    plan: RegionPlan
    option: RegionOption
    drop: Callable[[], None] | None = None

    @property
    def droppable_bytes(self) -> int:
        """What the call keeps beyond what it must."""
        if self.drop is None or self.executable.leaner is None:
            return 0
        return self.option.kept_bytes - self.plan.least.kept_bytes

    def go_lean(self) -> None:
        """Give back what can be made again; the backward is that of the least option then."""
        if self.drop is not None:
            self.drop()
            self.option = self.plan.least

    def started(self, missing: frozenset[int], let_go: frozenset[int]) -> None:
        self.planner.mark(f"backward {self.position}")
        self.planner.live_backward(self)
        self.planner.await_end()
        self.learn(self.executable, missing, frozenset())

    def finished(self) -> None:
        self.planner.mark(f"given {self.position}")
        self.planner.live.discard(self)


@dataclass(eq=False)
class _Known:
    """A pattern of calls that was planned for: the option of each, and what others held at most."""

    record: Recorded
    plan: StepPlan
    options: tuple[RegionOption, ...]
    held: dict[str, int]


@dataclass(eq=False)
class StepPlanner:
    """Plans the regions of a model's steps, and runs them.

    A step begins with a forward while nothing is alive between its halves, and ends when all
    backwards have; two forwards before a backward are of one step. `within_forward` is set while a
    forward runs that is known to be one; otherwise each call of a region may begin a step.
    """

    settings: Settings
    told: Callable[[Any], None]
    breaks: list[str] = field(default_factory=list)
    within_forward: bool = False
    live: weakref.WeakSet[_Call] = field(default_factory=weakref.WeakSet)
    _kinds: list[_Kind] = field(default_factory=list)
    _device: torch.device | None = None
    _known: list[_Known] = field(default_factory=list)
    _followed: _Known | None = None
    _calls: list[tuple[RegionPlan, RegionOption]] = field(default_factory=list)
    _present: list[dict[int, int]] = field(default_factory=list)
    _recorder: AllocationRecorder | None = None
    _ended: bool = False
    _to_verify: _Known | None = None
    _wanted: bool = True
    _awaited: bool = False
    _set_aside: int = 0
    _error: Exception | None = None
    _off_plan: bool = False
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
                capture = capture.costed("measure", costs)
            limit = _SECONDS + _SECONDS_PER_OP * len(capture.graph.ops)
            if self.settings.limit_seconds is not None:
                limit = min(limit, self.settings.limit_seconds)
            solver = "refine" if self.settings.solver == "auto" else self.settings.solver
            front = region_front(capture.graph, solver=solver, limit_seconds=limit)
            self._kinds.append(_Kind(name, front))
        self._device = capture.program.device
        least = self._kinds[number].front.options[0]
        return RegionPlan(number, capture, least, get_executor(self.settings.executor))

    def enter(self, device: torch.device | None) -> None:
        """Begin a step, unless one is under way: plan by what was recorded, record if need be.

        Raises:
            BudgetTooSmall: if no plan of the regions is within the budget.
        """
        if self.live:
            return
        device = device or self._device
        recorded = self._read() if self._ended else None
        self.stop_recording()
        self._calls, self._present = [], []
        self._off_plan = False
        self._followed = self._known[-1] if self._known else None
        if recorded is not None:
            self._take(recorded)
        if self._error is not None:
            raise self._error
        if self._wanted and device is not None:
            self._start(device)

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
        option = self._option_for(plan)
        self._calls.append((plan, option))
        if self._recorder is not None:
            self._present.append(gradients_present(tensors))
        executable = plan.executable(option)
        call = _Call(self, position, learn, executable, plan, option)
        if self._off_plan:
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

    def _option_for(self, plan: RegionPlan) -> RegionOption:
        """Find the option for the next call, in a pattern that is known or part of one that is."""
        so_far = tuple(p.kind for p, _ in self._calls)
        candidates = [self._followed] if self._followed is not None else []
        candidates += [known for known in reversed(self._known) if known is not self._followed]
        for known in candidates:
            at = _position(known.record.pattern, so_far, plan.kind)
            if at is not None:
                if known is not self._followed and so_far:
                    self._off_plan = True  # earlier calls ran by the options of another
                self._followed = known
                return known.options[at]
        if self._known:
            self._off_plan = True
            self._wanted = self._wanted or len(self._known) < _MOST_KNOWN
        return plan.least

    def live_regions(self) -> list[Any]:
        """Give the regions of the calls that are between their halves."""
        return list(dict.fromkeys(getattr(call.learn, "__self__", None) for call in self.live))

    def live_backward(self, call: _Call) -> None:
        """See, in a step that was not planned for, that there is room for a backward."""
        if self._off_plan:
            self._make_room(call.option.backward_bytes, "backward", call)

    def _make_room(self, needed: int, half: str, own: _Call | None = None) -> None:
        """Let earlier calls give back what they can make again, the largest first.

        What the code between regions holds is taken to be the most that it held at any time in
        this half of the steps that were recorded.
        """
        if self._room is None:
            return
        others = max(known.held[half] for known in self._known)
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
        if self._recorder is not None:
            self._recorder.mark(label)

    def await_end(self) -> None:
        """End the step with the backward that is under way, if no call is left then."""
        if self._recorder is not None and not self._awaited:
            self._awaited = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._awaited = False
        if not self.live and self._recorder is not None:
            self._recorder.mark("end")
            self._ended = True

    def _read(self) -> Recorded | None:
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)
        marks = tuple(self._recorder.marks)
        ends = [position for position, mark in enumerate(marks) if mark.label == "end"]
        if not ends:
            return None
        return Recorded(
            tuple(plan.kind for plan, _ in self._calls),
            tuple(self._kinds[plan.kind].front.graph for plan, _ in self._calls),
            tuple(option for _, option in self._calls),
            tuple(self._present),
            marks[: 1 + ends[0]],
        )

    def _start(self, device: torch.device) -> None:
        recorder = AllocationRecorder(device)
        with contextlib.suppress(MeasurementError):  # someone else's profiler is running
            recorder.__enter__()
            recorder.give_way()  # whoever else measures may end it
            self._recorder = recorder
            self.mark("start")

    def stop_recording(self) -> None:
        """Drop the recording of a step that came to no end, or in which something is measured."""
        self._awaited = self._ended = False
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.__exit__(None, None, None)

    def __del__(self) -> None:
        """Leave no profiler running."""
        self.stop_recording()

    def _take(self, record: Recorded) -> None:
        """Plan by a recorded step, or see that it took no more than was planned."""
        known, self._to_verify = self._to_verify, None
        if known is not None and is_part(record.pattern, known.record.pattern):
            self._wanted = False
            made = replace(known.plan, measured_peak_bytes=record.peak_bytes)
            if record.peak_bytes <= made.budget_bytes:
                self.told(made)
                return
            over = record.peak_bytes - made.budget_bytes
            self._set_aside += over + over // 4
            logger.warning(
                "the step took %d bytes of a budget of %d; planning again with %d set aside",
                record.peak_bytes, made.budget_bytes, self._set_aside,
            )  # fmt: skip
            record = known.record if record.pattern != known.record.pattern else record
        self._known = [k for k in self._known if not is_part(k.record.pattern, record.pattern)]
        try:
            known = self._plan(record)
        except Exception as error:
            self._error = error
            return
        self._known.append(known)
        self._followed = known
        self._to_verify, self._wanted = known, True
        self.told(known.plan)

    def _plan(self, record: Recorded) -> _Known:
        moments = list(moments_of(record))
        plans = [self._kinds[number] for number in record.pattern]
        stored = peak_of(moments, [plan.everything for plan in plans])
        device = self._device or torch.device("cpu")
        budget = self.settings.budget.resolve(device, lambda: stored)
        self._room = room = max(1, int((budget - self._set_aside) / _TOLERANCE))
        try:
            choice = self._choose(plans, moments, room)
        except BudgetTooSmall as error:
            raise BudgetTooSmall(
                budget,
                self._with_margin(error.smallest_bytes),
                error.least_bytes,
                error.least_at,
                error.status,
            ) from None
        calls = [1] * len(plans)
        bound = step_bound([plan.front for plan in plans], calls, moments, room,
                           limit_seconds=_CHOICE_SECONDS)  # fmt: skip
        options = tuple(
            plan.front.options[index] for plan, index in zip(plans, choice.indices, strict=True)
        )
        made = StepPlan(
            tuple((plan.name, option) for plan, option in zip(plans, options, strict=True)),
            tuple(dict.fromkeys(self.breaks)),
            budget,
            choice.peak_bytes + self._set_aside,
            stored,
            choice.time,
            sum(plan.front.graph.time for plan in plans),
            min(bound, choice.time),
        )
        logger.info("planned: %s", str(made).replace("\n", "; "))
        forwards = (m.fixed_bytes for m in moments if m.running and m.running[1] == "forward")
        held = {
            "forward": max(forwards, default=0),
            "backward": max(moment.fixed_bytes for moment in moments),
        }
        return _Known(record, made, options, held)

    def _with_margin(self, size: int) -> int:
        """Give a budget with room for this much, also where other steps need a little more."""
        return int(size * _NAMED) + 1 + self._set_aside

    def _choose(self, plans: list[_Kind], moments: list[Moment], room: int) -> StepChoice:
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


def _position(pattern: tuple[int, ...], so_far: tuple[int, ...], number: int) -> int | None:
    """Find where in a pattern the next call stands, after those so far, with some left out."""
    at = 0
    for earlier in (*so_far, number):
        try:
            at = pattern.index(earlier, at) + 1
        except ValueError:
            return None
    return at - 1
