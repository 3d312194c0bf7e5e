"""A call of a new size runs by the schedule of a size that is near, where the simulator says so.

Sizes are in buckets: below a size that was rehearsed, and up to a quarter above it. Nothing is
captured, measured or solved then: the program is read off that of the other size, its operators are
taken to need no less workspace, and what the rehearsal took beyond the prediction is set aside. A
size of which any value takes more than in the one whose plan it takes is rehearsed first, and all
below it are not. The first step of each is recorded as any other's; where it is over the budget,
that is told, and each size is rehearsed from then on.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from remat.budgets.blocks import later_blocks
from remat.planning.one_region import readable_plan
from remat.planning.planner import plain_peak, rehearsed, scalar_bytes
from remat.planning.ranks import has_other_ranks
from remat.planning.settings import Settings
from remat.planning.solving import adapted
from remat.planning.task import RunnablePlan
from remat.session.region import Region, device_of, is_unrehearsed, keep
from remat_exec import BudgetExceeded, Executor, Loss, Peak, Runnable
from remat_graph import Graph, Numerics, Schedule, Solution, simulate
from remat_graph.torch import (
    BUCKET,
    CallSizes,
    SizedCapture,
    SizedRegion,
    collector_at_rest,
    tensors_of_call,
)
from remat_solvers import store_all

__all__ = ["plan_nearby"]

logger = logging.getLogger(__name__)

_MOST_TRIED = 3


def plan_nearby(
    settings: Settings,
    executor: Executor,
    region: Region,
    numbers: tuple[Any, ...],
    inputs: Sequence[Any],
    loss: Loss | None,
) -> RunnablePlan | None:
    """Plan a call by the plan of a size that is near; `None` if it is to be planned by itself.

    That is where no size is near, no known schedule fits, a plan is asked for or shared with other
    ranks, or kernels are there by which no such size was planned. A `loss` is what is run of what
    the region returns.
    """
    if region.rehearses_all_sizes or numbers in region.left or not region.plans:
        return None
    if settings.region_plan is not None or has_other_ranks():
        return None
    start = time.perf_counter()
    loss = loss if region.shown.expected is None else None

    def rehearse(executable: Runnable, budget: int) -> Peak:
        tensors, _ = tensors_of_call(inputs)
        return rehearsed(executable, region.graph, tensors, loss, budget)

    runs_groups = settings.runs_groups_on(device_of(inputs))
    larger: list[tuple[RunnablePlan, SizedCapture]] = []
    budgets = [p.plan.budget_bytes for p in region.plans.values() if isinstance(p, RunnablePlan)]
    budget = max(budgets, default=0)  # a fraction is of the most that plain took
    for other, call in _nearest(settings, region, inputs):
        near = cast("SizedCapture", other.capture)
        if runs_groups and region.kernels.are_due(numbers, near, wait=settings.wait):
            return None
        with collector_at_rest():
            captured = near.at(call)
        if captured is None:
            continue
        if near.has_same_sizes(call):
            return _same(executor, region, numbers, other, captured)
        planned = _planned_by(executor, region, other, captured, rehearse, start, budget)
        if planned is not None:
            return planned
        larger += [(other, captured)] if near.ratio(call) > 1.0 else []
    if not larger or settings.budget.fraction is None or settings.costs != "measure":
        return None
    plain = _plain_bytes(region, larger[0][1], inputs, loss)
    if plain is None:
        return None
    budget = max(budget, settings.budget.resolve(lambda: plain))
    for other, captured in larger:  # of a larger step a fraction is more
        planned = _planned_by(executor, region, other, captured, rehearse, start, budget, plain)
        if planned is not None:
            return planned
    return None


def _plain_bytes(
    region: Region, captured: SizedCapture, inputs: Sequence[Any], loss: Loss | None
) -> int | None:
    """Measure what a plain step of a size takes; `None` if it cannot be run."""
    graph = captured.without_alternatives().graph
    everything = simulate(graph, store_all(graph)).peak_bytes
    plain = plain_peak(region.graph, tuple(inputs), {}, captured, everything, loss)
    return None if plain is None else plain + scalar_bytes(captured.program.device.type)


def _nearest(
    settings: Settings, region: Region, inputs: Sequence[Any]
) -> Iterator[tuple[RunnablePlan, CallSizes]]:
    """Yield the plans that were rehearsed and have this size in their bucket.

    First those of sizes that are no smaller, then those of smaller ones, the nearest first; if any
    have compiled groups, only those. Of a fraction, only those whose budget is of their own sizes
    serve larger ones. With each comes what its trace reads off the call.
    """
    rehearsed: dict[int, RunnablePlan] = {}
    for plan in region.plans.values():
        if isinstance(plan, RunnablePlan) and not is_unrehearsed(plan):
            rehearsed[id(plan.plan)] = plan
    sizes: dict[SizedRegion, CallSizes | None] = {}
    found: list[tuple[bool, float, int, RunnablePlan, CallSizes]] = []
    for at, plan in enumerate(rehearsed.values()):
        trace = plan.capture.region if isinstance(plan.capture, SizedCapture) else None
        if trace is None:
            continue
        if trace not in sizes:
            sizes[trace] = trace.sizes_of(inputs)
        call = sizes[trace]
        if call is not None:
            ratio = cast("SizedCapture", plan.capture).ratio(call)
            has_own_budget = settings.budget.fraction is None or plan.plan.plain_peak_bytes
            if ratio <= (BUCKET if has_own_budget else 1.0):
                found.append((ratio > 1.0, abs(math.log(ratio)), at, plan, call))
    grouped = [each for each in found if each[3].capture.unfused is not None]
    found = sorted(grouped or found, key=lambda each: each[:3])
    yield from ((plan, call) for *_, plan, call in found[:_MOST_TRIED])


def _same(
    executor: Executor,
    region: Region,
    numbers: tuple[Any, ...],
    other: RunnablePlan,
    captured: SizedCapture,
) -> RunnablePlan:
    """Run by the plan of another call, where all tensors are as in that, and numbers alone differ.

    If the first step by it was seen to be within the budget, this one is.
    """
    base = other.capture
    same = dataclasses.replace(
        captured, graph=base.graph, loss=base.loss, released_outputs=base.released_outputs
    )
    if any(plan is other.plan for plan in region.checked.values()):
        keep(region.checked, numbers, other.plan)
    executable = region.bucket_of(other, executor).runnable(same)
    return RunnablePlan(other.plan, same, executable, other.watched)


def _planned_by(
    executor: Executor,
    region: Region,
    other: RunnablePlan,
    captured: SizedCapture,
    rehearse: Callable[[Runnable, int], Peak],
    start: float,
    budget: int,
    plain: int | None = None,
) -> RunnablePlan | None:
    """Plan by the schedule of another size, or by storing everything, if either fits the budget.

    That is of what `plain` takes of this size, if given. What the other size has in slices is whole
    then. It is rehearsed if any of its values, or what an op takes while it runs, is more than for
    the other size.
    """
    captured = _with_seen_loss(region, captured)
    before = other.capture.graph
    sizes = captured.sizes_of(before)
    most = sum(value.size_bytes for value in before.values)
    grown = max(1.0, sum(sizes) / max(1, most))
    if grown > BUCKET**2:  # by a number that is no size
        return None
    beyond = (other.plan.measured_peak_bytes or 0) - other.executable.peak_bytes
    target = budget - scalar_bytes(captured.program.device.type) - math.ceil(max(0, beyond) * grown)
    if grown == 1.0:  # what was predicted for the other was measured to be within its budget
        target = max(target, other.executable.peak_bytes)
    bucket = region.bucket_of(other, executor)
    if bucket.has(captured, sizes) and not bucket.may_run_whole(captured, target):
        return bucket.planned(captured, sizes, budget, target)
    with collector_at_rest():
        captured, solution = _fastest(captured, other.plan.schedule, target)
    if solution is None or solution.schedule is None:
        return None
    executable = executor(captured, solution.schedule, budget_bytes=budget)
    peak: Peak | None = None
    if _takes_more(captured.graph, before):
        try:
            peak = rehearse(executable, budget)
        except BudgetExceeded:
            return None
        if peak.peak_bytes + later_blocks(peak) > budget:
            return None
    plan = readable_plan(
        captured,
        solution,
        budget,
        capture_seconds=time.perf_counter() - start,
        no_groups=other.plan.no_groups,
        source=executable.source,
        plain_peak_bytes=plain,
    )
    if peak is not None:
        plan = dataclasses.replace(
            plan, measured_peak_bytes=peak.peak_bytes, measured_curve=peak.curve
        )
    logger.debug("%s runs by the plan of a size that is near", region.name)
    return RunnablePlan(plan, captured, executable, other.watched)


def _with_seen_loss(region: Region, captured: SizedCapture) -> SizedCapture:
    """Leave room for what the code between forward and backward was seen to take."""
    if region.seen_loss is None:
        return captured
    loss = captured.loss.at_least(region.seen_loss.of(captured))
    return captured.with_loss(loss)


def _fastest(
    captured: SizedCapture, schedule: Schedule, target: int
) -> tuple[SizedCapture, Solution | None]:
    """Choose between a schedule and storing everything; what is in slices may be whole for that."""
    solution = adapted(captured.graph, target, [schedule])
    if captured.sliced:
        plain = captured.without_alternatives().graph
        stored = adapted(plain, target, [store_all(plain)])
        if stored is not None and (solution is None or stored.time < solution.time):
            with collector_at_rest():
                whole = captured.unsliced
            if whole is not None:
                whole = whole.with_loss(captured.loss)
                stored = adapted(whole.graph, target, [store_all(whole.graph)])
                captured, solution = (captured, solution) if stored is None else (whole, stored)
    numerics = captured.numerics
    if solution is not None and numerics is not None and numerics.allows(Numerics.ROUNDING):
        solution = dataclasses.replace(solution, lower_bound=None)  # of this program alone
    return captured, solution


def _takes_more(graph: Graph, before: Graph) -> bool:
    """Whether a value, or what an op but the loss takes beside, is more than in another graph."""
    values = {value.name: value.size_bytes for value in before.values}
    beside = {op.name: op.workspace_bytes for op in before.ops}
    ops = (op for op in graph.ops if op.name != graph.boundary)
    return any(value.size_bytes > values.get(value.name, -1) for value in graph.values) or any(
        op.workspace_bytes > beside.get(op.name, -1) for op in ops
    )
