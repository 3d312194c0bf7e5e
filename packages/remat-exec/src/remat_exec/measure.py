"""Measure peaks and step times.

What counts is what a step allocates on the device beyond what was there before it. On the CPU that
is the sum of torch's allocations and releases, on CUDA the most that blocks of the caching
allocator held.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from remat_graph.torch import AllocationRecorder, collector_at_rest

__all__ = [
    "Peak",
    "StepProfile",
    "measure_peak",
    "profile_step",
]


@dataclass
class Peak:
    """What a block of `measure_peak` held, in bytes; filled in when the block ends.

    `peak_bytes` is the most that was held at once, `kept_bytes` what is held at the end, both
    beyond what was there before. On CUDA `peak_bytes` counts blocks, which may be larger than what
    tensors asked for; `requested_bytes` counts the latter (the same on the CPU). `reserved_bytes`
    is the most that CUDA's caching allocator held of the device, with what was there before; 0 on
    the CPU. `curve` has pairs of seconds since the start and bytes held, on the CPU only.
    """

    peak_bytes: int = 0
    kept_bytes: int = 0
    requested_bytes: int = 0
    reserved_bytes: int = 0
    curve: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The median time of a step in seconds, and its peak."""

    seconds: float
    peak: Peak


@contextmanager
def measure_peak(
    device: torch.device | str | None = None, *, collect: bool = True
) -> Iterator[Peak]:
    """Measure the most memory held at once in a `with` block, beyond what was held before it.

    Without `device`, the device is CUDA's current one if the block allocates anything there, else
    the CPU. Gradients that exist already were held before; set them to `None` first to count them.
    What `remat` takes to make a plan within the block is not counted. On CUDA torch's own maxima
    (`torch.cuda.max_memory_allocated`) start anew.

    Older cycles of objects must not be freed within the block: with `collect`, Python collects them
    before it; without, Python collects no cycles in it, which is quicker for a single step.

    Blocks may lie within one another, and `remat` records first steps within them as elsewhere.

    Raises:
        MeasurementError: if the CPU is measured and another profiler runs in this thread; if the
            block begins within a backward, and another block is measured or `remat` records the
            step.
    """
    peak = Peak()
    if collect:
        gc.collect()
    shared = torch._C._current_graph_task_id() == -1  # a backward's could not be stopped
    with ExitStack() as stack:
        if not collect:
            stack.enter_context(collector_at_rest())
        recorders = [
            stack.enter_context(AllocationRecorder(each, shared=shared))
            for each in _devices(device)
        ]
        yield peak
    recorder = next((each for each in recorders if each.peak_bytes), recorders[-1])
    peak.peak_bytes = recorder.peak_bytes
    peak.kept_bytes = recorder.kept_bytes
    peak.requested_bytes = recorder.requested_bytes
    peak.reserved_bytes = recorder.reserved_bytes
    curve = []
    held = 0
    start = recorder.events[0][0] if recorder.events else 0
    for moment, change in recorder.events:
        held += change
        curve.append(((moment - start) / 1e9, held))
    peak.curve = tuple(curve)


def profile_step(
    step: Callable[[], object], *, device: torch.device | str | None = None, repeats: int = 3
) -> StepProfile:
    """Run `step` once to warm up, `repeats` times for its median time, and once for its peak.

    `device` means what it means for `measure_peak`.
    """
    where = _devices(device)
    step()
    times = []
    for _ in range(repeats):
        _synchronize(where)
        start = time.perf_counter()
        step()
        _synchronize(where)
        times.append(time.perf_counter() - start)
    with measure_peak(device) as peak:
        step()
    return StepProfile(sorted(times)[len(times) // 2], peak)


def _devices(device: torch.device | str | None) -> list[torch.device]:
    """Give the devices to look at, the CPU last."""
    if device is not None:
        return [torch.device(device)]
    return [torch.device(kind) for kind in ("cuda",) * torch.cuda.is_available() + ("cpu",)]


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
