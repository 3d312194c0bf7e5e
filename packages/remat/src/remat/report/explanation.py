"""What a schedule does with each part of a model, and why: kept, computed again, made another way.

A part is a module and a source line. A value is *kept* if it is held while the loss runs, between
the two halves of the step. One that is made again has a gap in which it is not held; the moment
within it at which the most is held says what keeping it would take.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from remat.errors import RematError
from remat.report.lifetimes import Life, compute_steps, lifetimes
from remat.report.words import mib, ms
from remat_graph import Graph, Op, Provenance, Schedule, Timeline, simulate

__all__ = ["By", "Explanation", "Moment", "Part", "explain"]

By = Literal["line", "module"]

_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Moment:
    """A step of a schedule that runs an operation, and what is held while it runs, in bytes.

    `step` is the position in the schedule; `module` and `source` say where the operation comes
    from, empty where that is not known.
    """

    step: int
    op: str
    stage: str
    module: str
    source: str
    held_bytes: int

    def __str__(self) -> str:
        """Describe it in words."""
        place = ", ".join(filter(None, (self.module, self.source)))
        return f"{self.op} ({self.stage}{'; ' * bool(place)}{place})"


@dataclass(frozen=True, slots=True)
class Part:
    """What a schedule does with the operations of one module, or one source line of it.

    Both halves count: a backward operation comes from where its forward one does. `label` is what
    to call it: the module, "(model)" for the outermost, or the operation if neither is known.
    `time` is that of making each value once, in seconds, `recompute_time` that of making some again
    in `recomputations` runs; `most_runs` is how often any operation runs. `kept_bytes` are held
    while the loss runs, `packed_bytes` of them in a packed form. `recomputed_bytes` are made again,
    counted each time. `other_ways` are operations that run in place of others. `peak_bytes` are
    held at the moment at which the most is held, workspace included. What is made again would, if
    it was kept, be `over_bytes` over the budget at the moment `binding`, the worst for it; `None`
    if nothing is. `why` says it in words.
    """

    module: str
    source: str
    label: str
    operations: int
    time: float
    kept_bytes: int
    packed_bytes: int
    recomputed_bytes: int
    recomputations: int
    most_runs: int
    recompute_time: float
    other_ways: int
    peak_bytes: int
    over_bytes: int | None
    binding: Moment | None
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of a plan in the order in which they first run, and the moment of its peak.

    Of a step of several regions, `regions` has the explanation of each, with a name, and `parts`
    are all of theirs.
    """

    parts: tuple[Part, ...]
    peak: Moment | None
    budget_bytes: int
    name: str = ""
    regions: tuple[Explanation, ...] = ()


def explain(
    graph: Graph,
    schedule: Schedule,
    budget_bytes: int,
    *,
    by: By = "line",
    depth: int | None = None,
    limit: str = "the budget",
    name: str = "",
) -> Explanation:
    """Explain what a schedule does with each part of a graph.

    `by="module"` puts all source lines of a module together; `depth` takes that many components of
    its path and puts what is below together. Operations of which nothing is known are parts of
    their own. `limit` is what `budget_bytes` is called, `name` the graph.

    Raises:
        RematError: if `by` is something else, or `depth` is negative.
        InvalidSchedule: if it is no schedule of the graph.
    """
    if by not in get_args(By) or (depth is not None and depth < 0):
        raise RematError(f"by={by!r}, depth={depth!r}; give 'line' or 'module', and 0 or more")
    reading = _Reading(graph, schedule, budget_bytes, by, depth, limit)
    return Explanation(tuple(reading.parts()), reading.peak(), budget_bytes, name)


class _Reading:
    """One pass over a schedule, and what is asked of it."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        budget: int,
        by: By,
        depth: int | None,
        limit: str,
    ) -> None:
        self.graph = graph
        self.limit = limit
        self.budget = budget
        self.timeline: Timeline = simulate(graph, schedule)
        self.ran = list(compute_steps(schedule))
        self.op_at = dict(self.ran)
        self.runs = Counter(op for _, op in self.ran)
        boundary = graph.boundary
        self.between = next((step for step, op in self.ran if op == boundary), None)
        self.most = _MostHeld(self.timeline.during_bytes)
        self.keys = {name: _key(graph.ops[graph.op_index[name]], by, depth) for name in self.runs}
        self.ops: dict[_Key, list[Op]] = defaultdict(list)
        for name in self.runs:
            self.ops[self.keys[name]].append(graph.ops[graph.op_index[name]])
        self.lives: dict[_Key, list[Life]] = defaultdict(list)
        for life in sorted(lifetimes(graph, schedule), key=lambda life: life.start):
            self.lives[self.keys[life.op]].append(life)
        self.again = _runs_again(self.ran, self.lives)

    def peak(self) -> Moment | None:
        """Find when the most is held."""
        return self.moment(self.timeline.peak_step) if self.ran else None

    def moment(self, step: int) -> Moment:
        """Describe a step; one that frees is described by the operation before it."""
        while step not in self.op_at:
            step -= 1
        op = self.graph.ops[self.graph.op_index[self.op_at[step]]]
        place = op.provenance or Provenance()
        held = self.timeline.during_bytes[step]
        return Moment(step, op.name, op.stage.value, place.module, place.source, held)

    def parts(self) -> Iterator[Part]:
        """Make a part of each group of operations."""
        peak = self.timeline.peak_step
        running = self.op_at.get(peak)
        for key, ops in self.ops.items():
            lives = self.lives[key]
            kept = [life for life in lives if self._is_kept(life)]
            workspace = sum(op.workspace_bytes for op in ops if op.name == running)
            binding, over = self._binding(list(_gaps(lives)))
            yield Part(
                module=key[0],
                source=key[1],
                label=key[0] or key[2] or "(model)",
                operations=len(ops),
                time=sum(op.time * (self.runs[op.name] - self.again[op.name]) for op in ops),
                kept_bytes=sum(life.size_bytes for life in kept),
                packed_bytes=sum(life.size_bytes for life in kept if self._op(life).optional),
                recomputed_bytes=sum(life.size_bytes for life in lives if life.again),
                recomputations=sum(self.again[op.name] for op in ops),
                most_runs=max(self.runs[op.name] for op in ops),
                recompute_time=sum(op.time * self.again[op.name] for op in ops),
                other_ways=sum(op.alternative_of is not None for op in ops),
                peak_bytes=workspace
                + sum(life.size_bytes for life in lives if life.start <= peak < life.end),
                over_bytes=over,
                binding=binding,
                why="; ".join(self._reasons(ops, kept, binding, over)),
            )

    def _op(self, life: Life) -> Op:
        return self.graph.ops[self.graph.op_index[life.op]]

    def _is_kept(self, life: Life) -> bool:
        return self.between is not None and life.start < self.between < life.end

    def _reasons(
        self, ops: list[Op], kept: list[Life], binding: Moment | None, over: int | None
    ) -> Iterator[str]:
        if binding is not None and over is not None:
            if over <= 0:
                yield "made again for others: by itself it could be kept"
            else:
                at_peak = binding.step == self.timeline.peak_step
                where = "the peak" if at_peak else str(binding)
                yield f"made again: keeping it would be {mib(over)} over {self.limit} at {where}"
        if kept:
            makers = {life.op: self._op(life) for life in kept}.values()
            again = [op.time for op in makers if op.replayable]
            if again:
                yield f"kept: saves {ms(sum(again))} or more"
            if len(again) < len(makers):
                yield "held: runs once only"
        if any(op.optional for op in ops):
            yield "packed: kept in fewer bytes"

    def _binding(self, gaps: list[tuple[int, int, int]]) -> tuple[Moment, int] | tuple[None, None]:
        """Find the worst moment at which something was not held, and what keeping it would take."""
        if not gaps:
            return None, None
        worst = max((self.most.within(start, end) for start, end, _ in gaps), key=self.most.held)
        size = sum(size for start, end, size in gaps if start <= worst < end)
        return self.moment(worst), self.timeline.during_bytes[worst] + size - self.budget


def _key(op: Op, by: By, depth: int | None) -> _Key:
    if op.provenance is None:
        return "", "", op.name
    module = op.provenance.module
    if depth is not None:
        module = ".".join(module.split(".")[:depth])
    return module, op.provenance.source if by == "line" else "", ""


def _runs_again(ran: list[tuple[int, str]], lives: dict[_Key, list[Life]]) -> Counter[str]:
    """Count the runs of each operation that make nothing new."""
    new = {life.start for of_part in lives.values() for life in of_part if not life.again}
    seen: set[str] = set()
    again: Counter[str] = Counter()
    starts = {life.start for of_part in lives.values() for life in of_part}
    for step, op in ran:
        again[op] += step not in new if step in starts else op in seen
        seen.add(op)
    return again


def _gaps(lives: list[Life]) -> Iterator[tuple[int, int, int]]:
    """List from when to when a value that is made again is not held, and its size."""
    of_value: dict[str, list[Life]] = defaultdict(list)
    for life in lives:
        of_value[life.value].append(life)
    for of_one in of_value.values():
        for before, after in pairwise(of_one):
            if before.end < after.start:
                yield before.end, after.start, after.size_bytes


class _MostHeld:
    """Finds the step at which the most is held between two others, by a table of powers of two."""

    def __init__(self, during: tuple[int, ...]) -> None:
        self.held = during.__getitem__
        self._levels = [list(range(len(during)))]
        width = 1
        while 2 * width <= len(during):
            last = self._levels[-1]
            pairs = zip(last, last[width:], strict=False)
            self._levels.append([max(pair, key=self.held) for pair in pairs])
            width *= 2

    def within(self, start: int, end: int) -> int:
        """Find it from `start` up to, but not at, `end`."""
        level = (end - start).bit_length() - 1
        row = self._levels[level]
        return max(row[start], row[end - (1 << level)], key=self.held)
