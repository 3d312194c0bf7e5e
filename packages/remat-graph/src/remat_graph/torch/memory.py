"""How many bytes an allocator holds, from outside: the truth that plans are checked against.

On the CPU the profiler's memory events are summed: each is one allocation or release of torch's
allocator, with its size. It is torch's older profiler, one for each thread; of the newer there is
one for the process, and two threads that use it crash. On CUDA the caching allocator keeps the
maxima itself (`cuda_memory.py`).
"""

from __future__ import annotations

import atexit
import itertools
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from remat_graph.torch.cuda_memory import CudaMemory
from remat_graph.torch.errors import MeasurementError

__all__ = ["AllocationRecorder", "Mark"]

_MARK = "remat: "
_profiler: Any = torch._C._profiler
_MEMORY_ALONE = (False, True, False, False, False)  # no shapes, stacks, operations, modules
_SETTINGS = _profiler.ProfilerConfig(
    _profiler.ProfilerState.CPU, *_MEMORY_ALONE, _profiler._ExperimentalConfig(), ""
)
_giving_way = threading.local()


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
    was called, and the end. On CUDA these are blocks of the caching allocator; `requested_bytes` is
    the most that tensors asked for, `reserved_bytes` the most that the allocator held of the
    device, that of other tensors included. On the CPU the first is `peak_bytes`, the second 0.

    A recording that was told to `give_way` is ended by the next of this thread that begins: torch's
    profiler cannot be stopped within a backward pass.

    Raises:
        MeasurementError: if a profiler is already running in this thread (CPU): it has only one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self.kept_bytes = 0
        self.requested_bytes = 0
        self.reserved_bytes = 0
        self.events: list[tuple[int, int]] = []
        self.marks: list[Mark] = []
        self._thread: threading.Thread | None = None
        self._cuda: CudaMemory | None = None

    def __enter__(self) -> AllocationRecorder:
        if self.device.type == "cuda":
            self._cuda = CudaMemory(self.device)
        else:
            self.end_other()
            if torch._C._autograd._profiler_enabled():
                raise MeasurementError(
                    "a profiler is already running, and a thread has only one: memory cannot be "
                    "measured inside a profiled or measured block; make the plan before it, by "
                    "passing example inputs, or plan with costs='estimate'"
                )
            torch._C._autograd._enable_profiler_legacy(_SETTINGS)
            self._thread = threading.current_thread()
        return self

    def mark(self, label: str) -> None:
        """Note what is held now, and the most since the last mark; read it after the block."""
        if self._cuda is not None:
            self._note(label, *self._cuda.mark())
        elif self._thread is not None:
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
        if self._cuda is not None:
            self.mark("")
            self.kept_bytes = self.marks[-1].held_bytes
            self.requested_bytes = self._cuda.requested_bytes
            self.reserved_bytes = self._cuda.reserved_bytes
            self._cuda = None
            return
        if self._thread is not threading.current_thread():
            return  # it ended before, or is of another thread, which ends it when it records next
        self._thread = _giving_way.recorder = None
        self._read_events(torch._C._autograd._disable_profiler_legacy())

    @staticmethod
    def end_other() -> AllocationRecorder | None:
        """End the recording of this thread that was told to give way, and return it, if any."""
        other: AllocationRecorder | None = getattr(_giving_way, "recorder", None)
        if other is not None:
            other.__exit__(None, None, None)
        return other

    def give_way(self) -> None:
        """Let this recording be ended by whoever records next, or with the process."""
        if self.device.type != "cuda":
            _giving_way.recorder = self
            atexit.unregister(AllocationRecorder.end_other)
            atexit.register(AllocationRecorder.end_other)  # torch's profiler crashes there else

    def _read_events(self, recorded: list[list[Any]]) -> None:
        held = peak = 0
        for event in sorted(itertools.chain(*recorded), key=lambda event: event.start_us()):
            if event.kind() == "memory_alloc":
                if event.cpu_memory_usage():
                    held += event.cpu_memory_usage()
                    peak = max(peak, held)
                    self.events.append((event.start_us() * 1000, event.cpu_memory_usage()))
            elif event.kind() == "push" and event.name().startswith(_MARK):
                self._note(event.name().removeprefix(_MARK), held, peak)
                peak = held
        self._note("", held, peak)
        self.kept_bytes = held
        self.requested_bytes = self.peak_bytes
