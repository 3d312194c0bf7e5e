"""The sizes that are below a rehearsed one: no value of theirs takes more.

A schedule takes no more for these, and a `Footprint` says how much less. Its code is of any size.
So a call of such a size is planned in about a millisecond: nothing is simulated, solved or
measured, and what the plan says of it is made when it is read.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from remat.planning.one_region import readable_plan
from remat.planning.solving import KNOWN_SCHEDULE
from remat.planning.task import RunnablePlan
from remat.report.readable_plan import ReadablePlan
from remat_exec import Ability, Executor, Runnable, abilities_of
from remat_graph import (
    Footprint,
    Graph,
    InvalidSchedule,
    Numerics,
    Schedule,
    Solution,
    Status,
    simulate,
)
from remat_graph.torch import LossCost, SizedCapture
from remat_solvers import store_all

__all__ = ["Bucket"]


class _Way:
    """A schedule for the sizes of a bucket, and what runs it, once it runs for one of them.

    Raises:
        InvalidSchedule: if it is no schedule of the graph of the largest of these sizes.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.schedule, self.time = schedule, simulate(graph, schedule).time
        self.runnable: Any = None
        self._footprint = Footprint(graph, schedule)
        self._workspaces = [op.workspace_bytes for op in graph.ops]
        self._loss = graph.boundary_index

    def peak_bytes(self, sizes: Sequence[int], loss: LossCost) -> int:
        """Give its peak where values take so many bytes; ops take no less beside than before."""
        workspaces = list(self._workspaces)
        workspaces[self._loss] = loss.workspace_bytes
        return max(self._footprint.held_bytes(sizes, workspaces))


class Bucket:
    """The sizes below that of a `plan`, which was rehearsed."""

    def __init__(self, plan: RunnablePlan, executor: Executor) -> None:
        self.plan = plan
        self._executor = executor
        graph = plan.capture.graph
        self._bytes = [value.size_bytes for value in graph.values]
        self._ways: list[_Way] = []
        for schedule in dict.fromkeys((store_all(graph), plan.plan.schedule)):
            with contextlib.suppress(InvalidSchedule):  # of a graph whose outputs were let go of
                self._ways.append(_Way(graph, schedule))
        self._ways.sort(key=lambda way: way.time)

    @functools.cached_property
    def _whole(self) -> Graph:
        return self.plan.capture.without_alternatives().graph

    @functools.cached_property
    def _stored_whole(self) -> _Way:
        return _Way(self._whole, store_all(self._whole))

    def has(self, captured: SizedCapture, sizes: Sequence[int]) -> bool:
        """Whether a size is in it, of which the values take so many bytes.

        What is within a slice is no value: there no number may be more.
        """
        program, other = captured.program, self.plan.capture.program
        if program.leaving or program.overwrites != other.overwrites:
            return False  # which gradients leave together is by sizes, and what runs in place too
        if captured.sliced and not cast("SizedCapture", self.plan.capture).is_above(captured):
            return False
        return all(size <= most for size, most in zip(sizes, self._bytes, strict=True))

    def may_run_whole(self, captured: SizedCapture, target: int) -> bool:
        """Whether what the plan has in slices may all be stored whole, for a size that is in it."""
        if not captured.sliced:
            return False
        sizes = captured.without_alternatives().sizes_of(self._whole)
        return self._stored_whole.peak_bytes(sizes, captured.loss) <= target

    def planned(
        self, captured: SizedCapture, sizes: Sequence[int], budget: int, target: int
    ) -> RunnablePlan | None:
        """Plan a size that is in it by the fastest way within a target; `None` if none is."""
        started = time.perf_counter()
        for way in self._ways:
            peak = way.peak_bytes(sizes, captured.loss)
            if peak <= target:
                break
        else:
            return None
        runnable = self._runnable(way, captured, peak, budget)
        facts: dict[str, Any] = {
            "no_groups": self.plan.plan.no_groups,
            "capture_seconds": time.perf_counter() - started,
        }
        make = functools.partial(self._readable, captured, way.schedule, budget, runnable, facts)
        plan = ReadablePlan.later(
            make, way.schedule, budget_bytes=budget, solver=KNOWN_SCHEDULE, **facts
        )
        return RunnablePlan(plan, captured, runnable, self.plan.watched)

    def runnable(self, captured: SizedCapture) -> Runnable:
        """Give what runs the plan for a capture of the same sizes, and other numbers."""
        plan = self.plan.plan
        way = next(way for way in self._ways if way.schedule == plan.schedule)
        return self._runnable(way, captured, self.plan.executable.peak_bytes, plan.budget_bytes)

    def _runnable(self, way: _Way, captured: SizedCapture, peak: int, budget: int) -> Runnable:
        """Give what runs a way, by the code of an earlier size if it is for all."""
        runnable: Runnable | None = None
        if way.runnable is not None:
            runnable = way.runnable.at(captured, peak, budget)
        if runnable is None:
            runnable = self._executor(captured, way.schedule, budget_bytes=budget)
            if Ability.RUNS_OTHER_SIZES in abilities_of(self._executor):
                way.runnable = runnable
        return runnable

    def _readable(
        self,
        captured: SizedCapture,
        schedule: Schedule,
        budget: int,
        runnable: Runnable,
        facts: Mapping[str, Any],
    ) -> ReadablePlan:
        """Say what was planned."""
        graph, numerics = captured.graph, captured.numerics
        timeline = simulate(graph, schedule)
        is_bound = numerics is None or not numerics.allows(Numerics.ROUNDING)
        solution = Solution(
            Status.FEASIBLE, schedule, timeline.time, timeline.peak_bytes,
            graph.least_time if is_bound else None, KNOWN_SCHEDULE, 0.0,
        )  # fmt: skip
        return readable_plan(captured, solution, budget, source=runnable.source, **facts)
