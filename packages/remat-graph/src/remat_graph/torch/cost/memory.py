"""How many bytes an allocator holds, from outside: the truth that plans are checked against.

On the CPU memory events of torch's profiler are summed (`cpu_memory.py`); on CUDA the caching
allocator keeps the maxima itself (`cuda_memory.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch

from remat_graph.torch.cost import cuda_memory
from remat_graph.torch.cost.cpu_memory import CpuMemory
from remat_graph.torch.cost.cuda_memory import CudaMemory

__all__ = ["AllocationRecorder", "Mark"]


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

    While one that is `shared` records, others may; it may never be stopped. One that `gives_way` is
    ended where someone else starts a profiler in this thread. Where something is measured that no
    recording is to see, all are `paused`.

    Raises:
        MeasurementError: if a profiler is already running in this thread (CPU), which has only one:
            another's, or that of a recording that is not shared; within a backward pass, if this
            or another is shared.
    """

    def __init__(
        self, device: torch.device, *, shared: bool = False, gives_way: bool = False
    ) -> None:
        self.device = device
        self._shared = shared
        self._gives_way = gives_way
        self.peak_bytes = 0
        self.kept_bytes = 0
        self.requested_bytes = 0
        self.reserved_bytes = 0
        self._read_events: Callable[[], list[tuple[int, int]]] = list
        self.marks: list[Mark] = []
        self._cpu: CpuMemory | None = None
        self._cuda: CudaMemory | None = None

    def __enter__(self) -> AllocationRecorder:
        if self.device.type == "cuda":
            self._cuda = CudaMemory(self.device)
        else:
            self._cpu = CpuMemory(shared=self._shared, gives_way=self._gives_way)
        return self

    @property
    def events(self) -> list[tuple[int, int]]:
        """What was allocated and given back: (nanosecond, change in bytes), on the CPU only."""
        return self._read_events()

    @property
    def is_running(self) -> bool:
        """Whether it still records: on the CPU another may have ended it."""
        return self._cuda is not None or (self._cpu is not None and self._cpu.is_running)

    def mark(self, label: str) -> None:
        """Note what is held now, and the most since the last mark; read it after the block."""
        if self._cuda is not None:
            self._note(label, *self._cuda.mark())
        elif self._cpu is not None:
            self._cpu.mark(label)

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
        elif self._cpu is not None:
            self._cpu.stop()
            for label, held, peak in self._cpu.marks:
                self._note(label, held, peak)
            self.kept_bytes = self._cpu.held_bytes
            cpu = self._cpu
            self._read_events = lambda: cpu.events
            self.requested_bytes = self.peak_bytes
            self._cpu = None

    @staticmethod
    def is_blocked(device: torch.device) -> bool:
        """Whether someone else's profiler runs in this thread, beside which none can record."""
        return device.type == "cpu" and CpuMemory.is_blocked()

    def drop(self) -> None:
        """End the recording, and read nothing."""
        if self._cpu is not None:
            self._cpu.stop()
        self._cpu = self._cuda = None

    @staticmethod
    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        """Let the recordings of this thread, and those of CUDA, see nothing of a block.

        Others can record there. What the block leaves allocated counts on CUDA alone.
        """
        with CpuMemory.paused(), cuda_memory.paused():
            yield
