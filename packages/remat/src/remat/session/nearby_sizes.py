"""A call of a new size runs by the schedule of a size that is near, where the simulator says so.

Sizes are in buckets: below a size that was planned and rehearsed, and up to a quarter above it.
Nothing is captured, measured, solved or rehearsed then: the program is read off that of the other
size, its operators are taken to need no less workspace, and what the rehearsal took beyond the
prediction is set aside. The first step by such a plan is recorded as any other's; where it is over
the budget, that is told, and each size is rehearsed from then on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from remat.planning.planner import SCALAR_BYTES, RunnablePlan
from remat.planning.ranks import has_other_ranks
from remat.planning.settings import Settings
from remat.planning.solving import adapted
from remat.plans.origin import Origin
from remat.report.readable_plan import ReadablePlan
from remat.session.region import Region, is_unrehearsed
from remat_exec import get_executor
from remat_graph import Graph
from remat_graph.torch import BUCKET, SizedCapture

__all__ = ["plan_nearby"]

logger = logging.getLogger(__name__)

_MOST_TRIED = 3


def plan_nearby(
    settings: Settings, region: Region, numbers: tuple[Any, ...], inputs: Sequence[Any]
) -> RunnablePlan | None:
    """Plan a call by the plan of a size that is near; `None` if it is to be planned by itself.

    That is where no size is near, no known schedule fits, or a plan is asked for or shared with
    other ranks.
    """
    if region.rehearses_all_sizes or numbers in region.left or not region.plans:
        return None
    if settings.region_plan is not None or has_other_ranks():
        return None
    start = time.perf_counter()
    for other in _nearest(region, inputs):
        captured = other.capture.at(inputs) if isinstance(other.capture, SizedCapture) else None
        if captured is not None:
            planned = _planned_by(settings, region, other, captured, start)
            if planned is not None:
                return planned
    return None


def _nearest(region: Region, inputs: Sequence[Any]) -> Iterator[RunnablePlan]:
    """Yield the plans that were rehearsed and have this size in their bucket, the nearest first."""
    found: list[tuple[float, int, RunnablePlan]] = []
    for at, plan in enumerate(region.plans.values()):
        if not isinstance(plan, RunnablePlan) or is_unrehearsed(plan):
            continue
        capture = plan.capture
        if isinstance(capture, SizedCapture):
            ratio = capture.ratio_of(inputs)
            if ratio is not None and ratio <= BUCKET:
                found.append((abs(math.log(ratio)), at, plan))
    yield from (plan for *_, plan in sorted(found)[:_MOST_TRIED])


def _planned_by(
    settings: Settings, region: Region, other: RunnablePlan, captured: SizedCapture, start: float
) -> RunnablePlan | None:
    """Plan by the schedule of another size, or by storing everything, if either fits."""
    if region.seen_loss is not None:
        loss = captured.loss.at_least(region.seen_loss.of(captured))
        captured = cast("SizedCapture", captured.with_loss(loss))
    graph, device = captured.graph, captured.program.device
    budgets = [p.plan.budget_bytes for p in region.plans.values() if isinstance(p, RunnablePlan)]
    budget = max(budgets)  # a fraction is of the most that plain took
    beyond = (other.plan.measured_peak_bytes or 0) - other.executable.peak_bytes
    grown = max(1.0, _bytes(graph) / max(1, _bytes(other.capture.graph)))
    if grown > BUCKET**2:  # by a number that is no size
        return None
    aside = SCALAR_BYTES["cuda" if device.type == "cuda" else "cpu"]
    target = budget - aside - math.ceil(max(0, beyond) * grown)
    if grown == 1.0:  # what was predicted for the other was measured to be within its budget
        target = max(target, other.executable.peak_bytes)
    solution = adapted(graph, target, [other.plan.schedule])
    if solution is None or solution.schedule is None:
        return None
    executable = get_executor(settings.executor)(captured, solution.schedule, budget_bytes=budget)
    plan = ReadablePlan.of_one_region(
        graph,
        solution.schedule,
        solution,
        budget,
        missing=captured.missing,
        released_outputs=captured.released_outputs,
        deferred=tuple(
            (position, captured.deferred_bytes(frozenset({position})))
            for position in sorted(captured.program.deferred)
        ),
        capture_seconds=time.perf_counter() - start,
        source=executable.source,
        origin=Origin.here(device),
    )
    logger.debug("%s runs by the plan of a size that is near", region.name)
    return RunnablePlan(plan, captured, executable, other.watched)


def _bytes(graph: Graph) -> int:
    return sum(value.size_bytes for value in graph.values)
