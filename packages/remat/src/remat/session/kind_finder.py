"""Finds the kind of a region that is new: known, of the user's plan, or solved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import cast

from remat.cache import remembered_costs
from remat.planning.cutting import hierarchy_for
from remat.planning.near_graphs import carried_over
from remat.planning.region_slices import (
    alone,
    has_room,
    in_finest_slices_alone,
    in_ways_alone,
    region_program,
)
from remat.planning.settings import Settings
from remat.planning.user_plan import UserPlan
from remat.session.awaited_plan import outline_of
from remat.session.kinds import RegionKind, deferred_by, plain_bytes
from remat.session.near_kinds import Kinds, NearKind, OtherSizes, sizes_of
from remat.session.step_kernels import StepKernels
from remat_graph import Footprint, Graph, Numerics, Schedule, simulate
from remat_graph.torch import CallSizes, Capture, Cost, SizedCapture
from remat_solvers import store_all
from remat_solvers.step import RegionFront, front_from_schedules, region_front

__all__ = ["KindFinder"]

_SECONDS, _SECONDS_PER_OP = 0.5, 0.02  # for the options of a region
_SHARE_OF_KNOWN = 0.25  # of them, where those of a near region are where the search begins
_SIZES = 3  # of the same ops, whose options are solved for; others take their schedules


@dataclass(eq=False)
class KindFinder:
    """Adds to the `kinds` of regions that were met; `user_plan` is an earlier process's.

    `kernels` says which of them run compiled groups.
    """

    settings: Settings
    kinds: Kinds
    user_plan: UserPlan | None
    kernels: StepKernels

    def __post_init__(self) -> None:
        """Add those of the user's plan."""
        plan = self.user_plan
        if plan is not None:
            plan.check_numerics(self.settings.numerics)
            for at, kind in enumerate(plan.plan.kinds):
                name = f"region {at} of {plan.name}"
                self.kinds.add(RegionKind(name, kind.front, kind.missing, family=at, met=False))

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
            PlanMismatch: in the first step, if it is none of that plan, nor named in it as earlier.
        """
        if isinstance(capture, SizedCapture):
            found = self._as_nearby(name, capture, budget)
            if found is not None:
                return found
        if self.settings.costs == "measure":
            with remembered_costs(costs, capture.program.device, self.settings.costs):
                capture = capture.costed("measure", costs)
        known = next(((n, k) for n, k in self.kinds.items() if k.runs(capture)), None)
        if known is not None:
            number, kind = known
            if kind.whole is None:
                return number, capture
            return number, in_ways_alone(capture, kind.sliced, kind.unfused)
        of_plan = self._of_user_plan(name, capture, position)
        if of_plan is not None:
            return of_plan
        program, least = self._program(capture, budget)
        program = self.kernels.of(program)
        kind = self._solved(name, alone(program))
        if program is not capture:
            kind = replace(
                kind, whole=capture.graph, sliced=program.sliced, unfused=program.unfused
            )
        kind = replace(
            kind, find_in_slices=self._finding_slices(capture), least_bytes=least,
            deferred=deferred_by(program),
        )  # fmt: skip
        number = self.kinds.add(kind)
        if isinstance(capture, SizedCapture):
            of_trace = OtherSizes(number, kind, capture, cast("SizedCapture", program))
            if not of_trace.leaves:
                self.kinds.measured.append(of_trace)
        return number, alone(program)

    def _as_nearby(
        self, name: str, capture: SizedCapture, budget: int | None
    ) -> tuple[int, Capture] | None:
        """Take the program and the schedules of a region of sizes that are near, and are known.

        Its costs are in proportion: nothing is measured, compiled or solved. `None` if no size is
        near, or ops may need too much in a program that was chosen for a smaller one.
        """
        measured = [each for each in self.kinds.measured if each.capture.is_of_trace(capture)]
        if len(measured) < _SIZES:
            return None
        number, near = self.kinds.of_sizes(sizes_of(capture)) or (None, None)
        if near is None:
            nearest = capture.nearest([each.capture for each in measured])
            near = next((each for each in measured if each.capture is nearest), None)
        if near is None:
            return None
        whole, call = capture.costed_like(near.capture), CallSizes(capture.symbols, capture.leaves)
        program = near.program.at(call) if near.has_other_ops else whole
        if program is None or program.program.overwrites != near.program.program.overwrites:
            return None
        if number is None:
            is_larger = near.has_other_ops and near.capture.ratio(call) > 1.0
            if is_larger and budget is not None and not has_room(program, budget):
                return None
            kind = NearKind(name, near, whole, program, self._finding_slices(whole))
            self.kinds.add_near(kind, sizes_of(capture))
            number = kind.number
        return number, alone(program) if near.has_other_ops else program

    def _finding_slices(self, capture: Capture) -> Callable[[], RegionFront | None] | None:
        """Give what finds options in slices, where these are not allowed."""
        return None if self.settings.numerics is not None else partial(self._in_slices, capture)

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
        family = alike[0].family if alike else self.kinds.next_number
        known: Sequence[Schedule | Footprint] = ()
        if alike:
            all_bytes = _bytes(graph)
            near = min(alike, key=lambda kind: abs(math.log(_bytes(kind.front.graph) / all_bytes)))
            overwrites = [op.overwrites for op in graph.ops]
            same = [op.overwrites for op in near.front.graph.ops] == overwrites
            known = near.footprints if same else near.schedules
        else:
            known = self._of_near_graphs(name, graph)
        if len(alike) >= _SIZES:
            front = front_from_schedules(graph, known)
        else:
            solver = "refine" if settings.solver == "auto" else settings.solver
            front = region_front(
                graph,
                solver=solver,
                limit_seconds=self._limit_seconds(graph) * (_SHARE_OF_KNOWN if known else 1),
                hierarchy=hierarchy_for(graph, solver, settings.partitioner),
                known=known,
            )
        return RegionKind(name, front, capture.missing, family, plain_bytes=plain_bytes(capture))

    def _of_near_graphs(self, name: str, graph: Graph) -> list[Schedule]:
        """Give the schedules of the last kind of the same code that has nearly the same ops."""
        for kind in reversed(list(self.kinds)):
            if kind.name == name and kind.met and not isinstance(kind, NearKind):
                found = carried_over(kind.schedules, kind.front.graph, graph)
                if found:
                    return found
        return []

    def _of_user_plan(
        self, name: str, capture: Capture, position: int | None
    ) -> tuple[int, Capture] | None:
        """Find the kind of a region among those of the user's plan that were not met yet.

        Raises:
            PlanMismatch: as `find`.
        """
        if self.user_plan is None:
            return None
        unmet = [number for number, kind in self.kinds.items() if not kind.met]
        for number in unmet:
            fitted = self.user_plan.fit_kind(number, capture)
            if fitted is not None:
                program, front = fitted
                self.kinds[number] = RegionKind(
                    name,
                    front,
                    program.missing,
                    family=number,
                    plain_bytes=plain_bytes(program),
                    whole=program.without_alternatives().graph if program.has_other_ops else None,
                    sliced=program.sliced,
                    unfused=program.unfused,
                    least_bytes=0 if program.has_other_ops else None,
                    deferred=deferred_by(program),
                )
                return number, program
        if position is not None and outline_of(capture) not in self.user_plan.plan.earlier:
            raise self.user_plan.mismatch(position, name, capture)
        return None


def _bytes(graph: Graph) -> int:
    return max(1, sum(value.size_bytes for value in graph.values))
