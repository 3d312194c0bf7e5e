"""Finds the kind of a region that is new: known, of the user's plan, or solved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import cast

from remat.cache import remembered_costs
from remat.planning.cutting import hierarchy_for
from remat.planning.region_slices import (
    alone,
    has_room,
    in_finest_slices_alone,
    in_ways_alone,
    region_program,
)
from remat.planning.settings import Settings
from remat.planning.user_plan import UserPlan
from remat.session.kinds import RegionKind
from remat.session.step_kernels import StepKernels
from remat_graph import Graph, Numerics, simulate
from remat_graph.torch import CallSizes, Capture, Cost, SizedCapture
from remat_solvers import store_all
from remat_solvers.step import RegionFront, front_from_schedules, measure_option, region_front

__all__ = ["KindFinder"]

_SECONDS, _SECONDS_PER_OP = 0.5, 0.02  # for the options of a region
_SIZES = 3  # of the same ops, whose options are solved for; others take their schedules


@dataclass(eq=False)
class KindFinder:
    """Adds to the `kinds` of regions that were met; `user_plan` is an earlier process's.

    `kernels` says which of them run compiled groups.
    """

    settings: Settings
    kinds: list[RegionKind]
    user_plan: UserPlan | None
    kernels: StepKernels

    def __post_init__(self) -> None:
        """Add those of the user's plan."""
        plan = self.user_plan
        if plan is not None:
            plan.check_numerics(self.settings.numerics)
            self.kinds.extend(
                RegionKind(
                    f"region {at} of {plan.name}", kind.front, kind.missing, family=at, met=False
                )
                for at, kind in enumerate(plan.plan.kinds)
            )

    def find(
        self,
        name: str,
        capture: Capture,
        costs: dict[str, Cost],
        position: int | None,
        budget: int | None,
    ) -> tuple[int, Capture]:
        """Give the number of a region's kind, and its capture as that has it.

        What has been measured is in `costs`, and is added to. Nothing is solved for a region of a
        known kind, nor for one of the user's plan. `position` is that of its call in the
        first step, `None` in a later one. Where rounding may differ, it runs in slices if it must
        within the `budget`, or within that fraction of storing all of it while nothing is known.

        Raises:
            PlanMismatch: in the first step, if it is none of the regions of that plan.
        """
        if isinstance(capture, SizedCapture):
            found = self._as_nearby(name, capture, budget)
            if found is not None:
                return found
        if self.settings.costs == "measure":
            with remembered_costs(costs, capture.program.device, self.settings.costs):
                capture = capture.costed("measure", costs)
        number = self._known(capture)
        if number < len(self.kinds):
            kind = self.kinds[number]
            if kind.whole is None:
                return number, capture
            return number, in_ways_alone(capture, kind.sliced, kind.unfused)
        of_plan = self._of_user_plan(name, capture, position)
        if of_plan is not None:
            return of_plan
        program, least = self._program(capture, budget)
        program = self.kernels.of(program)
        self._add(self._solved(name, alone(program)), capture, program, least_bytes=least)
        return number, alone(program)

    def _known(self, capture: Capture) -> int:
        """Give the number of the kind that a capture is of; of a new one, the next."""
        kinds = enumerate(self.kinds)
        return next((n for n, kind in kinds if kind.has(capture.graph)), len(self.kinds))

    def _add(
        self,
        kind: RegionKind,
        capture: Capture,
        program: Capture,
        *,
        is_measured: bool = True,
        least_bytes: int | None,
    ) -> None:
        """Add the kind of a capture, which runs as a program."""
        if program is not capture:
            kind = replace(
                kind, whole=capture.graph, sliced=program.sliced, unfused=program.unfused
            )
        if self.settings.numerics is None:
            kind = replace(kind, find_in_slices=partial(self._in_slices, capture))
        if is_measured and isinstance(capture, SizedCapture):
            kind = replace(kind, measured=capture, program=cast("SizedCapture", program))
        self.kinds.append(replace(kind, least_bytes=least_bytes, deferred=_deferred(program)))

    def _as_nearby(
        self, name: str, capture: SizedCapture, budget: int | None
    ) -> tuple[int, Capture] | None:
        """Take the program and the schedules of a region of sizes that are near, and are known.

        Its costs are in proportion: nothing is measured, compiled or solved. `None` if no size is
        near, or ops may need too much in a program that was chosen for a smaller one.
        """
        known = [kind.measured for kind in self.kinds if kind.measured is not None]
        known = [each for each in known if each.is_of_trace(capture)]
        nearest = capture.nearest(known) if len(known) >= _SIZES else None
        if nearest is None:
            return None
        near = next(kind for kind in self.kinds if kind.measured is nearest)
        whole = capture.costed_like(nearest)
        number, call = self._known(whole), CallSizes(capture.symbols, capture.leaves)
        has_other_ops = near.program is not None and near.program is not nearest
        program = near.program.at(call) if near.program and has_other_ops else whole
        if program is None:
            return None
        if number == len(self.kinds):
            is_larger = has_other_ops and nearest.ratio(call) > 1.0
            if is_larger and budget is not None and not has_room(program, budget):
                return None
            graph = alone(program).graph
            front = front_from_schedules(graph, near.footprints)
            kind = RegionKind(
                name, front, capture.missing, near.family, plain_bytes=_plain(program), near=near
            )
            self._add(
                kind, whole, program, is_measured=False, least_bytes=0 if has_other_ops else None
            )
        return number, alone(program)

    def _program(self, capture: Capture, budget: int | None) -> tuple[Capture, int | None]:
        """Choose the program of a region; bound what any such program needs."""
        numerics, asked = self.settings.numerics, self.settings.budget
        if numerics is None or not numerics.allows(Numerics.ROUNDING):
            return capture, None
        if budget is None and asked.fraction is not None:
            stored = simulate(capture.graph, store_all(capture.graph)).peak_bytes
            budget = int(asked.fraction * stored)
        return region_program(capture, budget)

    def _in_slices(self, capture: Capture) -> RegionFront | None:
        """Find the options of a region in its finest slices, if it can be cut."""
        sliced = in_finest_slices_alone(capture)
        if sliced is None:
            return None
        return region_front(
            sliced.graph, solver="refine", limit_seconds=self._limit_seconds(sliced.graph)
        )

    def _limit_seconds(self, graph: Graph) -> float:
        """Give the seconds that are spent on the options of a region."""
        limit, of_user = _SECONDS + _SECONDS_PER_OP * len(graph.ops), self.settings.limit_seconds
        return limit if of_user is None else min(limit, of_user)

    def _solved(self, name: str, capture: Capture) -> RegionKind:
        """Find the options of a region; of one of many sizes those of the nearest of these."""
        settings, graph = self.settings, capture.graph
        alike = list(islice((kind for kind in self.kinds if kind.is_like(capture)), _SIZES))
        family = alike[0].family if alike else len(self.kinds)
        if len(alike) >= _SIZES:
            all_bytes = _bytes(graph)
            near = min(alike, key=lambda kind: abs(math.log(_bytes(kind.front.graph) / all_bytes)))
            front = front_from_schedules(graph, near.footprints)
            return RegionKind(name, front, capture.missing, family, plain_bytes=_plain(capture))
        limit = self._limit_seconds(graph)
        solver = "refine" if settings.solver == "auto" else settings.solver
        hierarchy = hierarchy_for(graph, solver, settings.partitioner)
        front = region_front(graph, solver=solver, limit_seconds=limit, hierarchy=hierarchy)
        return RegionKind(name, front, capture.missing, family, plain_bytes=_plain(capture))

    def _of_user_plan(
        self, name: str, capture: Capture, position: int | None
    ) -> tuple[int, Capture] | None:
        """Find the kind of a region among those of the user's plan that were not met yet.

        Raises:
            PlanMismatch: as `find`.
        """
        if self.user_plan is None:
            return None
        unmet = [number for number, kind in enumerate(self.kinds) if not kind.met]
        for number in unmet:
            fitted = self.user_plan.fit_kind(number, capture)
            if fitted is not None:
                program, front = fitted
                self.kinds[number] = RegionKind(
                    name,
                    front,
                    program.missing,
                    family=number,
                    plain_bytes=_plain(program),
                    whole=program.without_alternatives().graph if program.has_other_ops else None,
                    sliced=program.sliced,
                    unfused=program.unfused,
                    least_bytes=0 if program.has_other_ops else None,
                    deferred=_deferred(program),
                )
                return number, program
        if position is not None:
            raise self.user_plan.mismatch(position, name, capture)
        return None


def _bytes(graph: Graph) -> int:
    return max(1, sum(value.size_bytes for value in graph.values))


def _deferred(program: Capture) -> tuple[tuple[int, int], ...]:
    """List the outputs that a program does not make, and their bytes."""
    positions = sorted(program.program.deferred)
    return tuple((each, program.deferred_bytes(frozenset({each}))) for each in positions)


def _plain(capture: Capture) -> int | None:
    """Give what a region keeps for a backward over all outputs, if what it stores is not that.

    Some gradients are missing, some outputs are not made, or some of it is made in slices.
    """
    if not (capture.missing or capture.program.deferred or capture.has_other_ops):
        return None
    graph = capture.without_alternatives().variant(frozenset()).graph
    return measure_option(graph, store_all(graph)).kept_bytes
