"""Kernels of a region that are compiled beside its steps, and from when on these run by them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from remat.errors import RematError
from remat.planning.task import RunnablePlan
from remat_graph.torch import Compilation

__all__ = ["RegionKernels", "plan_by_kernels"]

logger = logging.getLogger(__name__)

_FIRST, _LATER = 2, 4  # calls: the first shows what is planned for, some sizes are met but once
_MOST_MET = 1024  # sizes whose calls are counted

Numbers = tuple[Any, ...]


class RegionKernels:
    """Which calls of a region, by the numbers that they are planned for, run compiled groups."""

    def __init__(self) -> None:
        self._met: Counter[Numbers] = Counter()
        self._compilations: dict[Numbers, Compilation] = {}
        self._compiled: set[Numbers] = set()

    def are_there(self, numbers: Numbers) -> bool:
        """Whether the kernels of such calls have been compiled."""
        return numbers in self._compiled

    def wait(self, numbers: Numbers, compilation: Compilation) -> None:
        """Compile the kernels of such calls now."""
        compilation.wait()
        self._compiled.add(numbers)

    def have_come(self, numbers: Numbers, planned: RunnablePlan) -> bool:
        """Whether kernels are there that this plan does not run; else compiles them beside.

        Those of one size at a time: others wait for them.
        """
        if self.are_there(numbers) or planned.capture.unfused is not None:
            return False
        compilation = self._compilations.get(numbers)
        if compilation is not None:
            if not compilation.is_done:
                return False
            del self._compilations[numbers]
            self._compiled.add(numbers)
            return compilation.count > 0
        if len(self._met) > _MOST_MET:
            self._met.clear()
        self._met[numbers] += 1
        is_first = not (self._compiled or self._compilations)
        is_free = all(other.is_done for other in self._compilations.values())
        if is_free and self._met[numbers] >= (_FIRST if is_first else _LATER):
            self._compilations[numbers] = Compilation(planned.capture.group_kernels)
        return False


def plan_by_kernels(plan: Callable[[], Any], before: Any, name: str) -> Any:
    """Plan anew for kernels of a region that have come; the plan before stays if there is none."""
    logger.info("the kernels of %s are compiled: planning by them", name)
    try:
        return plan()
    except RematError as error:
        logger.warning("%s goes on by eager kernels: %s", name, error)
        return before
