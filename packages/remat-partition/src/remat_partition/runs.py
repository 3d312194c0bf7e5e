"""Stretches of a sequence that repeat with a period: where the same code runs again and again.

A run is a stretch in which every element equals the one a period before it, at least two periods
long. Which periods to look at follows from how far apart equal windows are: windows of 1, 2, 4, ...
elements get ranks by doubling (as suffix arrays are made), and the distances from each window to
the next equal one are counted. The periods counted most often are then checked on the whole
sequence. O(n log² n) for the ranks and O(n) for each period.

Limits: runs with a period that is not among the 64 counted most often are missed, and so are
repeats that something else interrupts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Run", "find_runs"]

_PERIODS = 64

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of `length` elements from `start` that repeats every `period`, twice or more."""

    start: int
    length: int
    period: int

    @property
    def repeated(self) -> int:
        """Number of elements that repeat earlier ones, in whole periods."""
        return (self.length // self.period - 1) * self.period


def find_runs(tokens: Sequence[int]) -> list[Run]:
    """Find runs that do not overlap: those that repeat most first, then by period and start."""
    sequence = np.asarray(tokens, dtype=np.int64)
    runs = [run for period in _periods(sequence) for run in _runs_of(sequence, period)]
    runs.sort(key=lambda run: (-run.repeated, run.period, run.start))
    taken = np.zeros(len(sequence), dtype=bool)
    chosen = []
    for run in runs:
        stretch = taken[run.start : run.start + run.length]
        if not stretch.any():
            stretch[:] = True
            chosen.append(run)
    return sorted(chosen, key=lambda run: run.start)


def _periods(sequence: _Ints) -> list[int]:
    """List the distances between equal windows of all lengths, those found most often first."""
    count = len(sequence)
    counts = np.zeros(count + 1, dtype=np.int64)
    ranks = np.unique(sequence, return_inverse=True)[1]
    width = 1
    while len(ranks) > 1:
        places = np.argsort(ranks, kind="stable")
        same = ranks[places[1:]] == ranks[places[:-1]]
        if not same.any():
            break
        counts += np.bincount((places[1:] - places[:-1])[same], minlength=count + 1)
        if len(ranks) <= width:
            break
        pairs = ranks[:-width] * (count + 1) + ranks[width:]
        ranks = np.unique(pairs, return_inverse=True)[1]
        width *= 2
    periods = np.flatnonzero(counts)
    return [int(p) for p in periods[np.lexsort((periods, -counts[periods]))][:_PERIODS]]


def _runs_of(sequence: _Ints, period: int) -> list[Run]:
    equal = np.concatenate(([False], sequence[:-period] == sequence[period:], [False]))
    starts = np.flatnonzero(equal[1:] & ~equal[:-1])
    ends = np.flatnonzero(equal[:-1] & ~equal[1:])
    return [
        Run(int(start), int(end - start) + period, period)
        for start, end in zip(starts, ends, strict=True)
        if end - start >= period
    ]
