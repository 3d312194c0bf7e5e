"""A recorded step of several regions, and the moments at which it must be within the budget."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.session.optimizers import tell_of_optimizers
from remat_graph.torch import AllocationRecorder, Mark, MeasurementError
from remat_solvers.step import RegionOption, TimeStep

__all__ = [
    "Recorded",
    "RecordedCall",
    "StepRecording",
    "gradients_present",
    "is_part",
    "peak_as_if_new",
]

_FULL_AT_FIRST, _FULL_EACH = 8, 256  # records before which all garbage is collected
_YOUNG = 1  # generations of what is collected before the others


@dataclass(slots=True)
class RecordedCall:
    """A call of a region in a recorded step, and the option that it ran by.

    The gradients that came in before its backward have `incoming_bytes`.
    `lean` is the one by which it went on if it gave memory back before its backward. `present` are
    the sizes of gradients that were there before, by parameter: in a step without them they are
    new, so plans are made as if they were. `released_outputs` are the sizes of inputs that it did
    not hold between its halves, by value; all that are no parameters take `given_bytes`. The kind
    is `held` as long as the record is.

    The others are seen when its backward begins. Outputs that this does not read have
    `let_go_bytes`, of which `gone_bytes` nobody holds. Of those that it reads the code holds
    `held_outputs`, by value; `held_on` are the bytes that it holds of all outputs of the call, and
    of calls whose backward is over.
    """

    kind: int
    incoming_bytes: int
    option: RegionOption
    lean: RegionOption
    present: dict[int, int]
    released_outputs: dict[str, int]
    given_bytes: int
    held: object = None
    let_go_bytes: int = 0
    gone_bytes: int = 0
    held_outputs: dict[str, int] = field(default_factory=dict)
    held_on: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One step: the numbers of the kinds of its calls, in order, and what a plan is made of.

    `moments` are those at which a step like it must be within the budget, with calls by position;
    `peak_bytes` is the most that was held, `left_bytes` what was at the end, as if all gradients
    were new. `released_outputs` are, for each call, the sizes of inputs that it did not hold
    between its halves: by value, what the code between the regions could let go of. A record is
    `provisional` if later steps may take less, since regions were planned, so that what code makes
    when it first runs counts, or tensors were copied that may not change. `certain` are moments
    that hold for any schedules of the calls, of which a bound is made. `was_read` says that an
    output that its call does not make was read before the backward was over. The kinds are `held`,
    so that their numbers stay known. `held_on` and `held_outputs` are those of each call.
    """

    pattern: tuple[int, ...]
    moments: tuple[TimeStep, ...]
    peak_bytes: int
    left_bytes: int
    released_outputs: tuple[dict[str, int], ...]
    provisional: bool
    certain: tuple[TimeStep, ...] = ()
    was_read: bool = False
    held: tuple[object, ...] = field(default=(), repr=False)
    held_on: tuple[tuple[int, int], ...] = ()
    held_outputs: tuple[dict[str, int], ...] = ()

    @classmethod
    def of(
        cls,
        calls: Sequence[RecordedCall],
        marks: Sequence[Mark],
        was_read: bool = False,
        *,
        provisional: bool,
    ) -> Recorded:
        """Read a record.

        The marks are "start", then "forward i", "kept i", "backward i" and "given i" at the start
        and end of each half of call i, "lean i" where it gave memory back, and "end".
        """
        present = {key: size for call in calls for key, size in call.present.items()}
        return cls(
            tuple(call.kind for call in calls),
            tuple(_moments_of(calls, marks)),
            max(mark.peak_bytes for mark in marks),
            marks[-1].held_bytes + sum(present.values()),
            tuple(call.released_outputs for call in calls),
            provisional,
            tuple(_moments_of(calls, marks, certain=True)),
            was_read,
            tuple(call.held for call in calls),
            tuple(call.held_on for call in calls),
            tuple(call.held_outputs for call in calls),
        )

    def held_anew(self, call: int, inputs: frozenset[str]) -> int:
        """Sum the bytes of those of a call's inputs that it did not hold."""
        return sum(size for value, size in self.released_outputs[call].items() if value in inputs)

    def held_by_others(self, call: int, let_go: frozenset[str]) -> int:
        """Sum the bytes of outputs that the code holds, if the backward of a call reads them not.

        They are those that it read in the record, where they counted as its own.
        """
        held = self.held_outputs[call] if self.held_outputs else {}
        return sum(size for value, size in held.items() if value in let_go)

    def moments_with(self, held: Sequence[tuple[int, int]]) -> tuple[TimeStep, ...]:
        """Give the moments if each call holds so much more of its inputs between its halves.

        And if, in its backward, others hold so much more of its outputs.
        """
        moments = []
        for moment in self.moments:
            more = sum(held[call][0] for call in _holding(moment))
            if moment.running is not None and moment.running[1] == "backward":
                more += held[moment.running[0]][1]
            moments.append(replace(moment, fixed_bytes=moment.fixed_bytes + more))
        return tuple(moments)


class StepRecording:
    """Records the step under way, from its start to the end of its last backward.

    It goes on until it is read or stopped: torch's profiler cannot be stopped within a backward.
    `optimizer_steps` is called where an optimizer begins a step after that, for it to be read then.
    Where someone else starts a profiler it gives way: a step that has not ended is not recorded.
    """

    def __init__(self, optimizer_steps: Callable[[], None]) -> None:
        self._optimizer_steps = weakref.WeakMethod(optimizer_steps)
        self._recorder: AllocationRecorder | None = None
        self._marks: tuple[Mark, ...] = ()
        self._awaited = self._ended = False
        self._count = 0
        self._grown_old: int | None = None  # times, until the plans that await a record
        self._present: dict[int, Any] = {}

    @property
    def ended(self) -> bool:
        """Whether the step has ended, so far, and was recorded to its end."""
        return bool(self._marks) or self._ended

    @property
    def under_way(self) -> bool:
        """Whether the step is recorded."""
        return self._recorder is not None

    @property
    def is_running(self) -> bool:
        """Whether it goes on: another profiler may have ended it."""
        return self._recorder is not None and self._recorder.is_running

    def is_on(self, device: torch.device) -> bool:
        """Whether it is that device's memory that is recorded."""
        return self._recorder is not None and self._recorder.device.type == device.type

    def start(self, device: torch.device, *, collect: bool = True, solved: bool = True) -> None:
        """Begin, unless someone else's profiler is running.

        What was `solved` for it left garbage of any age to collect.
        """
        if AllocationRecorder.is_blocked(device):
            return
        if collect:
            self._collect_garbage(solved=solved)
        recorder = AllocationRecorder(device, shared=True, gives_way=True)
        self.thread = threading.get_ident()
        with contextlib.suppress(MeasurementError):
            recorder.__enter__()
            self._recorder = recorder
            tell_of_optimizers(self)
            self.mark("start")

    def start_again(self) -> None:
        """Record the step under way from here on."""
        if self._recorder is not None:
            device = self._recorder.device
            self.stop()
            self.start(device, collect=False)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing of a plan that is made, and see whether what it leaves grows old.

        Nothing may have from the first of several plans on, as of regions, to the record.
        """
        if self._grown_old is None:
            self._grown_old = _times_grown_old()
        with AllocationRecorder.paused():
            yield

    def _collect_garbage(self, *, solved: bool) -> None:
        """Let go of what was there before, lest that is done in the step.

        Most of it is young: all of it if nothing grew old while plans were made. To look through
        all that is old takes a quarter of a second, which a step that is recorded each time, as
        where the data decide sizes, takes now and then alone.
        """
        is_full = solved and _times_grown_old() != self._grown_old
        is_full &= self._count < _FULL_AT_FIRST or self._count % _FULL_EACH == 0
        self._count += solved
        self._grown_old = None if solved else self._grown_old
        gc.collect() if is_full else gc.collect(_YOUNG)

    def mark(self, label: str) -> None:
        """Note a moment of the step, if it is recorded."""
        if self._recorder is not None:
            self._recorder.mark(label)

    def mark_present(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note where gradients are given out that add up with what was there, and their bytes."""
        for tensor in tensors:
            present = _gradient(tensor)
            if present is not None and id(tensor) not in self._present:
                label = f"present {present.untyped_storage().nbytes()}"
                self._present[id(tensor)] = tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, label=label: self.mark(label)
                )

    def await_end(self) -> None:
        """Take the end of the backward that is under way for the step's, unless one follows."""
        if self._recorder is not None and not self._awaited:
            self._awaited, self._ended = True, False
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _backward_ended(self) -> None:
        self._awaited = False
        if self.is_running:
            self.mark("end")
            self._ended = True

    def read(self) -> tuple[Mark, ...]:
        """Give the marks of a step that has ended, to the end of its last backward; go no further.

        None are given of one that has not.
        """
        recorder = self._recorder
        if recorder is not None and self.ended:
            self._recorder, self._ended = None, False
            recorder.__exit__(None, None, None)
            marks = tuple(recorder.marks)
            last = max((at for at, mark in enumerate(marks) if mark.label == "end"), default=-1)
            self._marks = marks[: 1 + last]
        return self._marks

    def before_optimizer(self, _: torch.optim.Optimizer) -> None:
        """See that an optimizer begins a step; in another thread it cannot end the recorded one."""
        method = self._optimizer_steps()
        if method is not None and self.thread == threading.get_ident() and self.ended:
            method()

    def stop(self) -> None:
        """Drop what was recorded."""
        self._awaited = self._ended = False
        self._marks = ()
        for hook in self._present.values():
            hook.remove()
        self._present.clear()
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.drop()

    def __del__(self) -> None:
        """Leave no profiler running."""
        self.stop()


def _times_grown_old() -> int:
    return int(gc.get_stats()[_YOUNG]["collections"])


def gradients_present(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Give the bytes of the gradients that are there already, and will be added to."""
    gradients = ((id(tensor), _gradient(tensor)) for tensor in tensors)
    return {key: each.untyped_storage().nbytes() for key, each in gradients if each is not None}


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Give the gradient of a leaf; a frozen one may have one of before, which stays as it is."""
    return tensor.grad if tensor.is_leaf and tensor.requires_grad else None


def peak_as_if_new(marks: Sequence[Mark]) -> int:
    """Give the most that was held in a step whose `mark_present` marks are given out, if all new.

    A gradient that was there before counts from where it is given out on.
    """
    most = present = 0
    for mark in marks:
        most = max(most, mark.peak_bytes + present)
        if mark.label.startswith("present"):
            present += int(mark.label.split()[1])
    return most


def is_part(pattern: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether calls come in the order of others, with some of those left out."""
    rest = iter(whole)
    return all(number in rest for number in pattern)


def _holding(moment: TimeStep) -> Iterator[int]:
    """List the calls that hold inputs at a moment: one whose backward runs still does."""
    yield from (call for call, _ in moment.live)
    if moment.running is not None and moment.running[1] == "backward":
        yield moment.running[0]


def _moments_of(
    calls: Sequence[RecordedCall], marks: Sequence[Mark], *, certain: bool = False
) -> Iterator[TimeStep]:
    """Read the moments at which a step must be within the budget off its record.

    Regions of a moment are numbered by call. What others hold is what was held less what the calls
    kept by the options that they ran by; outputs that a backward does not read it does not keep, so
    that one which is still there is held by others. Where a half took more than its option says,
    that much is counted as held by others.

    A bound is on what others hold whatever the options: `certain` moments leave out such excess,
    gradients that were there before, and inputs and outputs, which other options may or may not
    hold. Outputs that the code let go of before a backward are counted as kept until then: where
    others seem to hold less than nothing, so that a moment says too much, it is left out.
    """
    live: dict[int, RegionOption] = {}
    present: dict[int, int] = {}

    def moments(held: int, more: int = 0, running: Any = None) -> Iterator[TimeStep]:
        fixed = held - sum(option.kept_bytes for option in live.values())
        if certain:
            holding = {*live, running[0]} if running else live
            fixed -= sum(calls[call].given_bytes for call in holding)
        else:
            fixed = max(0, fixed + more + sum(present.values()))
        if fixed >= 0:
            yield TimeStep(fixed, tuple((call, 1) for call in sorted(live)), running)

    for before, after in itertools.pairwise(marks):
        kind, _, at = before.label.partition(" ")
        call = int(at or 0)
        if kind == "forward":
            option = calls[call].option
            more = max(0, after.peak_bytes - before.held_bytes - option.forward_bytes)
            yield from moments(before.held_bytes, more, (call, "forward"))
            live[call] = option
        elif kind == "backward" and call in live:
            option, of = live.pop(call), calls[call]
            gone = of.gone_bytes if certain else of.let_go_bytes
            held = before.held_bytes - (option.kept_bytes - gone) - of.incoming_bytes
            more = max(0, after.peak_bytes - held - option.backward_bytes)
            yield from moments(held, more, (call, "backward"))
        else:
            if kind == "given":
                present.update(calls[call].present)
            elif kind == "lean" and call in live:
                live[call] = calls[call].lean
            yield from moments(after.peak_bytes)
