"""Kernels of a region that are compiled beside its steps, and from when on these run by them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from remat.errors import RematError
from remat.planning.task import RunnablePlan
from remat_graph.torch import Capture, Compilation, KernelsMissing

__all__ = ["RegionKernels", "plan_by_kernels"]

logger = logging.getLogger(__name__)

_FIRST, _LATER = 2, 4  # calls: the first shows what is planned for, some sizes are met but once
_MOST_MET = 1024  # sizes whose calls are counted
_MOST_WAITS = 8  # for kernels besides, each time that it is planned by those that are there

Numbers = tuple[Any, ...]


class RegionKernels:
    """Which calls of a region run compiled groups: of one size, or of all sizes of a trace."""

    def __init__(self) -> None:
        self._met: Counter[Hashable] = Counter()
        self._compilations: dict[Hashable, Compilation] = {}
        self._compiled: set[Hashable] = set()
        self._planned: set[Numbers] = set()
        self._tried: set[Hashable] = set()
        self._served: Hashable = None
        self._waits: Counter[Hashable] = Counter()
        self._left_out: set[Numbers] = set()

    def serve(self, numbers: Numbers, capture: Capture, *, wait: bool) -> bool:
        """Whether calls of these numbers, which are planned now, run kernels.

        Those are there, or are compiled now to `wait` for.
        """
        key = self._key(numbers, capture)
        if numbers in self._left_out:
            return False
        if wait and key not in self._compiled:
            Compilation(capture.group_kernels).wait()
            self._compiled.add(key)
        if key in self._compiled:
            self._planned.add(numbers)
            self._tried.add(key)
            self._served = key
        return key in self._compiled

    def compile_others(self, numbers: Numbers, missing: KernelsMissing) -> None:
        """Compile beside the steps what a plan of these calls needs besides; none until then.

        Where that was done often, as of sizes that each have their own, these calls have no plan by
        kernels.
        """
        key = self._served
        if self._waits[key] == _MOST_WAITS:
            logger.info("planned without kernels, for %d are of this size", len(missing.kernels))
            if len(self._left_out) > _MOST_MET:
                self._left_out.clear()
            self._left_out.add(numbers)
            return
        logger.info("planning by kernels waits for %d more", len(missing.kernels))
        self._waits[key] += 1
        self._planned.discard(numbers)
        self._tried.discard(key)
        self._compiled.discard(key)
        self._compilations[key] = Compilation(missing.kernels)

    def are_due(self, numbers: Numbers, capture: Capture, *, wait: bool) -> bool:
        """Whether kernels by which no such call was planned are there, or are to `wait` for."""
        key = self._key(numbers, capture)
        return key not in self._tried and (wait or key in self._compiled)

    def meet(self, planned: RunnablePlan) -> None:
        """See a call of a new size, which others of its trace may follow: compile for these."""
        trace = planned.capture.kernels_are_for
        if trace is not None and planned.capture.unfused is None and trace not in self._compiled:
            self._compile(trace, planned.capture)

    def have_come(self, numbers: Numbers, planned: RunnablePlan) -> bool:
        """Whether kernels are there that this plan does not run; else compiles them beside.

        Those of one size, or trace, at a time: others wait for them.
        """
        if numbers in self._planned or planned.capture.unfused is not None:
            return False
        key = self._key(numbers, planned.capture)
        if key not in self._compiled and not self._compile(key, planned.capture):
            return False
        self._planned.add(numbers)
        return True

    def _compile(self, key: Hashable, capture: Capture) -> bool:
        """Compile kernels beside the steps, once calls that run them are met often enough.

        Gives whether there are any now.
        """
        compilation = self._compilations.get(key)
        if compilation is not None:
            if not compilation.is_done:
                return False
            del self._compilations[key]
            self._compiled.add(key)
            return compilation.count > 0
        if len(self._met) > _MOST_MET:
            self._met.clear()
        self._met[key] += 1
        is_first = not (self._compiled or self._compilations)
        is_free = all(other.is_done for other in self._compilations.values())
        if is_free and self._met[key] >= (_FIRST if is_first else _LATER):
            self._compilations[key] = Compilation(capture.group_kernels)
        return False

    @staticmethod
    def _key(numbers: Numbers, capture: Capture) -> Hashable:
        return capture.kernels_are_for or numbers


def plan_by_kernels(plan: Callable[[], Any], before: Any, name: str) -> Any:
    """Plan anew for kernels of a region that have come; the plan before stays if there is none."""
    logger.info("the kernels of %s are compiled: planning by them", name)
    try:
        return plan()
    except RematError as error:
        logger.warning("%s goes on by eager kernels: %s", name, error)
        return before
