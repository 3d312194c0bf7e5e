"""What a step of several regions is made of: kinds of regions, their code, and their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat.planning import have_same_ops
from remat_exec import Executor, Runnable
from remat_graph import Graph
from remat_graph.torch import Capture
from remat_solvers.step import RegionFront, RegionOption, measure_option
from remat_solvers.store_all import store_all

if TYPE_CHECKING:
    from remat.step_planning import StepPlanner

__all__ = ["RegionCall", "RegionKind", "RegionPlan"]


class RegionPlan:
    """A captured region: the number of its kind, and the code of the options that were used."""

    def __init__(
        self, kind: int, capture: Capture, least: RegionOption, executor: Executor
    ) -> None:
        self.kind = kind
        self.executor = executor
        self.capture = capture
        self.least = least
        self._executables: dict[RegionOption, Runnable] = {}

    def executable(self, option: RegionOption) -> Runnable:
        """Give the code of an option."""
        made = self._executables.get(option)
        if made is None:
            leaner = None if option is self.least else self.executable(self.least)
            made = self.executor(self.capture, option.schedule, leaner=leaner)
            self._executables[option] = made
        return made


@dataclass(eq=False)
class RegionKind:
    """Regions of the same operations and sizes, which have the same options."""

    name: str
    front: RegionFront

    def has(self, graph: Graph) -> bool:
        """Whether a graph is of this kind."""
        return self.front.graph.values == graph.values and have_same_ops(self.front.graph, graph)

    @property
    def everything(self) -> RegionOption:
        """What it costs to store everything."""
        return measure_option(self.front.graph, store_all(self.front.graph))


@dataclass(eq=False)
class RegionCall:
    """One call of a region, from its forward to the end of its backward."""

    planner: StepPlanner
    position: int
    learn: Callable[[Runnable, frozenset[int], frozenset[int]], None]
    executable: Runnable
    plan: RegionPlan
    option: RegionOption
    drop: Callable[[], None] | None = None

    @property
    def droppable_bytes(self) -> int:
        """What the call keeps beyond what it must."""
        if self.drop is None or self.executable.leaner is None:
            return 0
        return self.option.kept_bytes - self.plan.least.kept_bytes

    def go_lean(self) -> None:
        """Give back what can be made again; the backward is that of the least option then."""
        if self.drop is not None:
            self.drop()
            self.option = self.plan.least

    def started(self, missing: frozenset[int], let_go: frozenset[int]) -> None:
        """See that there is room for the backward, which begins."""
        if self in self.planner.live:  # else it is left over from an earlier step
            self.planner.mark(f"backward {self.position}")
            self.planner.live_backward(self)
            self.planner.await_end()
        self.learn(self.executable, missing, frozenset())

    def finished(self) -> None:
        """Note that the backward has given out its gradients."""
        if self in self.planner.live:
            self.planner.mark(f"given {self.position}")
            self.planner.live.discard(self)
