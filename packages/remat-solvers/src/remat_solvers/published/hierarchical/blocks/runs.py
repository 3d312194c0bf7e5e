"""What a run of several ops, one after the other, costs those who only see it from outside.

A run reads values that are there before it and makes values that leave it. Everything else lives
inside: it is freed right after its last use. While the run goes on, the values that it reads may be
freed as soon as they have been read, and those that leave it are there as soon as they are made;
whether that happens is decided outside. So the memory of a run is a list of peaks (HiRemate, B.3,
correction terms): bytes on top of what was there before, less those of freed values. Moments that
others dominate are left out: at most one per value read or leaving remains, or per op if those are
fewer. Linear in the ops and what they touch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from remat_solvers.core.dead_runs import live_runs
from remat_solvers.core.wiring import Wiring

__all__ = ["Run", "RunPeak", "again", "measure_run", "saved_between"]


@dataclass(frozen=True, slots=True)
class RunPeak:
    """Bytes held at a peak of a run, on top of what was there before it.

    `extra_bytes` has all leaving values in `outputs`, whether or not they were there before; values
    in `freed` have been read for the last time in this run.
    """

    extra_bytes: int
    freed: frozenset[int]
    outputs: frozenset[int]


@dataclass(frozen=True, slots=True)
class Run:
    """Ops in order, their time, what they read and what leaves them, and the memory they need."""

    ops: tuple[int, ...]
    time: float
    reads: frozenset[int]
    makes: frozenset[int]
    peaks: tuple[RunPeak, ...]

    @property
    def peak_bytes(self) -> int:
        """The most held on top of what was there before, with nothing freed early."""
        return max((peak.extra_bytes for peak in self.peaks), default=0)


def measure_run(
    wiring: Wiring,
    ops: Sequence[int],
    leaving: Collection[int],
    saved: Collection[int] = (),
    consumed: Collection[int] = (),
) -> Run:
    """Follow a run: `saved` stays after it though it does not leave; `consumed` goes in it.

    `consumed` values are there before and are counted there; each goes right after its last use
    here.
    """
    size, steps = wiring.size, len(ops)
    starts: list[int] = []
    lasts: list[int] = []
    values: list[int] = []
    current: dict[int, int] = {}
    reads: dict[int, int] = {}
    for i, op in enumerate(ops):
        for v in wiring.inputs[op]:
            if v in current:
                lasts[current[v]] = i
            else:
                reads[v] = i
        for v in wiring.outputs[op]:
            current[v] = len(values)
            values.append(v)
            starts.append(i)
            lasts.append(i)
    starts_of = {v: starts[current[v]] for v in leaving if v in current}
    for v in {*starts_of, *(v for v in saved if v in current)}:
        lasts[current[v]] = steps
    change = np.zeros(steps + 2, dtype=np.int64)
    np.add.at(change, starts, size[values])
    np.subtract.at(change, np.array(lasts, np.int64) + 1, size[values])
    for v in consumed:
        change[reads.pop(v, -1) + 1] -= size[v]
    held = np.cumsum(change)[:steps] + wiring.workspace[list(ops)]
    return Run(
        ops=tuple(ops),
        time=math.fsum(wiring.time_list[op] for op in ops),
        reads=frozenset(reads),
        makes=frozenset(starts_of),
        peaks=_peaks(held.tolist(), reads, starts_of),
    )


def _peaks(
    held: list[int], reads: dict[int, int], starts_of: dict[int, int]
) -> tuple[RunPeak, ...]:
    """Keep the steps at which more is held than at any before, when less was freed or made."""
    peaks: list[RunPeak] = []
    most = -1
    for i, extra in enumerate(held):
        if extra > most:
            most = extra
            freed = frozenset(v for v, last in reads.items() if last < i)
            there = frozenset(v for v, start in starts_of.items() if start <= i)
            if peaks and (peaks[-1].freed, peaks[-1].outputs) == (freed, there):
                peaks.pop()
            peaks.append(RunPeak(extra, freed, there))
    return tuple(peaks)


def saved_between(
    wiring: Wiring, forward: Iterable[int], backward: Iterable[int], outputs: Collection[int]
) -> frozenset[int]:
    """Find the values of the forward run, but for outputs, that the backward run reads of it."""
    outside = {v for op in forward for v in wiring.outputs[op]}.difference(outputs)
    saved: set[int] = set()
    for op in backward:
        saved.update(v for v in wiring.inputs[op] if v in outside)
        outside.difference_update(wiring.outputs[op])
    return frozenset(saved)


def again(
    wiring: Wiring, ops: Sequence[int], leaving: Collection[int], saved: Collection[int] = ()
) -> tuple[int, ...] | None:
    """List what of a run must be run again for the values that can be made again.

    Ops that are not replayable are left out; what leaves them is read from outside. `None` if
    nothing that leaves can be made again, or not all of `saved`.
    """
    inside = {v for op in ops for v in wiring.outputs[op]}
    possible: set[int] = set()
    for op in ops:
        there = all(v not in inside or v in possible or v in leaving for v in wiring.inputs[op])
        if wiring.replayable_list[op] and there:
            possible.update(wiring.outputs[op])
    wanted = {v for v in leaving if v in possible}
    if (not wanted and not saved) or not possible.issuperset(saved):
        return None
    outside = {v for op in ops for v in wiring.inputs[op]} - possible
    return live_runs(wiring, ops, wanted.union(saved), there=outside)[0]
