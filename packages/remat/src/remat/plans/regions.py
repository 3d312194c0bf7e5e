"""Regions of a planned step: the options of their calls, and what these add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat_graph import Compute, Graph, Schedule, simulate
from remat_solvers.step import RegionFront, RegionOption, TimeStep

__all__ = ["PlannedRegion", "lone_front", "lone_option", "peak_of"]


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """A graph that calls of a step share: its options, and what was taken of those calls.

    `front.options` are schedules of it, in the order in which they keep more. `missing` are the
    positions of outputs whose gradients are taken not to come, `released_outputs` those of outputs
    that the user is taken to hold no more when the backward starts, of a region that is all of the
    step. Of others all are: what is held is part of the moments. `laid_out` are the ops that run in
    channels_last, as `Capture.laid_out` numbers them, `sliced` the kinds of cuts that run in
    slices, as `Capture.sliced` has them. `deferred` are positions of outputs that no step makes,
    and their bytes. `unfused` are the ops that are in no compiled group, as `Capture.unfused`
    numbers them; `None` if there are no groups. `gives_again` is `Capture.gives_again`.
    """

    front: RegionFront
    missing: frozenset[int] = frozenset()
    released_outputs: frozenset[int] = frozenset()
    laid_out: tuple[int, ...] = ()
    sliced: tuple[tuple[int, int], ...] = ()
    deferred: tuple[tuple[int, int], ...] = ()
    unfused: tuple[int, ...] | None = None
    gives_again: bool = False


def lone_front(graph: Graph, schedule: Schedule) -> RegionFront:
    """Give the only option of a region that is all of the step."""
    return RegionFront(graph, (lone_option(graph, schedule),), (), 0, 0, 0)


def lone_option(
    graph: Graph, schedule: Schedule, *, lower_bound: float | None = None
) -> RegionOption:
    """Measure a schedule of a region that is all of the step, of any graph, also with alternatives.

    What is between its halves, as the loss, counts to the second; it keeps nothing for others.

    Raises:
        InvalidSchedule: if the schedule is not legal.
    """
    timeline = simulate(graph, schedule)
    between = Compute(graph.ops[graph.boundary_index].name) if graph.boundary else None
    at = schedule.steps.index(between) if between in schedule.steps else len(schedule)
    first, second = timeline.during_bytes[:at], timeline.during_bytes[at:]
    return RegionOption(
        schedule, 0, max(first, default=0), max(second, default=0), timeline.time, lower_bound
    )


def peak_of(moments: Sequence[TimeStep], options: Sequence[RegionOption]) -> int:
    """Give the most that is held at any moment if each call runs by this option.

    Without moments one region is all of the step: the most is what its halves hold.
    """
    most = 0 if moments else options[0].peak_bytes
    for moment in moments:
        held = moment.fixed_bytes + sum(n * options[r].kept_bytes for r, n in moment.live)
        if moment.running is not None:
            region, half = moment.running
            option = options[region]
            held += option.forward_bytes if half == "forward" else option.backward_bytes
        most = max(most, held)
    return most
