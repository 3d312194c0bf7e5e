"""What torch's allocator on the CPU holds, for several who ask at once.

Each memory event of torch's profiler is one allocation or release, with its size; their sum is what
is held. It is torch's older profiler, one for each thread; of the newer there is one for the
process, and two threads that use it crash. Where several recordings share it, it is stopped and
started anew each time that one of them begins or ends, and all get what it saw. While a plan
is made, all pause.

torch starts no profiler beside another. Recordings that nobody asked for give way: torch's
functions that start one end them first. What the older profiler sees of operators and ranges is
switched off: a range that is open when it ends, and another begins, would be closed in the latter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import profiler_legacy

from remat_graph.torch.cost.cpp_log import Hush
from remat_graph.torch.errors import MeasurementError

__all__ = ["CpuMemory"]

_MARK = "remat: "
_profiler: Any = torch._C._profiler
_autograd: Any = torch._C._autograd
_enable, _disable = _autograd._enable_profiler_legacy, _autograd._disable_profiler_legacy
_MEMORY_ALONE = (False, True, False, False, False)  # no shapes, stacks, operations, modules
_SETTINGS = _profiler.ProfilerConfig(
    _profiler.ProfilerState.CPU, *_MEMORY_ALONE, _profiler._ExperimentalConfig(), ""
)


class _Profiler:
    """The profiler of a thread, while it runs for recordings.

    It ends with its thread, which lets go of this: torch would end it later, and write to stderr
    that it does not find it any more.
    """

    def __init__(self) -> None:
        self.runs = False
        self._hush = Hush()

    def start(self) -> None:
        _enable(_SETTINGS)
        self._hush.begin()
        _autograd._enable_record_function(False)
        self.runs = True

    def stop(self) -> Any:
        self.runs = False
        recorded = _disable()
        self._hush.end()
        _autograd._enable_record_function(True)
        return recorded

    def __del__(self) -> None:
        if self.runs:
            self.stop()


class _Thread(threading.local):
    """The recordings of a thread that have not ended, and its profiler."""

    def __init__(self) -> None:
        self.running: list[CpuMemory] = []
        self.profiler = _Profiler()


_thread = _Thread()


class CpuMemory:
    """Records this thread's allocator from now on; sizes in bytes, beyond what was held.

    `marks` are label, what was held then, and the most since the mark before it; `events` are
    (nanosecond, change in bytes) in order. All are known once it has ended.

    One that `gives_way` ends where someone else starts a profiler in this thread.

    Raises:
        MeasurementError: if a profiler is running that is not shared; within a backward pass, where
            torch's profiler cannot be stopped, if this or another recording is shared.
    """

    def __init__(self, *, shared: bool = False, gives_way: bool = False) -> None:
        _watch_starts()
        self.marks: list[tuple[str, int, int]] = []
        self._seen: list[tuple[list[Any], list[int]]] = []  # events, and the bytes of each
        self.held_bytes = 0
        self.is_running = False
        self.gives_way = gives_way
        self._is_shared = shared
        self._peak = 0
        self._tag = f"{_MARK}{id(self)} "
        self._owner = threading.current_thread()
        others = [other for other in _thread.running if other.is_running]
        if self.is_blocked() or not all(other._is_shared for other in others):
            raise MeasurementError(
                "a profiler is already running, and a thread has only one: memory cannot be "
                "measured inside a profiled or measured block; measure before it, or plan with "
                "costs='estimate'"
            )
        if (shared or _thread.profiler.runs) and torch._C._current_graph_task_id() != -1:
            raise MeasurementError("the memory of a step cannot be recorded from its backward on")
        self.is_running = True
        _go_on_with([*others, self])

    @staticmethod
    def is_blocked() -> bool:
        """Whether another's profiler runs in this thread."""
        return _autograd._profiler_enabled() and not _thread.profiler.runs

    def mark(self, label: str) -> None:
        """Note a moment."""
        if self.is_running and self._owner is threading.current_thread():
            _autograd._enable_record_function(True)
            with _profiler._RecordFunctionFast(self._tag + label):
                pass
            _autograd._enable_record_function(False)

    def stop(self) -> None:
        """End, unless it has ended; in another thread, when that one begins or ends another."""
        if self.is_running and self._owner is threading.current_thread():
            _end([self])
        self.is_running = False

    @staticmethod
    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        """Let those of this thread see nothing of a block, so that others can record there.

        Within a backward pass they go on: torch's profiler cannot be stopped there.
        """
        if torch._C._current_graph_task_id() != -1:
            yield
            return
        before = _thread.running
        _go_on_with([])
        try:
            yield
        finally:
            _go_on_with([*_thread.running, *before])

    def _note(self, label: str) -> None:
        self.marks.append((label, self.held_bytes, self._peak))
        self._peak = self.held_bytes

    @property
    def events(self) -> list[tuple[int, int]]:
        """What was allocated and given back, and when."""
        return [
            (event.start_us() * 1000, change)
            for events, changes in self._seen
            for event, change in zip(events, changes, strict=True)
            if change
        ]

    def _see(self, events: list[Any], changes: list[int]) -> None:
        """Add up what the profiler saw, to each mark of this recording and to the end."""
        self._seen.append((events, changes))
        held = list(itertools.accumulate(changes, initial=self.held_bytes))  # before each event
        start = 0
        for at in [at for at, change in enumerate(changes) if not change]:
            event = events[at]
            if event.kind() == "push" and event.name().startswith(self._tag):
                self.held_bytes, self._peak = held[at], max([self._peak, *held[start : at + 1]])
                self._note(event.name().removeprefix(self._tag))
                start = at
        self.held_bytes, self._peak = held[-1], max([self._peak, *held[start:]])


def _go_on_with(recordings: list[CpuMemory]) -> None:
    """Tell those of this thread what the profiler saw, and go on with these."""
    before, _thread.running = _thread.running, []
    if _thread.profiler.runs:
        events = _in_order(_thread.profiler.stop())
        changes = [event.cpu_memory_usage() for event in events]
        for recording in before:
            recording._see(events, changes)
    recordings = [recording for recording in recordings if recording.is_running]
    if recordings:
        _thread.profiler.start()
        _thread.running = recordings


def _in_order(recorded: list[list[Any]]) -> list[Any]:
    """Put what the profiler saw in the order of time: it has a list for each thread."""
    lists = [events for events in recorded if events]
    if len(lists) < 2:
        return lists[0] if lists else []
    return sorted(itertools.chain(*lists), key=lambda event: event.start_us())


def _end(recordings: list[CpuMemory]) -> None:
    """End these of this thread, also those that another thread has stopped."""
    if recordings:
        _go_on_with([other for other in _thread.running if other not in recordings])
    for recording in recordings:
        if recording.is_running:
            recording._note("")
            recording.is_running = False


@functools.cache
def _watch_starts() -> None:
    """Have those who start a profiler end what gives way, by whichever name they call torch's."""
    for module in (_autograd, torch.autograd, torch.autograd.profiler, profiler_legacy):
        for name in ("_enable_profiler", "_enable_profiler_legacy"):
            if hasattr(module, name):
                setattr(module, name, _giving_way(getattr(module, name)))


def _giving_way(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def start_after(*args: Any, **kwargs: Any) -> None:
        if all(each.gives_way for each in _thread.running if each.is_running):
            if _thread.profiler.runs and torch._C._current_graph_task_id() != -1:
                _end_with_backward(_StoppedWithin())
            _end(_thread.running)
        start(*args, **kwargs)

    return start_after


class _StoppedWithin:
    """Stops a profiler for good that was stopped within a backward.

    There torch stops it for the node alone that runs, and what it had set is set again after it. At
    the end of the backward autograd lets go of its callbacks, and of this.
    """

    def __call__(self) -> None:
        """Do nothing yet: the backward is not over."""

    def __del__(self) -> None:
        """Stop it, unless another backward is around this one."""
        if torch._C._current_graph_task_id() != -1:
            _end_with_backward(_StoppedWithin())
        elif _autograd._profiler_enabled():
            _disable()
            _autograd._enable_record_function(True)
            _autograd._clear_callbacks()  # torch forgot its own when it was stopped first


def _end_with_backward(end: _StoppedWithin) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(end)


@atexit.register
def _end_all() -> None:
    """End what records: torch's profiler crashes at the exit else."""
    with contextlib.suppress(RuntimeError):  # of one that another profiler broke
        _end(_thread.running)
