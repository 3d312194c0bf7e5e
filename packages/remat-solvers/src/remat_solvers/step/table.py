"""The program of a step: a column per option, a row per time step, and how it is solved.

What cannot matter is left out before: options that another of the same region is as good as at
every time step, time steps at which every choice fits, and time steps that another one implies,
since whatever the choice it holds as much. A time is proved to 1e-6 where that takes less than a
second; beyond that, 0.1% is near enough.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from remat_solvers.core.incumbent import TOLERANCE
from remat_solvers.core.milp import HIGHS, Answer, Outcome, Program, solve_program
from remat_solvers.core.pareto import pareto_front
from remat_solvers.core.trust import distrust, doubt_of
from remat_solvers.core.wiring import Floats, Ints
from remat_solvers.errors import BackEndFailed

__all__ = ["Chosen", "Smallest", "Table"]

_SCALE = 1e4  # what budget and time are brought to
_EXACT, _GAP = 5e-7, 1e-3  # that is small enough to stop at: at first, and after some time
_EXACT_SECONDS = 0.8
_TOLERANCE = 1e-9  # of a bound, for tolerances
_MOST_COMPARED = 100_000_000  # numbers, to find time steps that others imply
_ATTEMPTS = 8  # with a budget lowered for the tolerance of the back end

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """One column per region, `None` if none was found; `lower_bound` is infinite if none is."""

    columns: tuple[int, ...] | None
    lower_bound: float


@dataclass(frozen=True, slots=True)
class Smallest:
    """The choice of minimal peak, as far as found, and a lower bound on that of all."""

    columns: tuple[int, ...]
    peak_bytes: int
    least_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Columns `start[r]:start[r + 1]` are of region r; `weight[m, c]` is held at time step m.

    `fixed[m]` is held whatever the choice; `time[c]` is that of all calls.
    """

    start: Ints
    time: Floats
    weight: Ints
    fixed: Ints

    def time_of(self, columns: tuple[int, ...]) -> float:
        """Add up the times of a choice."""
        return math.fsum(self.time[list(columns)].tolist())

    def peak_bytes(self, columns: tuple[int, ...]) -> int:
        """Return the most that a choice holds at a time step."""
        held = self.fixed + self.weight[:, list(columns)].sum(axis=1)
        return int(held.max(initial=0))

    @property
    def least_time(self) -> float:
        """The time if memory were no matter."""
        return math.fsum(self._regions(np.minimum, self.time[None, :])[0].tolist())

    def fastest(self, budget_bytes: int, until: float) -> Chosen:
        """Find the fastest choice within a budget, until a time of `perf_counter`."""
        if np.any(self.fixed + self._regions(np.minimum, self.weight).sum(axis=1) > budget_bytes):
            return Chosen(None, math.inf)
        columns = self._columns()
        most = self._regions(np.maximum, self.weight).sum(axis=1)
        rows = self._rows(np.flatnonzero(self.fixed + most > budget_bytes))
        start, bound, lowered = self._greedy(budget_bytes), self.least_time, 0
        for attempt in range(_ATTEMPTS):
            program, scale = self._program(columns, rows, budget_bytes - lowered)
            begin = None if start is None or lowered else self._point(columns, start)
            answer = _solve(program, until, begin)
            if attempt == 0:
                if answer.outcome is Outcome.INFEASIBLE and start is None and not doubt_of(HIGHS):
                    return Chosen(None, math.inf)
                if answer.outcome is Outcome.INFEASIBLE:
                    bound = math.inf
                elif math.isfinite(answer.bound):
                    bound = max(bound, (answer.bound - _TOLERANCE * abs(answer.bound)) / scale)
            choice = self._read(columns, answer)
            excess = 0 if choice is None else self.peak_bytes(choice) - budget_bytes
            if excess <= 0:
                break
            lowered += excess
        if choice is None or excess > 0 or (start and self.time_of(start) < self.time_of(choice)):
            choice = start
        if choice is not None:
            choice = self._hastened(choice, budget_bytes)
            step_time = self.time_of(choice)
            if bound > step_time * (1 + TOLERANCE):
                distrust(
                    HIGHS, f"it gave a step the bound {bound:g}, but a choice takes {step_time:g}"
                )
            bound = min(bound, step_time)
        return Chosen(choice, self.least_time if doubt_of(HIGHS) else bound)

    def smallest(self, until: float) -> Smallest:
        """Find the choice that needs the least budget."""
        columns, rows = self._columns(), self._rows(np.arange(len(self.fixed)))
        floor = self.fixed + self._regions(np.minimum, self.weight).sum(axis=1)
        least = int(floor.max(initial=0))
        count = len(columns)
        weight, fixed = self.weight[np.ix_(rows, columns)], self.fixed[rows]
        largest = max(1, int((fixed + weight.max(axis=1, initial=0)).max(initial=0)))
        unit = _SCALE / largest
        held = sparse.hstack([sparse.csr_array(weight * unit), np.full((len(rows), 1), -1.0)])
        once = sparse.hstack([self._one_each(columns), np.zeros((len(self.start) - 1, 1))])
        top = (self.fixed + self._regions(np.maximum, self.weight).sum(axis=1)).max(initial=0)
        program = Program(
            cost=np.concatenate([np.zeros(count), [1.0]]),
            matrix=sparse.csr_array(sparse.vstack([held, once])),
            right=np.concatenate([-fixed * unit, -np.ones(len(self.start) - 1)]),
            lower=np.concatenate([np.zeros(count), [least * unit * (1 - _TOLERANCE)]]),
            upper=np.concatenate([np.ones(count), [top * unit + 1]]),
            integral=np.concatenate([np.ones(count, np.bool_), [False]]),
        )
        answer = _solve(program, until, None)
        choice = self._lowered(self._read(columns, answer) or self._lowest())
        proved = (answer.bound * (1 - 1e-7) - 1e-6) / unit
        peak = self.peak_bytes(choice)
        if proved > peak:
            distrust(HIGHS, f"it said that no choice takes {peak} bytes, but one does")
        elif math.isfinite(proved) and not doubt_of(HIGHS):
            least = max(least, math.ceil(proved))
        return Smallest(choice, peak, min(least, peak))

    def _regions(self, least_or_most: np.ufunc, rows: NDArray[np.generic]) -> NDArray[np.generic]:
        """Take the least or the most of each region in each row."""
        values: NDArray[np.generic] = least_or_most.reduceat(rows, self.start[:-1], axis=1)
        return values

    def _columns(self) -> Ints:
        """Leave out the columns that another of the region is as good as."""
        kept: list[int] = []
        for first, end in zip(self.start[:-1].tolist(), self.start[1:].tolist(), strict=True):
            order = sorted(range(first, end), key=lambda c: (self.time[c], self.weight[:, c].sum()))
            kept += sorted(
                pareto_front(order, lambda c: (float(self.time[c]), *self.weight[:, c].tolist()))
            )
        return np.array(kept, dtype=np.int64)

    def _rows(self, rows: Ints) -> Ints:
        """Leave out the rows that another implies, whatever the choice."""
        weight = np.concatenate([self.weight[rows], self.fixed[rows][:, None]], axis=1)
        weight, first = np.unique(weight, axis=0, return_index=True)
        rows = rows[first]
        if weight.size * len(rows) > _MOST_COMPARED:
            return rows
        kept = list(range(len(rows)))
        for row in range(len(rows)):
            others = [other for other in kept if other != row]
            beyond = weight[row] - weight[others]
            most = self._regions(np.maximum, beyond[:, :-1]).sum(axis=1) + beyond[:, -1]
            if np.any(most <= 0):
                kept = others
        return rows[kept]

    def _program(self, columns: Ints, rows: Ints, budget_bytes: int) -> tuple[Program, float]:
        """Write the program of the time; its cost is the time by a scale."""
        unit = _SCALE / max(1, budget_bytes)
        regions = len(self.start) - 1
        longest = float(self._regions(np.maximum, self.time[None, :]).sum())
        scale = _SCALE / max(longest, 1e-300)
        held = sparse.csr_array(self.weight[np.ix_(rows, columns)] * unit)
        count = len(columns)
        program = Program(
            cost=self.time[columns] * scale,
            matrix=sparse.csr_array(sparse.vstack([held, self._one_each(columns)])),
            right=np.concatenate([(budget_bytes - self.fixed[rows]) * unit, -np.ones(regions)]),
            lower=np.zeros(count),
            upper=np.ones(count),
            integral=np.ones(count, dtype=np.bool_),
        )
        return program, scale

    def _one_each(self, columns: Ints) -> sparse.csr_array:
        """Ask for one column of each region at least; more than one only costs."""
        region = np.searchsorted(self.start, columns, side="right") - 1
        shape = (len(self.start) - 1, len(columns))
        return sparse.csr_array((-np.ones(len(columns)), (region, np.arange(len(columns)))), shape)

    def _point(self, columns: Ints, chosen: tuple[int, ...]) -> Floats | None:
        point: Floats = np.isin(columns, chosen).astype(np.float64)
        return point if point.sum() == len(chosen) else None

    def _read(self, columns: Ints, answer: Answer) -> tuple[int, ...] | None:
        """Read the choice off a point; of two columns of a region the faster."""
        if answer.point is None:
            return None
        chosen = columns[answer.point[: len(columns)] > 0.5].tolist()
        first: dict[int, int] = {}
        for c in sorted(chosen, key=lambda c: (self.time[c], c)):
            first.setdefault(int(np.searchsorted(self.start, c, side="right")) - 1, c)
        if len(first) < len(self.start) - 1:
            return None
        return tuple(first[region] for region in sorted(first))

    def _lowest(self) -> tuple[int, ...]:
        """Take in each region the column that adds least to its highest time step."""
        bounds = zip(self.start[:-1].tolist(), self.start[1:].tolist(), strict=True)
        return tuple(
            first + int(self.weight[:, first:end].max(axis=0, initial=0).argmin())
            for first, end in bounds
        )

    def _after(self, chosen: tuple[int, ...]) -> tuple[Ints, Ints]:
        """Return what is held at most if a column is taken in place, and the region of each."""
        region = np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))
        held = self.fixed + self.weight[:, list(chosen)].sum(axis=1)
        now = np.array(chosen, dtype=np.int64)[region]
        after: Ints = (held[:, None] + self.weight - self.weight[:, now]).max(axis=0, initial=0)
        return after, region

    def _lowered(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Exchange one column at a time while that lowers the most that is held."""
        while True:
            after, region = self._after(chosen)
            best = int(after.argmin())
            if after[best] >= self.peak_bytes(chosen):
                return chosen
            chosen = (*chosen[: region[best]], best, *chosen[region[best] + 1 :])

    def _hastened(self, chosen: tuple[int, ...], budget_bytes: int) -> tuple[int, ...]:
        """Exchange one column at a time while that is faster and fits."""
        while True:
            after, region = self._after(chosen)
            saved = self.time[np.array(chosen, dtype=np.int64)[region]] - self.time
            saved = np.where(after <= budget_bytes, saved, 0.0)
            best = int(saved.argmax())
            if saved[best] <= 0:
                return chosen
            chosen = (*chosen[: region[best]], best, *chosen[region[best] + 1 :])

    def _greedy(self, budget_bytes: int) -> tuple[int, ...] | None:
        """Take the fastest, then what costs least time for what it frees, until all fits."""
        bounds = list(zip(self.start[:-1].tolist(), self.start[1:].tolist(), strict=True))
        chosen = [first + int(self.time[first:end].argmin()) for first, end in bounds]
        region = np.repeat(np.arange(len(bounds)), np.diff(self.start))
        held = self.fixed + self.weight[:, chosen].sum(axis=1)
        for _ in range(len(self.time)):
            over = np.maximum(held - budget_bytes, 0)
            rows = np.flatnonzero(over)
            if not len(rows):
                return tuple(chosen)
            now = np.array(chosen)[region]
            less = np.maximum(
                held[rows][:, None] + self.weight[rows] - self.weight[np.ix_(rows, now)]
                - budget_bytes,
                0,
            ).sum(axis=0)  # fmt: skip
            gain = over.sum() - less
            longer = np.maximum(self.time - self.time[now], 0)
            price = np.where(gain > 0, (longer + 1e-300) / np.maximum(gain, 1), math.inf)
            best = int(price.argmin())
            if gain[best] <= 0:
                return None
            held = held + self.weight[:, best] - self.weight[:, chosen[region[best]]]
            chosen[region[best]] = best
        return None


def _solve(program: Program, until: float, start: Floats | None) -> Answer:
    """Solve, exactly if that is soon done; else to the gap, or until the time is over."""
    if not len(program.cost):
        return Answer(Outcome.SOLVED, np.zeros(0), 0.0, 0.0)
    left = max(0.0, until - time.perf_counter())
    seconds = min(left, _EXACT_SECONDS)
    answer = _ask(program, seconds, _EXACT, start)
    near = answer.value <= answer.bound + _GAP * abs(answer.value)
    if answer.outcome is not Outcome.STOPPED or near or seconds == left:
        return answer
    left = max(0.0, until - time.perf_counter())
    start = start if answer.point is None else answer.point
    later = _ask(program, left, _GAP, start)
    bound = max(answer.bound, later.bound)
    best = later if later.value <= answer.value else answer
    return Answer(later.outcome, best.point, best.value, bound)


def _ask(program: Program, seconds: float, gap: float, start: Floats | None) -> Answer:
    """Solve; a back end that fails has found and proved nothing."""
    try:
        return solve_program(program, seconds=seconds, gap=gap, start=start)
    except BackEndFailed as error:
        _log.warning("%s", error)
        return Answer(Outcome.STOPPED, None, math.inf, -math.inf)
