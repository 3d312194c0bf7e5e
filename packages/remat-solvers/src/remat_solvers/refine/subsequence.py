"""The program of all schedules that leave some runs of one sequence out: exact, and easy.

Of each value, the *events* in a sequence are the runs that make or read it, and the end, which
reads the results. Between two events next to each other it is held or not. Variables: `runs[t]`,
the computation at position t takes place, unless that is certain; `held[e]`, a value is held from
event e to its next. Rows:

- what is held after an event was held before it, or is made there;
- what an event reads is held up to it; what it makes anew is not;
- at each position, the bytes of what is held, and of what the computation there needs, are within
  the budget.

All moments are seen, so a point is a schedule within the budget, and the best point the fastest of
them. Between certain runs nothing is chosen: the program is as large as the choice. Of positions
between which only what is certain changes (a *group*), one row stays. That the memory of one
position is that of the one before, and what changes, would have a thirtieth of the entries; but
HiGHS then takes two to four times as long, for it finds no covers. Source: the rows are those of
Checkmate (Jain et al. 2020, section 4), for one sequence in place of the grid of all stages and
ops; that a value is held from use to use is as in Moccasin (Bartan et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from remat_solvers.core.milp import Program
from remat_solvers.core.rows import Rows
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Floats, Ints, Wiring

__all__ = ["Subsequences"]

_UNIT = 1000  # what the budget is, and what computing everything once costs


@dataclass(frozen=True, slots=True, eq=False)
class _Events:
    """All events, by value and then by position; `held` is what lies between one and the next.

    `column` is that of `held`, or -1; then `certain` says whether it is held.
    """

    value: Ints
    position: Ints
    makes: NDArray[np.bool_]
    overwrites: NDArray[np.bool_]
    column: Ints
    certain: NDArray[np.bool_]


class Subsequences:
    """The program for a legal sequence; `certain` runs stay, and first runs must be certain."""

    def __init__(
        self, wiring: Wiring, budget_bytes: int, sequence: Ints, certain: NDArray[np.bool_]
    ) -> None:
        self._wiring = wiring
        self._sequence = sequence
        self._run_column = np.where(certain, -1, np.cumsum(~certain) - 1)
        self._runs = int((~certain).sum())
        self._events = _events(wiring, sequence, self._run_column, self._runs)
        self._load = _load(wiring, self._events, sequence, self._run_column, budget_bytes)

    @property
    def entries(self) -> int:
        """The most entries that rows of memory can have, known before the program is written."""
        return int((self._load.last - self._load.first + 1).sum())

    @cached_property
    def program(self) -> Program:
        """The program; what it costs is in thousandths of computing everything once."""
        width = self._runs + int((self._events.column >= 0).sum())
        rows = Rows()
        self._link(rows)
        _fit(rows, self._load)
        cost = np.zeros(width)
        there = self._run_column >= 0
        once = max(float(self._wiring.time.sum()), 1e-300)
        cost[: self._runs] = self._wiring.time[self._sequence[there]] * (_UNIT / once)
        return Program(
            cost=cost,
            matrix=rows.matrix(width),
            right=rows.bounds(),
            lower=np.zeros(width),
            upper=np.ones(width),
            integral=np.ones(width, dtype=np.bool_),
        )

    def embed(self, positions: Ints) -> Floats:
        """Write the point of the runs at these positions, ascending; all certain ones are there."""
        steps = len(self._sequence)
        now = trace(self._wiring, self._sequence[positions])
        at = np.append(positions, steps)
        copies = np.lexsort((now.copy_start, now.copy_value))
        made = now.copy_value[copies] * (steps + 1) + at[now.copy_start[copies]]
        last = at[now.copy_last[copies]]
        events = self._events
        choice = np.flatnonzero(events.column >= 0)
        key = events.value[choice] * (steps + 1) + events.position[choice]
        copy = np.searchsorted(made, key, side="right") - 1
        point = np.zeros(len(self.program.cost))
        there = self._run_column >= 0
        runs = np.zeros(steps)
        runs[positions] = 1
        point[self._run_column[there]] = runs[there]
        point[events.column[choice]] = last[copy] >= events.position[choice + 1]
        return point

    def read(self, point: Floats) -> Ints:
        """Read the computations that take place off a point."""
        return self._sequence[np.append(point, 1.0)[self._run_column] > 0.5]

    def _link(self, rows: Rows) -> None:
        """Say what is held before and after each event."""
        events = self._events
        column = events.column
        runs = np.append(self._run_column, -1)[events.position]
        here = np.arange(len(events.value) - 1)
        here = here[events.value[here] == events.value[here + 1]]
        former = here > 0
        former[former] = events.value[here[former] - 1] == events.value[here[former]]
        # What is held after an event, and was not made there for certain.
        after = here[former & ~(events.makes[here] & (runs[here] < 0))]
        after = after[(column[after] >= 0) | events.certain[after]]
        after = after[(column[after - 1] >= 0) | ~events.certain[after - 1]]
        makes = np.where(events.makes[after], runs[after], -1)
        held = -events.certain[after].astype(np.float64)
        rows.add(held, len(after), (column[after], 1.0), (column[after - 1], -1.0), (makes, -1.0))
        choice = here[column[here] >= 0]  # the next event may take place
        then = choice + 1
        read = choice[~events.makes[then]]
        rows.add(0.0, len(read), (runs[read + 1], 1.0), (column[read], -1.0))
        made = choice[events.makes[then]]
        rows.add(1.0, len(made), (runs[made + 1], 1.0), (column[made], 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """What each `column` weighs, from group `first` to group `last`, and the room of all groups."""

    column: Ints
    weight: Ints
    first: Ints
    last: Ints
    room: Ints
    unit: float


def _load(
    wiring: Wiring, events: _Events, sequence: Ints, run_column: Ints, budget_bytes: int
) -> _Load:
    steps = len(sequence)
    # From the event on where what is overwritten there is held on; to the next, unless it goes.
    since = events.position[:-1] + ~events.overwrites[:-1]
    until = np.minimum(events.position[1:] - events.overwrites[1:], steps - 1)
    size = wiring.size[events.value[:-1]]
    there = (events.value[:-1] == events.value[1:]) & (since <= until) & (size > 0)
    always = np.flatnonzero(there & events.certain[:-1])
    needs = np.array(wiring.made_list, dtype=np.int64)[sequence] + wiring.workspace[sequence]
    sure = _held(since[always], until[always], size[always], steps)
    sure += np.where(run_column < 0, needs, 0)

    choice = np.flatnonzero(there & (events.column[:-1] >= 0))
    runs = np.flatnonzero((run_column >= 0) & (needs > 0))
    column = np.concatenate([events.column[choice], run_column[runs]])
    weight = np.concatenate([size[choice], needs[runs]])
    first = np.concatenate([since[choice], runs])
    last = np.concatenate([until[choice], runs])
    changes = np.zeros(steps + 1, dtype=np.bool_)
    changes[0] = True
    changes[first] = True
    changes[last + 1] = True
    changes = changes[:steps]
    group = np.cumsum(changes) - 1
    room = budget_bytes - np.maximum.reduceat(sure, np.flatnonzero(changes))
    return _Load(column, weight, group[first], group[last], room, budget_bytes / _UNIT)


def _held(first: Ints, last: Ints, weight: Ints, count: int) -> Ints:
    """Add up what weighs from `first` to `last`, at each of so many places."""
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, first, weight)
    np.add.at(change, last + 1, -weight)
    total: Ints = np.cumsum(change)[:count]
    return total


def _fit(rows: Rows, load: _Load) -> None:
    """Keep what is held, and needed, within the room of each group that has too little for all."""
    binding = _held(load.first, load.last, load.weight, len(load.room)) > load.room
    numbers = np.full(len(load.room), -1)
    numbers[binding] = rows.add(load.room[binding] / load.unit, int(binding.sum()))
    groups = load.last - load.first + 1
    row = numbers[_ranges(load.first, groups)]
    there = row >= 0
    rows.extend(
        row[there],
        np.repeat(load.column, groups)[there],
        np.repeat(load.weight / load.unit, groups)[there],
    )


def _events(wiring: Wiring, sequence: Ints, run_column: Ints, width: int) -> _Events:
    """Find all events of a sequence, and number what may be held or not from `width` on."""
    steps = len(sequence)
    reads = np.diff(wiring.in_start)[sequence]
    edges = _ranges(wiring.in_start[sequence], reads)
    read_at = np.repeat(np.arange(steps), reads)
    outs = np.diff(wiring.out_start)[sequence]
    made = wiring.out_value[_ranges(wiring.out_start[sequence], outs)]
    made_at = np.repeat(np.arange(steps), outs)
    ends = np.full(len(wiring.results), steps)
    value = np.concatenate([wiring.in_value[edges], made, wiring.results])
    position = np.concatenate([read_at, made_at, ends])
    makes = np.zeros(len(value), dtype=np.bool_)
    makes[len(edges) : len(edges) + len(made)] = True
    overwrites = np.zeros(len(value), dtype=np.bool_)
    overwrites[: len(edges)] = wiring.in_overwritten[edges]
    _, order = np.unique(value * (steps + 1) + position, return_index=True)
    value, position = value[order], position[order]
    makes, overwrites = makes[order], overwrites[order]
    same = np.append(value[:-1] == value[1:], False)
    runs = np.append(run_column, -1)[position]
    choice = same & np.append(runs[1:] >= 0, False)
    certain = same & ~choice & ~np.append(makes[1:], True)
    column = np.where(choice, width + np.cumsum(choice) - 1, -1)
    return _Events(value, position, makes, overwrites, column, certain)


def _ranges(start: Ints, counts: Ints) -> Ints:
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) + np.repeat(start - ends + counts, counts)
