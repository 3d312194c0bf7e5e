"""Schedules, and the simulator: the one referee of whether they are legal and what they cost.

Memory model. While an op runs, everything alive before it, all of its outputs and its workspace are
held; afterwards its outputs stay until they are freed. Computing an op some of whose outputs are
still alive replaces them: both copies exist while it runs. Resident values weigh nothing. Where
an op can overwrite an input, and that is freed by one of the steps that free right after it, the
output takes its buffer: it weighs nothing more, and freeing the input gives nothing back.
Complexity: linear in the number of steps and of values they touch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from remat_graph.errors import InvalidSchedule
from remat_graph.graph import Graph

__all__ = [
    "Compute",
    "Free",
    "Schedule",
    "Solution",
    "Status",
    "Step",
    "Timeline",
    "Trial",
    "freed_next",
    "simulate",
]


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operation; its outputs become alive."""

    op: str


@dataclass(frozen=True, slots=True)
class Free:
    """Give back the memory of a value."""

    value: str


Step = Compute | Free


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one forward plus backward pass, in order.

    Its hash is kept once it is known: what is found by a schedule, as its code, is looked for in
    each step of a training.
    """

    steps: tuple[Step, ...]
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        if self._hash is None:
            object.__setattr__(self, "_hash", hash(self.steps))
        assert self._hash is not None
        return self._hash

    def __reduce__(self) -> tuple[type[Schedule], tuple[tuple[Step, ...]]]:
        return Schedule, (self.steps,)  # hashes of names are others in another process

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


class Status(enum.StrEnum):
    """What a solver can say about its answer.

    `OPTIMAL`: proved the fastest within the budget, in the fixed order of the graph.
    `FEASIBLE`: within the budget. `INFEASIBLE`: proved that nothing is. `LIMIT`: stopped by a limit
    before anything within the budget was found.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Trial:
    """What one solver of a portfolio gave; `time` is `None` if it found no schedule that fits.

    `peak_bytes` is that of its schedule, or of the one of minimal peak that it tried. `seconds` is
    how long it ran.
    """

    solver: str
    status: Status
    time: float | None
    peak_bytes: int
    lower_bound: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Solution:
    """A solver's answer: `schedule` is `None` unless the status is `OPTIMAL` or `FEASIBLE`.

    `time` and `peak_bytes` are the simulator's for `schedule`. `lower_bound` is a time that no
    schedule in the order of the graph can beat within the budget, `None` if the solver proves none.
    `trials` says what a portfolio ran, in turn; it is empty for a solver by itself. `doubt` says
    why no more is certified: what a solver proved by was found to be wrong, or failed.
    """

    status: Status
    schedule: Schedule | None
    time: float
    peak_bytes: int
    lower_bound: float | None
    solver: str
    solve_seconds: float
    trials: tuple[Trial, ...] = ()
    doubt: str | None = None

    @property
    def gap(self) -> float | None:
        """How much faster a schedule could be at most: (time - bound) / bound, or `None`."""
        if self.schedule is None or self.lower_bound is None:
            return None
        excess = max(0.0, self.time - self.lower_bound)
        if excess == 0:
            return 0.0
        return excess / self.lower_bound if self.lower_bound > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a legal schedule costs.

    `during_bytes[i]` is held while step i runs, `after_bytes[i]` after it; `peak_step` is the first
    step at which `peak_bytes` is reached (-1 for an empty schedule).
    """

    time: float
    peak_bytes: int
    peak_step: int
    during_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """Check every step of a schedule and account for its memory and time.

    Raises:
        InvalidSchedule: if a step names something unknown, computes an op whose inputs are not
            alive, frees what is not alive or is resident, computes a non-replayable op twice,
            breaks an `order_after`, or if at the end a result is not alive or a non-replayable
            op was never computed. An op counts as computed if alternatives have made all that it
            makes; a non-replayable one runs only if none of its outputs was ever made.
    """
    op_index, values = graph._op_index, graph._value_by_name
    resident = graph.resident
    alive: set[str] = set()
    computed = [False] * len(graph.ops)
    ever: set[str] = set()
    overwritten: set[str] = set()
    times: list[float] = []
    during: list[int] = []
    after: list[int] = []
    memory = 0
    for position, step in enumerate(schedule.steps):
        if isinstance(step, Free):
            if step.value not in alive:
                raise InvalidSchedule(_why_not_freeable(graph, step.value), position)
            alive.remove(step.value)
            during.append(memory)
            if step.value not in overwritten:
                memory -= values[step.value].size_bytes
            after.append(memory)
            continue
        index = op_index.get(step.op)
        if index is None:
            raise InvalidSchedule(f"computes {step.op!r}, which is no op of the graph", position)
        op = graph.ops[index]
        for v in op.inputs:
            if v not in alive and v not in resident:
                raise InvalidSchedule(
                    f"computes {op.name!r} while its input {v!r} is not alive", position
                )
        if not op.replayable and (computed[index] or not ever.isdisjoint(op.outputs)):
            raise InvalidSchedule(f"computes {op.name!r} again, which is not replayable", position)
        if not computed[index]:
            for earlier in op.order_after:
                if not _is_done(graph, op_index[earlier], computed, ever):
                    raise InvalidSchedule(
                        f"computes {op.name!r} before {earlier!r}, after which it must come",
                        position,
                    )
            computed[index] = True
        ever.update(op.outputs)
        output_bytes = 0
        replaced_bytes = 0
        overwritten = set()
        if op.overwrites:
            dying = freed_next(schedule.steps, position)
            for read, new in op.overwrites:
                if read in dying:
                    overwritten.add(read)
                    output_bytes -= values[new].size_bytes
        for v in op.outputs:
            size = values[v].size_bytes
            output_bytes += size
            if v in alive:
                replaced_bytes += size
            else:
                alive.add(v)
        times.append(op.time)
        during.append(memory + output_bytes + op.workspace_bytes)
        memory += output_bytes - replaced_bytes
        after.append(memory)
    for v in sorted(graph.results):
        if v not in alive and v not in resident:
            raise InvalidSchedule(f"result {v!r} is not alive at the end")
    for index, op in enumerate(graph.ops):
        if not op.replayable and op.owed and not _is_done(graph, index, computed, ever):
            raise InvalidSchedule(
                f"op {op.name!r} is not replayable and is never computed; it must be, once"
            )
    peak = max(during, default=0)
    return Timeline(
        time=math.fsum(times),
        peak_bytes=peak,
        peak_step=during.index(peak) if during else -1,
        during_bytes=tuple(during),
        after_bytes=tuple(after),
    )


def _is_done(graph: Graph, index: int, computed: Sequence[bool], ever: set[str]) -> bool:
    outputs = graph.ops[index].outputs
    return computed[index] or (bool(outputs) and ever.issuperset(outputs))


def freed_next(steps: Sequence[Step], position: int) -> set[str]:
    """Name the values that are freed right after a step, before the next one that computes."""
    freed = set()
    for after in range(position + 1, len(steps)):
        step = steps[after]
        if not isinstance(step, Free):
            break
        freed.add(step.value)
    return freed


def _why_not_freeable(graph: Graph, value: str) -> str:
    if value not in graph._value_by_name:
        return f"frees {value!r}, which is no value of the graph"
    if value in graph.resident:
        return f"frees {value!r}, which is resident"
    return f"frees {value!r}, which is not alive"
