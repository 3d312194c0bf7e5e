"""A schedule in the formats of other tools: Chrome's trace events, and torch's memory snapshots.

Chrome's are read by Perfetto (https://ui.perfetto.dev) and chrome://tracing: operations with their
times, and what is held as a counter. Snapshots are read by https://pytorch.org/memory_viz: buffers,
each with the module and source line that made it. It reads pickles of up to protocol 4 and no
objects; addresses are made up, one for each buffer, and none is used twice. What a real run held is
there as well, where it is known (`measured.py`): as a process of its own, or as device 1.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remat.errors import RematError
from remat.report.lifetimes import Life, compute_steps, lifetimes
from remat.report.measured_curve import Curve, blocks_of, measured_events, measured_memory
from remat_graph import Compute, Graph, Op, Provenance, Schedule, simulate, write_atomically

__all__ = ["check_ending", "chrome_trace", "memory_snapshot", "save_trace"]

_BASE = 1 << 20  # of the made up addresses
_ROWS = {"forward": 1, "backward": 2, "again": 3}


def save_trace(
    graph: Graph,
    schedule: Schedule,
    path: str | os.PathLike[str],
    facts: dict[str, Any],
    measured: Curve = (),
) -> None:
    """Write a schedule as Chrome's trace (`.json`) or as torch's snapshot (`.pickle`).

    `facts` are written into Chrome's trace as they are. `measured` is what a real run held.

    Raises:
        RematError: if the file has another ending.
        OSError: if the folder does not exist or cannot be written.
    """
    check_ending(path)
    if Path(path).suffix == ".json":
        data = json.dumps(chrome_trace(graph, schedule, facts, measured)).encode()
    else:
        data = pickle.dumps(memory_snapshot(graph, schedule, measured), protocol=4)
    write_atomically(path, data)


def check_ending(path: str | os.PathLike[str]) -> None:
    """Ask before work whether a trace can be written there.

    Raises:
        RematError: if the file has an ending of neither.
    """
    if Path(path).suffix not in (".json", ".pickle"):
        raise RematError(
            f"cannot write {os.fspath(path)!r}; its ending must be .json, for Perfetto and "
            f"chrome://tracing, or .pickle, for pytorch.org/memory_viz"
        )


def chrome_trace(
    graph: Graph, schedule: Schedule, facts: dict[str, Any], measured: Curve = ()
) -> dict[str, Any]:
    """Give a schedule as trace events, with times as the graph has them."""
    events = [*_events(graph, schedule), *measured_events(measured)]
    return {"traceEvents": events, "otherData": facts}


def _events(graph: Graph, schedule: Schedule) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "remat plan, predicted"}}
    for row, number in _ROWS.items():
        yield {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": row}}
    during = simulate(graph, schedule).during_bytes
    seen: set[str] = set()
    time = 0.0
    for step, name in compute_steps(schedule):
        op = graph.ops[graph.op_index[name]]
        row = "again" if name in seen else op.stage.value
        place = op.provenance or Provenance()
        shared = {"pid": 1, "ts": 1e6 * time}
        place_of = {"module": place.module, "source": place.source, "held_bytes": during[step]}
        yield shared | {"ph": "C", "name": "held", "args": {"bytes": during[step]}}
        yield shared | {
            "ph": "X", "tid": _ROWS[row], "name": name, "cat": row, "dur": 1e6 * op.time,
            "args": place_of,
        }  # fmt: skip
        seen.add(name)
        time += op.time
    yield {"pid": 1, "ts": 1e6 * time, "ph": "C", "name": "held", "args": {"bytes": 0}}


def memory_snapshot(graph: Graph, schedule: Schedule, measured: Curve = ()) -> dict[str, Any]:
    """Give a schedule as torch's memory snapshot, of device 0, and a real run as device 1."""
    lives = sorted(lifetimes(graph, schedule), key=lambda life: life.start)
    address, end = {}, _BASE
    for life in lives:
        address[life] = end
        end += max(1, life.size_bytes)
    starting: dict[int, list[Life]] = defaultdict(list)
    ending: dict[int, list[Life]] = defaultdict(list)
    for life in lives:
        starting[life.start].append(life)
        ending[life.end].append(life)

    def event(action: str, where: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
        return {"action": action, "addr": where, "size": size, "stream": 0, "frames": frames}

    def ended(step: int) -> Iterator[dict[str, Any]]:
        for life in ending[step]:
            for action in ("free_requested", "free_completed"):
                yield event(action, address[life], life.size_bytes, [])

    trace: list[dict[str, Any]] = []
    for position, step in enumerate(schedule.steps):
        trace += ended(position)
        if isinstance(step, Compute):
            op = graph.ops[graph.op_index[step.op]]
            frames = [_frame(op)]
            trace += [
                event("alloc", address[life], life.size_bytes, frames)
                for life in starting[position]
            ]
            if op.workspace_bytes:
                frames = [{**frames[0], "name": f"{frames[0]['name']}, workspace"}]
                for action in ("alloc", "free_requested", "free_completed"):
                    trace.append(event(action, end, op.workspace_bytes, frames))
    trace += ended(len(schedule))
    left = [life for life in lives if life.end > len(schedule)]
    held = [(address[life], life.size_bytes) for life in left]
    most = max((op.workspace_bytes for op in graph.ops), default=0)
    segment = {
        "device": 0, "address": _BASE, "total_size": end + most - _BASE, "stream": 0,
        "allocated_size": sum(life.size_bytes for life in left),
        "blocks": [*blocks_of(held, _BASE, end + most)],
    }  # fmt: skip
    if not measured:
        return {"segments": [segment], "device_traces": [trace]}
    segments, run = measured_memory(measured, 1, end + most)
    return {"segments": [segment, *segments], "device_traces": [trace, run]}


def _frame(op: Op) -> dict[str, Any]:
    """Give the place that an operation comes from as a frame of a stack."""
    place = op.provenance or Provenance()
    file, _, line = place.source.rpartition(":")
    number = int(line) if line.isdigit() else 0
    name = f"{op.name} of {place.module}" if place.module else op.name
    return {"filename": file or "?", "line": number, "name": name}
