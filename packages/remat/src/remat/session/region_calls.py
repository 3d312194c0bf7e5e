"""What a step of several regions is made of: kinds of regions, their code, and their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from remat.planning.solving import have_same_ops
from remat.plans.reads import read_by_backward
from remat.session.changes import Changes, Watched
from remat.session.known_bytes import HandedOut, NewGradients
from remat.session.recording import Call, gradients_present
from remat_exec import Executor, Runnable, autocast_type
from remat_graph import Graph
from remat_graph.torch import Capture
from remat_solvers import store_all
from remat_solvers.step import RegionFront, RegionOption, measure_option

if TYPE_CHECKING:
    from remat.session.runner import StepRunner

__all__ = ["RegionCall", "RegionKind", "RegionPlan"]


class RegionPlan:
    """A captured region: the number of its kind, and the code of the options that were used.

    `changed` is what was seen of `Changes`, for the regions of one place in the code.
    """

    def __init__(
        self,
        kind: int,
        capture: Capture,
        of: RegionKind,
        executor: Executor,
        changed: dict[int, bool | None],
    ) -> None:
        self.kind = kind
        self.executor = executor
        self.capture = capture
        self._of = of
        self._executables: dict[tuple[RegionOption, RegionOption], Runnable] = {}
        self.changes = Changes(capture, changed)

    @property
    def least(self) -> RegionOption:
        """The option by which a call goes on that gives memory back."""
        return self._of.least

    def executable(self, option: RegionOption) -> Runnable:
        """Give the code of an option."""
        least = self.least
        made = self._executables.get((option, least))
        if made is None:
            low_memory_plan = None if option is least else self.executable(least)
            made = self.executor(self.capture, option.schedule, low_memory_plan=low_memory_plan)
            self._executables[option, least] = made
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

    def noted(self, option: RegionOption, tensors: Sequence[torch.Tensor]) -> Call:
        """Note a call of a recorded step by an option."""
        inputs, released_outputs = self.inputs(tensors), {}
        if not self.capture.missing:  # else all are held for the gradients that may come
            droppable = self.executable(option).low_memory_plan is not None
            held = self._of.held_inputs(option, droppable=droppable)
            released_outputs = {value: size for value, size in inputs.items() if value not in held}
        present, given = gradients_present(tensors), sum(inputs.values())
        graph = self._of.front.graph
        return Call(self.kind, graph, option, self.least, present, released_outputs, given)


@dataclass(eq=False)
class RegionKind:
    """Regions of the same operations, sizes and results, which have the same options.

    `missing` are the positions of outputs whose gradients are taken not to come. Those of the same
    operations, and of any sizes, are a `family`, named by the first. One that is not `met` yet is
    that of a plan file, in the names of the file. `room` is what a step may take, once it is known.
    `plain_bytes` is what plain autograd keeps, whichever gradients come, where that is not what
    storing everything does.
    """

    name: str
    front: RegionFront
    missing: frozenset[int] = frozenset()
    family: int = 0
    met: bool = True
    plain_bytes: int | None = None
    room: int | None = None
    _least: dict[int | None, RegionOption] = field(default_factory=dict, repr=False)
    _alike: dict[RegionOption, RegionOption] = field(default_factory=dict, repr=False)
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

    def is_like(self, capture: Capture) -> bool:
        """Whether a capture is of this family."""
        return (
            self.met
            and self.missing == capture.missing
            and have_same_ops(self.front.graph, capture.graph)
        )

    def by(self, option: RegionOption) -> RegionOption:
        """Give an option of another kind of this family as one of this kind."""
        if option in self.front.options:
            return option
        if option not in self._alike:
            self._alike[option] = measure_option(self.front.graph, option.schedule)
        return self._alike[option]

    @property
    def least(self) -> RegionOption:
        """The option that keeps the least of those that fit, of those that were found first."""
        if self.room not in self._least:
            options, room = self.front.options, self.room
            fitting = [o for o in options if room is None or o.peak_bytes <= room]
            self._least[room] = (
                min(fitting, key=lambda option: option.kept_bytes)
                if fitting
                else min(options, key=lambda option: option.peak_bytes)
            )
        return self._least[self.room]

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
        if self.drop is None or self.executable.low_memory_plan is None:
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

    def end_before(self, outputs: Sequence[torch.Tensor]) -> None:
        """End, for a call that runs plain, when a backward comes to one of its outputs."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def begins(_: Any) -> None:
            self.runner.live.discard(self)
            self.runner.await_end()

        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begins)

    def started(self, missing: frozenset[int], released_outputs: frozenset[int]) -> None:
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
