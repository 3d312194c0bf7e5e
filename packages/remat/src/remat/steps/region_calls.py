"""What a step of several regions is made of: kinds of regions, their code, and their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from remat.planning.solving import have_same_ops
from remat.plans.reads import read_by_backward
from remat.steps.changes import Changes, Watched
from remat.steps.known_bytes import HandedOut, NewGradients
from remat_exec import Executor, Runnable, autocast_type
from remat_graph import Graph
from remat_graph.torch import Capture
from remat_solvers.baselines.store_all import store_all
from remat_solvers.step import RegionFront, RegionOption, measure_option

if TYPE_CHECKING:
    from remat.steps.runner import StepRunner

__all__ = ["RegionCall", "RegionKind", "RegionPlan"]


class RegionPlan:
    """A captured region: the number of its kind, and the code of the options that were used.

    `changed` is what was seen of `Changes`, for the regions of one place in the code.
    """

    def __init__(
        self,
        kind: int,
        capture: Capture,
        least: RegionOption,
        executor: Executor,
        changed: dict[int, bool | None],
    ) -> None:
        self.kind = kind
        self.executor = executor
        self.capture = capture
        self.least = least
        self._executables: dict[RegionOption, Runnable] = {}
        self.changes = Changes(capture, changed)

    def executable(self, option: RegionOption) -> Runnable:
        """Give the code of an option."""
        made = self._executables.get(option)
        if made is None:
            leaner = None if option is self.least else self.executable(self.least)
            made = self.executor(self.capture, option.schedule, leaner=leaner)
            self._executables[option] = made
        return made

    def inputs(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Give the bytes of the inputs of a call, by value, but for parameters: the model's own."""
        program, sizes = self.capture.program, self.capture.graph.value_by_name
        values = (
            program.storage[item.variable]
            for item in program.inputs
            if item.kind == "input"
            and item.variable in program.storage
            and not isinstance(tensors[int(item.key)], torch.nn.Parameter)
        )
        return {value: sizes[value].size_bytes for value in values if value in sizes}


@dataclass(eq=False)
class RegionKind:
    """Regions of the same operations, sizes and results, which have the same options.

    `missing` are the positions of outputs whose gradients are taken not to come. One that is not
    `met` yet is that of a plan file, in the names of the file.
    """

    name: str
    front: RegionFront
    missing: frozenset[int] = frozenset()
    met: bool = True
    _held: dict[RegionOption, frozenset[str]] = field(default_factory=dict, repr=False)

    def held_inputs(self, option: RegionOption, *, droppable: bool = True) -> frozenset[str]:
        """Find the inputs that a call by an option holds between its halves.

        One that is `droppable` also holds what the least option reads, to go on as that.
        """
        if option not in self._held:
            read = read_by_backward(self.front.graph, option.schedule)
            self._held[option] = frozenset(read & self.front.graph.resident)
        held = self._held[option]
        if droppable and option is not self.least:
            held |= self.held_inputs(self.least)
        return held

    def has(self, graph: Graph) -> bool:
        """Whether a graph is of this kind, with costs that were found as its own were."""
        own = self.front.graph
        return (
            self.met
            and own.values == graph.values
            and have_same_ops(own, graph)
            and [(op.workspace_bytes, op.overwrites) for op in own.ops]
            == [(op.workspace_bytes, op.overwrites) for op in graph.ops]
        )

    @functools.cached_property
    def least(self) -> RegionOption:
        """The option that keeps the least of those that were found first."""
        return min(self.front.options, key=lambda option: option.kept_bytes)

    @functools.cached_property
    def everything(self) -> RegionOption:
        """What it costs to store everything."""
        return measure_option(self.front.graph, store_all(self.front.graph))


@dataclass(eq=False)
class RegionCall:
    """One call of a region, from its forward to the end of its backward."""

    runner: StepRunner
    position: int
    learn: Callable[[Runnable, frozenset[int], frozenset[int]], None]
    executable: Runnable
    plan: RegionPlan
    option: RegionOption
    drop: Callable[[], None] | None = None
    watched: list[Watched] = field(default_factory=list)
    handed: HandedOut = field(default_factory=lambda: HandedOut(()))
    gradients: NewGradients = field(default_factory=lambda: NewGradients(()))

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
            self.runner.mark(f"lean {self.position}")

    def __del__(self) -> None:
        """Note that there was no backward, if there was none."""
        for watched in self.watched:
            self.plan.changes.note_none(watched)

    def started(self, missing: frozenset[int], let_go: frozenset[int]) -> None:
        """See that there is room for the backward, which begins."""
        for watched in self.watched:
            self.plan.changes.note(watched)
        self.watched.clear()
        if self in self.runner.live:  # else it is left over from an earlier step
            self.runner.see_autocast(autocast_type(self.plan.capture.program.device))
            self.runner.live_backward(self)
            self.runner.mark(f"backward {self.position}")
            self.runner.await_end()
        self.learn(self.executable, missing, frozenset())

    def finished(self) -> None:
        """Note that the backward has given out its gradients."""
        if self in self.runner.live:
            self.runner.mark(f"given {self.position}")
            self.runner.live.discard(self)
            self.runner.known_bytes.give(self.gradients)
