"""Improve a schedule by crossing it with others: the fastest schedule made of runs of both.

A *mate* is made of the schedule: some of its recomputations are freed, and it is repaired at other
prices. Both compute all ops a first time in one order, so one sequence has both as parts (`merge`);
the fastest schedule within it is an integer program that sees all moments (`subsequence`), and
small, as where both run the same, nothing is left to choose.
Guarantee: the result fits and is never slower; nothing is proved. Source: Aggarwal, Orlin & Tai
1997, "Optimized crossover for the independent set problem".
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from remat_solvers.core.milp import HIGHS, solve_program
from remat_solvers.core.trace import Trace, first_runs, sequence_time, trace
from remat_solvers.core.wiring import Ints, Wiring
from remat_solvers.refine.subsequence import Subsequences
from remat_solvers.search.local_search import away
from remat_solvers.search.prune import drop_unused

__all__ = ["Crossover", "merge"]

_SECONDS = 2.0
_MATE_SECONDS = 3.0
_GAP = 1e-4
_MOST_ENTRIES = 200_000  # of rows of memory
_COMMON_STAYS = 0.5  # of the times
_SHARE, _LEAST_SHARE, _MOST_SHARE = 0.2, 0.02, 0.7  # of the recomputations that a mate is freed of
_LARGER, _SMALLER = 1.2, 0.8
_SHORT, _LONG = 0.3, 1.0  # seconds of a program


class Crossover:
    """Remembers how far away mates may be that fit, and whose programs are solved in moments."""

    def __init__(self, budget_bytes: int, seed: int = 0, *, back_end: str = HIGHS) -> None:
        self._budget_bytes = budget_bytes
        self._back_end = back_end
        self._rng = np.random.default_rng(seed)
        self._share = _SHARE

    def step(self, wiring: Wiring, now: Trace, deadline: float) -> Trace:
        """Cross a schedule that fits with a mate made of it.

        `deadline` is a moment of `time.perf_counter`.
        """
        share = min(_MOST_SHARE, self._share * float(self._rng.uniform(0.5, 1.5)))
        until = min(deadline, time.perf_counter() + _MATE_SECONDS)
        mate = away(wiring, now, self._budget_bytes, share, rng=self._rng, deadline=until)
        started = time.perf_counter()
        found = now if mate is None else self.cross(wiring, now, mate, deadline)
        took = time.perf_counter() - started
        if (mate is None and started < until) or took > _LONG:
            self._share = max(_SMALLER * self._share, _LEAST_SHARE)
        elif mate is not None and took < _SHORT:
            self._share = min(_LARGER * self._share, _MOST_SHARE)
        return found

    def cross(self, wiring: Wiring, now: Trace, mate: Trace, deadline: float) -> Trace:
        """Find the fastest schedule of runs of two that fit; the faster of them if there is none.

        Every other time, and where there would be too much choice, what both run stays.
        """
        best, other = sorted((now, mate), key=lambda one: sequence_time(wiring, one.sequence))
        sequence, of_best, of_other = merge(wiring, best, other)
        certain = np.zeros(len(sequence), dtype=np.bool_)
        certain[of_best[first_runs(wiring, best)]] = True
        choice = None
        if self._rng.random() >= _COMMON_STAYS:
            choice = self._choose(wiring, sequence, certain)
        if choice is None:
            certain[np.intersect1d(of_best, of_other)] = True
            choice = self._choose(wiring, sequence, certain)
        seconds = min(_SECONDS, deadline - time.perf_counter())
        if choice is None or seconds <= 0:
            return best
        answer = solve_program(
            choice.program,
            seconds=seconds,
            gap=_GAP,
            start=choice.embed(of_best),
            back_end=self._back_end,
        )
        if answer.point is None:
            return best
        found = drop_unused(wiring, trace(wiring, choice.read(answer.point)))
        faster = sequence_time(wiring, found.sequence) < sequence_time(wiring, best.sequence)
        return found if found.peak_bytes <= self._budget_bytes and faster else best

    def _choose(
        self, wiring: Wiring, sequence: Ints, certain: NDArray[np.bool_]
    ) -> Subsequences | None:
        """Write the program, if there is a choice and not too much of it."""
        if certain.all():
            return None
        choice = Subsequences(wiring, self._budget_bytes, sequence, certain)
        return choice if choice.entries <= _MOST_ENTRIES else None


def merge(wiring: Wiring, one: Trace, other: Trace) -> tuple[Ints, Ints, Ints]:
    """Make one sequence of two in the order of the graph; return where each has its runs in it.

    Between two first runs, what both recompute in the same order stands there once.
    """
    parts = [_between_first_runs(wiring, now) for now in (one, other)]
    sequence: list[int] = []
    places: tuple[list[int], list[int]] = ([], [])
    for op in range(wiring.op_count):
        left, right = (part[op] for part in parts)
        i = j = 0
        while i < len(left) or j < len(right):
            if i < len(left) and j < len(right) and left[i] == right[j]:
                run, mine = left[i], (True, True)
            elif j == len(right) or (i < len(left) and left[i] < right[j]):
                run, mine = left[i], (True, False)
            else:
                run, mine = right[j], (False, True)
            for k in range(2):
                if mine[k]:
                    places[k].append(len(sequence))
            i, j = i + mine[0], j + mine[1]
            sequence.append(run)
    return np.array(sequence), np.array(places[0]), np.array(places[1])


def _between_first_runs(wiring: Wiring, now: Trace) -> list[list[int]]:
    """Cut a sequence in front of all first runs but the first; nothing is recomputed before it."""
    cuts = first_runs(wiring, now)
    return [part.tolist() for part in np.split(now.sequence, cuts[1:])]
