"""What one real run of a plan held, in the formats of other tools, beside what is predicted.

The recorder knows sizes and moments of allocations and releases, neither addresses nor operations:
a release is taken to be of the buffer of its size that was allocated last, and addresses are made
up. A release of what was there before the run is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Curve", "blocks_of", "measured_events", "measured_memory"]

Curve = Sequence[tuple[float, int]]
"""Seconds since the start of a run, with the bytes held from then on."""

_FRAMES = [{"filename": "?", "line": 0, "name": "measured"}]


def measured_events(curve: Curve) -> Iterator[dict[str, Any]]:
    """Write it as a counter of Chrome's, in a process of its own, by the clock of the run."""
    if not curve:
        return
    name = {"name": "remat, one measured step"}
    yield {"ph": "M", "pid": 2, "name": "process_name", "args": name}
    for seconds, held in curve:
        yield {
            "ph": "C", "pid": 2, "ts": 1e6 * seconds, "name": "held, measured",
            "args": {"bytes": held},
        }  # fmt: skip


def measured_memory(
    curve: Curve, device: int, base: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Write it as the segments and the trace of a device of torch's; addresses begin at `base`."""
    trace: list[dict[str, Any]] = []
    alive: dict[int, list[int]] = defaultdict(list)
    end, before = base, 0
    for seconds, held in curve:
        change, before = held - before, held
        size = abs(change)
        shared = {"size": size, "stream": 0, "time_us": int(1e6 * seconds)}
        if change > 0:
            alive[size].append(end)
            trace.append({"action": "alloc", "addr": end, "frames": _FRAMES, **shared})
            end += size
        elif change < 0 and alive[size]:
            address = alive[size].pop()
            for action in ("free_requested", "free_completed"):
                trace.append({"action": action, "addr": address, "frames": [], **shared})
    left = sorted((address, size) for size, kept in alive.items() for address in kept)
    segment = {
        "device": device, "address": base, "total_size": max(1, end - base), "stream": 0,
        "allocated_size": sum(size for _, size in left), "blocks": [*blocks_of(left, base, end)],
    }  # fmt: skip
    return [segment], trace


def blocks_of(left: list[tuple[int, int]], here: int, end: int) -> Iterator[dict[str, Any]]:
    """List what is held at the end, by address and size, and the room between, as blocks."""
    for address, size in left:
        if address > here:
            yield {"address": here, "size": address - here, "state": "inactive"}
        yield {
            "address": address, "size": size, "requested_size": size, "state": "active_allocated"
        }  # fmt: skip
        here = address + size
    if end > here:
        yield {"address": here, "size": end - here, "state": "inactive"}
