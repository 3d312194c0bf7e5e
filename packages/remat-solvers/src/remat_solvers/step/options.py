"""Options of a region: schedules of its two halves, and what each costs the step around it.

A training step calls regions one after another, and their backward halves in reverse. While other
regions run, a region costs the step what it keeps between its halves; while it runs itself, what
that half holds. The op at the boundary of a region's graph (`loss`) stands for all that happens
between its halves, and must be computed once only.

All bytes are those of `remat_graph.simulate`: beyond the resident values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_graph import Compute, Footprint, Graph, Op, Schedule, freed_next, leave_late, simulate
from remat_solvers.core.pareto import pareto_front
from remat_solvers.core.problem import check_graph
from remat_solvers.core.wiring import MOST_BYTES
from remat_solvers.errors import InvalidProblem

__all__ = [
    "ANY_BYTES",
    "RegionBound",
    "RegionFront",
    "RegionOption",
    "boundary_op",
    "front_of",
    "incoming_bytes",
    "measure_option",
    "weigh_options",
]

ANY_BYTES = MOST_BYTES
"""As a limit in bytes: none."""

_CLOSE = 1e-9  # of a time, within which two are the same


@dataclass(frozen=True, slots=True)
class RegionOption:
    """A schedule of a region, and what it costs the step.

    `kept_bytes` is held between the halves: all that is alive while the op at the boundary runs,
    what the region returned included, less that op's workspace and less what it makes (the
    gradients that come in). `forward_bytes` is the most held at a step before it and
    `backward_bytes` at one after it: the incoming gradients included, and what was kept, but for
    what is freed right behind the boundary. `time` is that of both halves. No schedule in the order
    of the graph that keeps no more, and peaks no higher than the larger of the two, takes less than
    `lower_bound`; `None` if nothing is proved.
    """

    schedule: Schedule
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    time: float
    lower_bound: float | None

    @property
    def peak_bytes(self) -> int:
        """The most that either half holds."""
        return max(self.forward_bytes, self.backward_bytes)


@dataclass(frozen=True, slots=True)
class RegionBound:
    """No schedule within a box takes less than `time`, first computations in graph order.

    The box: at most `kept_bytes` kept between the halves, and at most `peak_bytes` held in either
    half; `ANY_BYTES` where there is no limit. A `time` of infinity says that there is no schedule.
    """

    kept_bytes: int
    peak_bytes: int
    time: float


@dataclass(frozen=True, slots=True)
class RegionFront:
    """The options of a region by rising `kept_bytes`, and what is proved of all its schedules.

    Every schedule in the order of the graph keeps at least `least_kept_bytes` and holds at least
    `least_forward_bytes` and `least_backward_bytes` in its halves.
    """

    graph: Graph
    options: tuple[RegionOption, ...]
    bounds: tuple[RegionBound, ...]
    least_kept_bytes: int
    least_forward_bytes: int
    least_backward_bytes: int

    def bound(self, kept_bytes: int = ANY_BYTES, peak_bytes: int = ANY_BYTES) -> float:
        """Give the most that is proved of the time within a box; infinity if nothing fits.

        Over growing `kept_bytes` it is the bound curve, which falls at the boxes in `bounds`.
        """
        if kept_bytes < self.least_kept_bytes or peak_bytes < max(
            self.least_forward_bytes, self.least_backward_bytes
        ):
            return math.inf
        proved = (
            bound.time
            for bound in self.bounds
            if bound.kept_bytes >= kept_bytes and bound.peak_bytes >= peak_bytes
        )
        return max(proved, default=self.graph.time)

    def best(self, kept_bytes: int = ANY_BYTES, peak_bytes: int = ANY_BYTES) -> RegionOption | None:
        """Give the fastest option within a box; of equal ones the first. `None` if none is."""
        fitting = (
            option
            for option in self.options
            if option.kept_bytes <= kept_bytes and option.peak_bytes <= peak_bytes
        )
        return min(fitting, key=lambda option: option.time, default=None)

    def with_(self, options: Iterable[RegionOption], bounds: Iterable[RegionBound]) -> RegionFront:
        """Merge in more options and bounds: the options that none other beats, bounded anew."""
        merged = dataclasses.replace(self, bounds=tuple(dict.fromkeys((*self.bounds, *bounds))))
        bounded = (
            dataclasses.replace(
                option,
                lower_bound=min(option.time, merged.bound(option.kept_bytes, option.peak_bytes)),
            )
            for option in front_of((*self.options, *options))
        )
        return dataclasses.replace(merged, options=tuple(bounded))


def boundary_op(graph: Graph) -> Op:
    """Return the op at the boundary, which stands for the rest of the step.

    Raises:
        InvalidProblem: if the graph is none, has alternatives or no backward half, or that op may
            run again or overwrite what it reads.
    """
    check_graph(graph)
    if graph.has_alternatives:
        raise InvalidProblem(
            "the graph has alternatives, among which options of regions do not choose; "
            "give it without them, by graph.without_alternatives()"
        )
    if graph.boundary is None:
        raise InvalidProblem(
            "the graph has no backward half; a region needs an op at its boundary, such as 'loss', "
            "which stands for what happens between its halves"
        )
    op = graph.ops[graph.boundary_index]
    if op.replayable:
        raise InvalidProblem(
            f"op {op.name!r} at the boundary stands for the rest of the step, but is replayable; "
            f"give it replayable=False"
        )
    if op.overwrites:
        raise InvalidProblem(
            f"op {op.name!r} at the boundary stands for the rest of the step, but overwrites "
            f"{op.overwrites[0][0]!r}, which the step may hold; give it overwrites=()"
        )
    return op


def incoming_bytes(graph: Graph) -> int:
    """Sum what the op at the boundary makes: the bytes of the gradients that come in.

    Raises: InvalidProblem: as `boundary_op`.
    """
    return sum(graph.value_by_name[v].size_bytes for v in boundary_op(graph).outputs)


def measure_option(
    graph: Graph, schedule: Schedule, *, lower_bound: float | None = None
) -> RegionOption:
    """Measure what a schedule of a region costs the step, by `remat_graph.simulate`.

    What is freed right behind the op at the boundary is kept between the halves, and gone when the
    second begins: outputs that the code between the regions lets go of.

    Where gradients leave at once, the option is that schedule with each behind all that reads its
    parameter.

    Raises:
        InvalidProblem: if the graph has no op at a boundary that runs once.
        InvalidSchedule: if the schedule is not legal.
    """
    op = boundary_op(graph)
    timeline = simulate(graph, schedule)
    if (late := leave_late(graph, schedule)) is not schedule:
        schedule, timeline = late, simulate(graph, late)
    steps, during = schedule.steps, timeline.during_bytes
    at = steps.index(Compute(op.name))
    kept = during[at] - op.workspace_bytes - incoming_bytes(graph)
    freed, sizes = freed_next(steps, at), graph.value_by_name
    gone = sum(sizes[value].size_bytes for value in freed.difference(op.outputs))
    second = during[at + 1 + len(freed) :]
    if second:
        second = (*second, kept - gone + incoming_bytes(graph))
    return RegionOption(
        schedule=schedule,
        kept_bytes=kept,
        forward_bytes=max(during[:at], default=0),
        backward_bytes=max(second or during[at + 1 :], default=0),
        time=timeline.time,
        lower_bound=lower_bound,
    )


def weigh_options(
    graph: Graph,
    footprints: Sequence[Footprint],
    sizes: Sequence[int],
    workspaces: Sequence[int],
    times: Sequence[float],
) -> list[RegionOption]:
    """Measure what schedules cost the step as `measure_option` does, for other sizes.

    These are, in the order of the graph, the bytes of its values, and the workspaces in bytes and
    the seconds of its ops. Each `Footprint` is that of a graph of the same ops, none of which lets
    a gradient leave.

    Raises:
        InvalidProblem: if the graph has no op at a boundary that runs once.
    """
    made, boundary = boundary_op(graph).outputs, graph.boundary_index
    incoming = sum(
        size for value, size in zip(graph.values, sizes, strict=True) if value.name in made
    )
    beside = workspaces[boundary] + incoming
    options = []
    for footprint in footprints:
        held = footprint.held_bytes(sizes, workspaces)
        at = footprint.ops.index(boundary)
        options.append(
            RegionOption(
                schedule=footprint.schedule,
                kept_bytes=held[at] - beside,
                forward_bytes=max(held[:at], default=0),
                backward_bytes=max(held[at + 1 :], default=0),
                time=footprint.seconds(times),
                lower_bound=None,
            )
        )
    return options


def front_of(options: Iterable[RegionOption]) -> tuple[RegionOption, ...]:
    """Leave out options that another is as good as in all of bytes and time; sort the rest.

    By rising bytes kept, then by rising peak. Of equal ones the first stays.
    """
    ordered = sorted(options, key=lambda o: (o.time, o.kept_bytes, o.peak_bytes))
    front = pareto_front(
        ordered,
        lambda o: (o.time, o.kept_bytes, o.forward_bytes, o.backward_bytes),
        close=_CLOSE,
    )
    return tuple(sorted(front, key=lambda o: (o.kept_bytes, o.peak_bytes, o.time)))
