"""How many bytes an allocator holds, from outside: the truth that plans are checked against.

On the CPU the profiler's memory events are summed: each is one allocation or release of torch's
allocator, with its size. On CUDA the caching allocator keeps the maximum itself.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import torch

__all__ = ["AllocationRecorder", "Mark"]

_MARK = "remat: "


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in a recording: what was held then, and the most since the mark before it."""

    label: str
    held_bytes: int
    peak_bytes: int


class AllocationRecorder:
    """Records what is allocated on one device within a `with` block.

    `peak_bytes` is the most that was held at once beyond what was held at the start; `events` are
    (nanosecond, change in bytes) in order, on the CPU only. `marks` are the moments at which `mark`
    was called, and the end.

    A recording that was told to `give_way` is ended by the next that begins: torch's profiler
    cannot be stopped within a backward pass.

    Raises:
        RuntimeError: if a profiler is already running (CPU): torch has only one.
    """

    _giving_way: ClassVar[AllocationRecorder | None] = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self.kept_bytes = 0
        self.reserved_bytes = 0
        self.events: list[tuple[int, int]] = []
        self.marks: list[Mark] = []
        self._profiler: Any = None
        self._before = 0

    def __enter__(self) -> AllocationRecorder:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self.end_other()
            if torch._C._autograd._profiler_enabled():
                raise RuntimeError(
                    "a profiler is already running, and torch has only one: memory cannot be "
                    "measured inside a profiled or measured block; make the plan before it, by "
                    "passing example inputs, or plan with costs='estimate'"
                )
            self._profiler = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
            with _quiet_kineto():
                self._profiler.__enter__()
        return self

    def mark(self, label: str) -> None:
        """Note what is held now, and the most since the last mark; read it after the block."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._note(
                label,
                torch.cuda.memory_allocated(self.device) - self._before,
                torch.cuda.max_memory_allocated(self.device) - self._before,
            )
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._profiler is not None:
            with torch.profiler.record_function(_MARK + label):
                pass

    def _note(self, label: str, held: int, peak: int) -> None:
        self.marks.append(Mark(label, held, peak))
        self.peak_bytes = max(self.peak_bytes, peak)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            self.mark("")
            self.kept_bytes = torch.cuda.memory_allocated(self.device) - self._before
            self.reserved_bytes = torch.cuda.memory_reserved(self.device)
            return
        if AllocationRecorder._giving_way is self:
            AllocationRecorder._giving_way = None
        if self._profiler is not None:
            with _quiet_kineto():
                self._profiler.__exit__(kind, error, trace)
            self._read_events()

    @staticmethod
    def end_other() -> None:
        """End the recording that was told to give way, if there is one."""
        other = AllocationRecorder._giving_way
        if other is not None:
            other.__exit__(None, None, None)

    def give_way(self) -> None:
        """Let this recording be ended by whoever records next, or with the process."""
        if self.device.type != "cuda":
            AllocationRecorder._giving_way = self
            atexit.unregister(AllocationRecorder.end_other)
            atexit.register(AllocationRecorder.end_other)  # torch's profiler crashes there else

    def _read_events(self) -> None:
        marks: list[tuple[int, str]] = []
        for event in self._profiler.kineto_results.events():
            name = event.name()
            if name == "[memory]":
                if event.device_type() == torch._C._autograd.DeviceType.CPU:
                    self.events.append((event.start_ns(), event.nbytes()))
            elif name.startswith(_MARK):
                marks.append((event.start_ns(), name.removeprefix(_MARK)))
        self._profiler = None
        self.events.sort(key=lambda item: item[0])
        marks.sort(key=lambda item: item[0])
        held = peak = 0
        position = 0
        for moment, label in (*marks, (None, "")):
            while position < len(self.events):
                when, change = self.events[position]
                if moment is not None and when >= moment:
                    break
                held += change
                peak = max(peak, held)
                position += 1
            self._note(label, held, peak)
            peak = held
        self.kept_bytes = held


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the profiler's own notes off stderr; it reads the level when it first starts."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
