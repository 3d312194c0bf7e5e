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
from remat.planning.region_slices import in_groups, may_have_groups
from remat.planning.settings import Settings
from remat.planning.solving import have_same_ops
from remat.session.near_kinds import Kinds
from remat_graph.torch import (
    CallSizes,
    Capture,
    CaptureError,
    Compilation,
    Kernel,
    KernelsMissing,
    SizedCapture,
    kernels_there_alone,
)

if TYPE_CHECKING:
    from remat.session.planned_patterns import PlannedPattern
    from remat.session.region import Region
    from remat.session.step import StepState

__all__ = ["StepKernels"]

logger = logging.getLogger(__name__)

_MOST = 256  # programs of regions: more are those of sizes without end
_MOST_TIMES = 8  # that kernels besides are compiled before a plan


@dataclass(frozen=True, slots=True)
class _Before:
    """What steps were planned by."""

    kinds: Kinds
    patterns: list[PlannedPattern]
    set_aside: int
    plans: dict[Region, dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A program of a region, and the same in groups whose kernels are there."""

    program: Capture
    grouped: Capture

    def at(self, program: Capture) -> Capture | None:
        """Give another program in these groups; `None` if they are not its own."""
        if not _share_kernels(self.program, program):
            return None
        if isinstance(self.grouped, SizedCapture) and isinstance(program, SizedCapture):
            return self.grouped.at(CallSizes(program.symbols, program.leaves))
        able, unfused = may_have_groups(program), self.grouped.unfused or ()
        if not able.may_be_in_groups(unfused):
            return None
        grouped = able.in_groups(unfused)
        grouped.compile_groups()
        return grouped


@dataclass(eq=False)
class StepKernels:
    """Which programs of regions are in groups, and when steps are planned by these.

    Those of one trace of all sizes share their kernels: one of them is `_wanted`, or `_ready`, for
    all. What is `_left_out` runs eager kernels for good. Of a plan file, and where there are other
    ranks, kernels are waited for, as with `wait=True`.
    """

    settings: Settings
    _wanted: list[Capture] = field(default_factory=list, repr=False)
    _ready: list[_Ready] = field(default_factory=list, repr=False)
    _left_out: list[Capture] = field(default_factory=list, repr=False)
    _met: int = 0
    _times: int = 0
    _compilation: Compilation | None = None
    _given_up: bool = False
    _before: _Before | None = field(default=None, repr=False)

    def of(self, program: Capture) -> Capture:
        """Give a region's program in groups, if their kernels are there or are waited for."""
        if self._given_up or not self.settings.runs_groups_on(program.program.device):
            return program
        there = next(filter(None, (each.at(program) for each in self._ready)), None)
        if there is not None:
            return there
        if any(_share_kernels(each, program) for each in (*self._left_out, *self._wanted)):
            return program
        if len(self._wanted) + len(self._ready) == _MOST:
            logger.info("steps go on by eager kernels: they have ever new regions")
            self._give_up()
            return program
        self._wanted.append(program)
        if self.settings.wait or self.settings.step_plan is not None or has_other_ranks():
            self._compile(may_have_groups(program).group_kernels)
            while self._compilation is not None:
                self._compilation.wait()
                self._see_compiled()
            return next(filter(None, (each.at(program) for each in self._ready[-1:])), program)
        return program

    def see_step(self, step: StepState, regions: Iterable[Region]) -> None:
        """Between two steps: compile once no more regions are found, and plan anew by kernels."""
        if self._before is not None:
            self._judge(step, self._before, regions)
        elif self._compilation is not None:
            planned = len(self._ready)
            if self._compilation.is_done and self._see_compiled() and len(self._ready) > planned:
                self._plan_anew(step, regions)
        elif self._wanted and step.patterns.planned:
            before, self._met = self._met, len(self._wanted)
            if before == self._met:
                able = map(may_have_groups, self._wanted)
                self._compile(kernel for each in able for kernel in each.group_kernels)

    def _compile(self, kernels: Iterable[Kernel]) -> None:
        self._compilation = Compilation({kernel.key: kernel for kernel in kernels}.values())

    def _see_compiled(self) -> bool:
        """Put programs in groups whose kernels have come, and compile what others need besides.

        Gives whether nothing more is needed. Which groups a program has is known once they are
        measured.
        """
        self._compilation = None
        missing: list[Kernel] = []
        for program in list(self._wanted):
            try:
                with kernels_there_alone():
                    ready = _Ready(program, in_groups(may_have_groups(program)))
            except KernelsMissing as more:
                missing += more.kernels
                continue
            except CaptureError as error:
                logger.warning("a region goes on by eager kernels: %s", error)
                self._left_out.append(program)
            else:
                self._ready.append(ready)
            self._wanted.remove(program)
        if missing and self._times < _MOST_TIMES:
            self._times += 1
            self._compile(missing)
            return False
        self._left_out += self._wanted
        self._wanted.clear()
        self._met = self._times = 0
        return True

    def _plan_anew(self, step: StepState, regions: Iterable[Region]) -> None:
        """Plan steps by kernels that have come."""
        logger.info("the kernels of %d regions are compiled: planning by them", len(self._ready))
        plans = {region: dict(region.shared) for region in regions}
        self._before = _Before(
            step.planner.exchange_kinds(Kinds()),
            step.patterns.exchange([]),
            step.planner.set_aside,
            plans,
        )
        for region in plans:
            region.shared.clear()

    def _give_up(self) -> None:
        self._wanted.clear()
        self._ready.clear()
        self._compilation, self._given_up = None, True

    def _judge(self, step: StepState, before: _Before, regions: Iterable[Region]) -> None:
        """Go back to what steps were planned by if no plan by kernels is within the budget."""
        patterns = step.patterns.planned
        if step.is_refused or not all(each.fits for each in patterns):
            reason = step.forget_refusal() or "no plan of compiled groups fits"
            logger.warning("steps go on by eager kernels: %s", reason)
            self._give_up()
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


def _share_kernels(one: Capture, other: Capture) -> bool:
    """Whether what is compiled for one program is for another, too: of one trace, or equal."""
    if isinstance(one, SizedCapture) and one.is_of_trace(other):
        return True
    return have_same_ops(one.graph, other.graph) and one.graph.values == other.graph.values
