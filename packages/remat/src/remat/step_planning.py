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
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.planning import Settings
from remat_exec import Executable
from remat_graph import Compute
from remat_graph.torch import AllocationRecorder, Capture, LossCost, Mark
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
from remat_solvers.step.options import made_elsewhere
from remat_solvers.store_all import store_all

__all__ = ["RegionPlan", "StepPlan", "StepPlanner"]

logger = logging.getLogger(__name__)

_SECONDS, _SECONDS_PER_OP = 0.5, 0.02  # for the options of a region
_MOST_RECORDS = 8
_WORTH_REFINING = 0.01  # of the budget, left over
_TOLERANCE = 1.002  # of the budget, by which fixed parts may be off from step to step


class RegionPlan:
    """A captured region: its options, and the code of those that were used."""

    def __init__(self, name: str, number: int, capture: Capture, front: RegionFront) -> None:
        self.name = name
        self.number = number
        self.capture = capture
        self.front = front
        self.current = front.options[0]  # what keeps the least
        self.least = self.current
        self._executables: dict[RegionOption, Executable] = {}

    def executable(self, option: RegionOption) -> Executable:
        """Give the code of an option."""
        made = self._executables.get(option)
        if made is None:
            leaner = None if option is self.least else self.executable(self.least)
            made = Executable(self.capture, option.schedule, leaner=leaner)
            self._executables[option] = made
        return made

    @property
    def everything(self) -> RegionOption:
        """What it costs to store everything."""
        graph = self.front.graph
        return measure_option(graph, store_all(graph))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What was planned for a step of several regions; sizes in bytes, times in seconds.

    `regions` are pairs of a name and the option that it runs by, in the order of their first calls.
    `breaks` say why the forward is not one region. `measured_peak_bytes` is that of the first step
    that ran by this plan, `None` before. No plan of the regions within the budget takes less time
    than `lower_bound`.
    """

    regions: tuple[tuple[str, RegionOption], ...]
    breaks: tuple[str, ...]
    budget_bytes: int
    predicted_peak_bytes: int
    store_all_peak_bytes: int
    time: float
    least_time: float
    lower_bound: float
    measured_peak_bytes: int | None = None

    @property
    def predicted_overhead(self) -> float:
        """Time of recomputation as a fraction of computing everything once."""
        return self.time / self.least_time - 1 if self.least_time else 0.0

    @property
    def bound_overhead(self) -> float:
        """The least overhead of any schedules of these regions, within the budget."""
        return max(0.0, self.lower_bound / self.least_time - 1) if self.least_time else 0.0

    @property
    def recomputations(self) -> int:
        """Number of operations run a second time or more, in one call of each region."""
        ops = [
            [step.op for step in option.schedule.steps if isinstance(step, Compute)]
            for _, option in self.regions
        ]
        return sum(len(computed) - len(set(computed)) for computed in ops)

    def __str__(self) -> str:
        """Say it readably."""
        measured = self.measured_peak_bytes
        rows = [
            ("budget", _mib(self.budget_bytes)),
            ("peak, predicted", _mib(self.predicted_peak_bytes)),
            ("peak, measured", "not measured" if measured is None else _mib(measured)),
            ("storing everything", _mib(self.store_all_peak_bytes)),
            ("overhead, predicted", f"{100 * self.predicted_overhead:.2f}%"),
            ("overhead, at least", f"{100 * self.bound_overhead:.2f}%"),
            *(
                (name, f"keeps {_mib(option.kept_bytes)}, peak {_mib(option.peak_bytes)}")
                for name, option in self.regions
            ),
            *(("break", reason) for reason in self.breaks),
        ]
        title = f"remat plan of {len(self.regions)} regions"
        return "\n".join([title, *(f"  {name:<20} {text}" for name, text in rows)])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


@dataclass(frozen=True, slots=True)
class _Record:
    """One recorded step: the options by which its calls ran, in order, and its marks.

    `present` are, for each call, the sizes of gradients that were there before, by parameter. In a
    step without them they are new, so plans are made as if they were.
    """

    calls: tuple[tuple[RegionPlan, RegionOption], ...]
    present: tuple[dict[int, int], ...]
    marks: tuple[Mark, ...]
    peak_bytes: int

    @property
    def pattern(self) -> tuple[int, ...]:
        return tuple(plan.number for plan, _ in self.calls)


@dataclass(eq=False)
class _Call:
    """One call of a region, from its forward to the end of its backward."""

    planner: StepPlanner
    position: int
    learn: Callable[[Executable, frozenset[int], frozenset[int]], None]
    executable: Executable
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
class StepPlanner:
    """Plans the regions of a model's steps, and runs them.

    A step begins with a call while nothing is alive between its halves, and ends when all backwards
    have; two forwards before a backward are of one step.
    """

    settings: Settings
    told: Callable[[Any], None]
    breaks: list[str] = field(default_factory=list)
    live: weakref.WeakSet[_Call] = field(default_factory=weakref.WeakSet)
    _plans: list[RegionPlan] = field(default_factory=list)
    _fronts: list[RegionFront] = field(default_factory=list)
    _records: dict[tuple[int, ...], _Record] = field(default_factory=dict)
    _calls: list[tuple[RegionPlan, RegionOption]] = field(default_factory=list)
    _present: list[dict[int, int]] = field(default_factory=list)
    _recorder: AllocationRecorder | None = None
    _ended: bool = False
    _to_verify: StepPlan | None = None
    _wanted: bool = True
    _awaited: bool = False
    _set_aside: int = 0
    _error: Exception | None = None
    _off_plan: bool = False
    _room: int | None = None
    _held_by_others: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, capture: Capture) -> RegionPlan:
        """Find the options of a captured region."""
        capture = capture.with_loss(LossCost(0, 0))  # what stands between the halves is measured
        front = next((f for f in self._fronts if f.graph == capture.graph), None)
        if front is None:
            limit = _SECONDS + _SECONDS_PER_OP * len(capture.graph.ops)
            if self.settings.limit_seconds is not None:
                limit = min(limit, self.settings.limit_seconds)
            solver = "refine" if self.settings.solver == "auto" else self.settings.solver
            front = region_front(capture.graph, solver=solver, limit_seconds=limit)
            self._fronts.append(front)
        plan = RegionPlan(name, len(self._plans), capture, front)
        self._plans.append(plan)
        return plan

    def enter(self, device: torch.device | None) -> None:
        """Begin a step, unless one is under way: plan by what was recorded, record if need be.

        Raises:
            BudgetTooSmall: if no plan of the regions is within the budget.
        """
        if self.live:
            return
        recorded = self._read() if self._ended else None
        self.stop_recording()
        self._calls, self._present = [], []
        self._off_plan = False
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
        learn: Callable[[Executable, frozenset[int], frozenset[int]], None],
    ) -> list[torch.Tensor]:
        """Run the forward of a region by its plan."""
        self.enter(plan.capture.program.device)
        position = len(self._calls)
        known = self._is_known((*(p.number for p, _ in self._calls), plan.number))
        option = plan.current if known else plan.least
        if not known and self._records and len(self._records) < _MOST_RECORDS:
            self._wanted = True
        self._calls.append((plan, option))
        if self._recorder is not None:
            self._present.append(_gradients(tensors))
        executable = plan.executable(option)
        call = _Call(self, position, learn, executable, plan, option)
        if not known:
            self._off_plan = True
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
        calls = sorted(self.live, key=lambda call: -call.droppable_bytes)
        held = sum(call.option.kept_bytes for call in calls if call is not own)
        room = self._room - self._held_by_others[half] - needed
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

    def _read(self) -> _Record | None:
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)
        marks = tuple(self._recorder.marks)
        ends = [position for position, mark in enumerate(marks) if mark.label == "end"]
        if not ends:
            return None
        marks = marks[: 1 + ends[0]]
        peak = max(mark.peak_bytes for mark in marks)
        return _Record(tuple(self._calls), tuple(self._present), marks, peak)

    def _start(self, device: torch.device) -> None:
        recorder = AllocationRecorder(device)
        with contextlib.suppress(RuntimeError):  # someone else's profiler is running
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

    def _is_known(self, pattern: tuple[int, ...]) -> bool:
        return any(_is_part(pattern, known) for known in self._records)

    def _take(self, record: _Record) -> None:
        """Plan by a recorded step, or see that it took no more than was planned."""
        made = self._to_verify
        if made is not None and self._is_known(record.pattern):
            self._to_verify = None
            self._wanted = False
            made = replace(made, measured_peak_bytes=record.peak_bytes)
            if record.peak_bytes <= made.budget_bytes:
                self.told(made)
                return
            over = record.peak_bytes - made.budget_bytes
            self._set_aside += over + over // 4
            logger.warning(
                "the step took %d bytes of a budget of %d; planning again with %d set aside",
                record.peak_bytes, made.budget_bytes, self._set_aside,
            )  # fmt: skip
        self._records[record.pattern] = record
        try:
            made = self._plan(record)
        except Exception as error:
            self._error = error
            return
        self.told(made)
        self._to_verify = made

    def _plan(self, latest: _Record) -> StepPlan:
        records = list(self._records.values())
        plans = list(dict.fromkeys(plan for record in records for plan, _ in record.calls))
        number = {plan: position for position, plan in enumerate(plans)}
        moments = [moment for record in records for moment in _moments(record, number)]
        counts = [Counter(plan for plan, _ in record.calls) for record in records]
        calls = [max(count[plan] for count in counts) for plan in plans]
        everything = [plan.everything for plan in plans]
        stored = _peak(moments, everything)
        device = plans[0].capture.program.device
        budget = self.settings.budget.resolve(device, lambda: stored)
        room = max(1, int((budget - self._set_aside) / _TOLERANCE))
        try:
            choice = self._choose(plans, calls, moments, room)
        except BudgetTooSmall as error:
            raise BudgetTooSmall(
                budget,
                self._with_margin(error.smallest_bytes),
                self._with_margin(error.least_bytes),
                error.least_at,
                error.status,
            ) from None
        bound = step_bound([plan.front for plan in plans], calls, moments, room)
        for plan, index in zip(plans, choice.indices, strict=True):
            plan.current = plan.front.options[index]
        once = Counter(plan for plan, _ in latest.calls)
        self._room = room
        forwards = [moment.fixed_bytes for moment in moments if _is_forward(moment)]
        self._held_by_others = {
            "forward": max(forwards, default=0),
            "backward": max(moment.fixed_bytes for moment in moments),
        }
        made = StepPlan(
            tuple((plan.name, plan.current) for plan in plans),
            tuple(dict.fromkeys(self.breaks)),
            budget,
            choice.peak_bytes + self._set_aside,
            stored,
            choice.time,
            sum(plan.front.graph.time * n for plan, n in zip(plans, calls, strict=True)),
            min(bound, choice.time),
        )
        logger.info("planned %d regions: %s", len(once), str(made).replace("\n", "; "))
        return made

    def _with_margin(self, size: int) -> int:
        """Give the budget whose room is just this much."""
        return int(size * _TOLERANCE) + 1 + self._set_aside

    def _choose(
        self, plans: list[RegionPlan], calls: list[int], moments: list[Moment], room: int
    ) -> StepChoice:
        """Choose; then solve each kind of region again for what is left over, and choose again."""
        choice = choose([plan.front.options for plan in plans], calls, moments, room)
        left = room - choice.peak_bytes
        if left < _WORTH_REFINING * room:
            return choice
        share = left // max(1, sum(calls))
        solved: dict[int, RegionFront] = {}
        for plan, index in zip(plans, choice.indices, strict=True):
            option = plan.front.options[index]
            if option.time <= plan.front.graph.time:
                continue
            found = solved.get(id(plan.front))
            if found is None:
                found = solved[id(plan.front)] = refined_options(
                    plan.front,
                    kept_bytes=option.kept_bytes + share,
                    peak_bytes=option.peak_bytes + left,
                    limit_seconds=_SECONDS,
                )
            plan.front = found
        return choose([plan.front.options for plan in plans], calls, moments, room)


def _is_part(pattern: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether calls come in the order of others, with some of those left out."""
    rest = iter(whole)
    return all(number in rest for number in pattern)


def _moments(record: _Record, number: dict[RegionPlan, int]) -> Iterator[Moment]:
    """Read the moments at which a step must be within the budget off its record."""
    live: dict[int, RegionPlan] = {}
    present: dict[int, int] = {}
    options = dict(enumerate(option for _, option in record.calls))

    def moment(held: int, running: Any = None) -> Moment:
        fixed = held - sum(options[position].kept_bytes for position in live)
        fixed += sum(present.values())
        counts = Counter(number[plan] for plan in live.values())
        return Moment(max(0, fixed), tuple(sorted(counts.items())), running)

    for before, after in zip(record.marks, record.marks[1:], strict=False):
        kind, _, at = before.label.partition(" ")
        position = int(at or 0)
        if kind == "forward":
            plan, option = record.calls[position]
            more = max(0, after.peak_bytes - before.held_bytes - option.forward_bytes)
            yield moment(before.held_bytes + more, (number[plan], "forward"))
            live[position] = plan
        elif kind == "backward" and live.pop(position, None) is not None:
            plan, option = record.calls[position]
            held = before.held_bytes - option.kept_bytes - made_elsewhere(plan.front.graph)
            more = max(0, after.peak_bytes - held - option.backward_bytes)
            yield moment(held + more, (number[plan], "backward"))
        else:
            if kind == "given":
                present.update(record.present[position])
            yield moment(after.peak_bytes)


def _gradients(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Sum up the gradients that leaves have already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            id(tensor): tensor.grad.untyped_storage().nbytes()
            for tensor in tensors
            if tensor.is_leaf and tensor.grad is not None
        }


def _is_forward(moment: Moment) -> bool:
    return moment.running is not None and moment.running[1] == "forward"


def _peak(moments: Sequence[Moment], options: Sequence[RegionOption]) -> int:
    """Give the most that is held at any moment if each region runs by this option."""
    most = 0
    for moment in moments:
        held = moment.fixed_bytes + sum(n * options[r].kept_bytes for r, n in moment.live)
        if moment.running is not None:
            region, half = moment.running
            option = options[region]
            held += option.forward_bytes if half == "forward" else option.backward_bytes
        most = max(most, held)
    return most
