"""From when on the regions of a step run compiled groups: once the kernels of all have come.

The first steps run eager kernels, so that they begin as soon as ever. Between two later ones all is
planned anew, as in the first. If that finds no plan, steps go on as they were planned before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from remat.planning.ranks import has_other_ranks
from remat.planning.region_slices import in_groups_alone, may_have_groups
from remat.planning.settings import Settings
from remat_graph.torch import Capture, CaptureError, Compilation

if TYPE_CHECKING:
    from remat.session.kinds import RegionKind
    from remat.session.planned_patterns import PlannedPattern
    from remat.session.region import Region
    from remat.session.step import StepState

__all__ = ["StepKernels"]

logger = logging.getLogger(__name__)

_MOST = 256  # kinds of regions: more are those of sizes without end


@dataclass(frozen=True, slots=True)
class _Before:
    """What steps were planned by."""

    kinds: list[RegionKind]
    patterns: list[PlannedPattern]
    set_aside: int
    plans: dict[Region, dict[Any, Any]]


@dataclass(eq=False)
class StepKernels:
    """Which programs of regions are in groups, and when steps are planned by these.

    Of a plan file, and where there are other ranks, kernels are waited for, as with `wait=True`.
    """

    settings: Settings
    _programs: list[Capture] = field(default_factory=list, repr=False)
    _met: int = 0
    _compilation: Compilation | None = None
    _compiled: set[str] = field(default_factory=set, repr=False)
    _have_come: bool = False
    _given_up: bool = False
    _before: _Before | None = field(default=None, repr=False)

    def of(self, program: Capture) -> Capture:
        """Give a region's program in groups, if their kernels are there or are waited for."""
        if self._given_up or not self.settings.runs_groups_on(program.program.device):
            return program
        waits = self.settings.wait or self.settings.step_plan is not None or has_other_ranks()
        if not (waits or self._have_come):
            self._programs.append(program)
            if len(self._programs) > _MOST:
                logger.info("steps go on by eager kernels: they have ever new regions")
                self._programs.clear()
                self._compilation, self._given_up = None, True
            return program
        able = may_have_groups(program)
        self._compile([able]).wait()
        try:
            return in_groups_alone(able)
        except CaptureError as error:
            logger.warning("a region goes on by eager kernels: %s", error)
            return program

    def see_step(self, step: StepState, regions: Iterable[Region]) -> None:
        """Between two steps: compile once no more regions are found, and plan anew by kernels."""
        if self._before is not None:
            self._judge(step, self._before, regions)
        elif self._have_come or not (self._programs and step.patterns.planned):
            return
        elif self._compilation is None:
            before, self._met = self._met, len(self._programs)
            if before == self._met:
                self._compilation = self._compile(map(may_have_groups, self._programs))
        elif self._compilation.is_done:
            logger.info("the kernels of %d regions are compiled: planning by them", self._met)
            self._have_come, self._compilation = True, None
            self._programs.clear()
            plans = {region: dict(region.shared) for region in regions}
            self._before = _Before(
                step.planner.exchange_kinds([]),
                step.patterns.exchange([]),
                step.planner.set_aside,
                plans,
            )
            for region in plans:
                region.shared.clear()

    def _compile(self, programs: Iterable[Capture]) -> Compilation:
        """Compile those kernels of programs that were not compiled before."""
        kernels = {kernel.key: kernel for each in programs for kernel in each.group_kernels}
        waiting = [kernel for key, kernel in kernels.items() if key not in self._compiled]
        self._compiled.update(kernels)
        return Compilation(waiting)

    def _judge(self, step: StepState, before: _Before, regions: Iterable[Region]) -> None:
        """Go back to what steps were planned by if no plan by kernels is within the budget."""
        patterns = step.patterns.planned
        if step.is_refused or not all(each.fits for each in patterns):
            reason = step.forget_refusal() or "no plan of compiled groups fits"
            logger.warning("steps go on by eager kernels: %s", reason)
            self._given_up = True
            step.planner.exchange_kinds(before.kinds)
            step.patterns.exchange(before.patterns)
            step.planner.set_aside = before.set_aside
            for region in regions:
                region.shared.clear()
                region.shared.update(before.plans.get(region, {}))
            plans = [each.plan for each in before.patterns if each.fits]
            if plans:
                step.planner.on_plan(plans[-1])
            self._before = None
        elif patterns and all(each.plan.measured_peak_bytes is not None for each in patterns):
            self._before = None
