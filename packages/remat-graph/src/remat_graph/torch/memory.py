"""How many bytes an allocator holds, from outside: the truth that plans are checked against.

On the CPU the profiler's memory events are summed: each is one allocation or release of torch's
allocator, with its size. On CUDA the caching allocator keeps the maximum itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

__all__ = ["AllocationRecorder"]


class AllocationRecorder:
    """Records what is allocated on one device within a `with` block.

    `peak_bytes` is the most that was held at once beyond what was held at the start; `events` are
    (nanosecond, change in bytes) in order, on the CPU only.

    Raises:
        RuntimeError: if a profiler is already running (CPU): torch has only one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self.kept_bytes = 0
        self.reserved_bytes = 0
        self.events: list[tuple[int, int]] = []
        self._profiler: Any = None
        self._before = 0

    def __enter__(self) -> AllocationRecorder:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
            self.kept_bytes = torch.cuda.memory_allocated(self.device) - self._before
            self.reserved_bytes = torch.cuda.memory_reserved(self.device)
            return
        with _quiet_kineto():
            self._profiler.__exit__(kind, error, trace)
        self._read_events()

    def _read_events(self) -> None:
        held = 0
        for event in self._profiler.kineto_results.events():
            if (
                event.name() == "[memory]"
                and event.device_type() == torch._C._autograd.DeviceType.CPU
            ):
                self.events.append((event.start_ns(), event.nbytes()))
        self.events.sort(key=lambda item: item[0])
        for _, change in self.events:
            held += change
            self.peak_bytes = max(self.peak_bytes, held)
        self.kept_bytes = held
        self._profiler = None


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
