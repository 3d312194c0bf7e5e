"""What a step of several regions is made of: kinds of regions, their code, and their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from remat.planning.solving import have_same_ops
from remat_exec import Executor, Runnable, autocast_type
from remat_graph import Compute, Graph, Schedule
from remat_graph.torch import Capture
from remat_solvers.baselines.store_all import store_all
from remat_solvers.step import RegionFront, RegionOption, measure_option

if TYPE_CHECKING:
    from remat.steps.runner import StepRunner

__all__ = ["RegionCall", "RegionKind", "RegionPlan"]

Watched = tuple[int, torch.Tensor, int]
"""The position of an input, the input, and its version when it was copied; or `~` that of an output
and its copy."""


class RegionPlan:
    """A captured region: the number of its kind, and the code of the options that were used.

    `changes` says which of its inputs and outputs (`~position`) later code was seen to change in
    place, or not to, and `None` of one whose calls had no backward so far; it is shared by the
    regions of one place in the code, of whatever sizes.
    """

    def __init__(
        self,
        kind: int,
        capture: Capture,
        least: RegionOption,
        executor: Executor,
        changes: dict[int, bool | None],
    ) -> None:
        self.kind = kind
        self.executor = executor
        self.capture = capture
        self.least = least
        self._executables: dict[RegionOption, Runnable] = {}
        self._exposed = _exposed_inputs(capture)
        self._exposed_outputs = _exposed_outputs(capture)
        self._changes = changes

    def executable(self, option: RegionOption) -> Runnable:
        """Give the code of an option."""
        made = self._executables.get(option)
        if made is None:
            leaner = None if option is self.least else self.executable(self.least)
            made = self.executor(self.capture, option.schedule, leaner=leaner)
            self._executables[option] = made
        return made

    def protect(self, tensors: list[torch.Tensor]) -> list[Watched]:
        """Put copies in the place of inputs that code between the regions may change in place.

        Those are inputs which the backward may read only because something is computed again: eager
        would not notice a change. Each is watched in the first call, and copied from then on if it
        was changed. Those to be watched are returned.
        """
        watched = []
        for position in self._exposed:
            tensor = tensors[position]
            changed = self._changes.get(position)
            if isinstance(tensor, torch.nn.Parameter) or changed is False:
                continue
            tensors[position] = _copied(tensor)
            if changed is None:
                watched.append((position, tensor, tensor._version))
        return watched

    def protect_outputs(self, outputs: list[torch.Tensor]) -> list[Watched]:
        """Put copies in the place of outputs that code between the regions may change in place.

        As `protect` does: those that the backward may read only to compute something again.
        """
        watched = []
        for position in self._exposed_outputs:
            changed = self._changes.get(~position)
            if changed is not False:
                outputs[position] = copied = _copied(outputs[position])
                if changed is None:
                    watched.append((~position, copied, copied._version))
        return watched

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

    def is_new(self, position: int) -> bool:
        """Whether no call has ended yet whose input at a position was watched."""
        return position not in self._changes

    def note(self, position: int, *, changed: bool | None) -> None:
        """Note whether an input was changed between a call and its backward, `None` without one."""
        if changed is None:
            self._changes.setdefault(position, None)
        else:
            self._changes[position] = changed or bool(self._changes.get(position))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor in its layout, which the plan was made for, with what its elements share."""
    layout = tensor.shape, tensor.stride()
    if torch._debug_has_internal_overlap(tensor) != 1:  # 1: some dimension has a stride of 0
        made = torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)
    span = 1 + sum((size - 1) * stride for size, stride in zip(*layout, strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(*layout, 0)


def _exposed_inputs(capture: Capture) -> frozenset[int]:
    """List inputs that a backward would not read if everything was stored, as in eager.

    Inputs that the region writes to, or gives out views of, are left out: a copy is another tensor.
    """
    graph, program = capture.graph, capture.program
    read = _read_by_backward(graph, store_all(graph))
    given = {output.base for output in program.outputs if output.kind in ("input", "input_view")}
    given |= {write.target for write in program.writes.values()}
    read |= {program.storage[name] for name in given if name in program.storage}
    return frozenset(
        int(item.key)
        for item in program.inputs
        if item.kind == "input" and program.storage.get(item.variable, "") not in read
    )


def _exposed_outputs(capture: Capture) -> tuple[int, ...]:
    """List outputs from which something may be computed again, but that eager would not keep.

    Those that are views of one another, or of inputs, are left out.
    """
    graph, program = capture.graph, capture.program
    kept = _read_by_backward(graph, store_all(graph))
    read = {value for op in graph.ops if op.name != graph.boundary for value in op.inputs}
    storages = [
        program.storage.get(output.base if output.kind == "view" else output.variable, "")
        for output in program.outputs
    ]
    return tuple(
        position
        for position, (output, storage) in enumerate(zip(program.outputs, storages, strict=True))
        if output.kind in ("fresh", "view")
        and storage in read - kept
        and storages.count(storage) == 1
    )


def _read_by_backward(graph: Graph, schedule: Schedule) -> set[str]:
    """Find the values that a schedule reads after the op at the boundary."""
    computed = [step.op for step in schedule if isinstance(step, Compute)]
    after = computed[computed.index(graph.ops[graph.boundary_index].name) + 1 :]
    return {value for name in after for value in graph.ops[graph.op_index[name]].inputs}


@dataclass(eq=False)
class RegionKind:
    """Regions of the same operations and sizes, which have the same options.

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
            read = _read_by_backward(self.front.graph, option.schedule)
            self._held[option] = frozenset(read & self.front.graph.resident)
        held = self._held[option]
        if droppable and option is not self.least:
            held |= self.held_inputs(self.least)
        return held

    def has(self, graph: Graph) -> bool:
        """Whether a graph is of this kind."""
        return (
            self.met
            and self.front.graph.values == graph.values
            and have_same_ops(self.front.graph, graph)
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
        for position, *_ in self.watched:
            self.plan.note(position, changed=None)

    def started(self, missing: frozenset[int], let_go: frozenset[int]) -> None:
        """See that there is room for the backward, which begins."""
        for position, tensor, version in self.watched:
            self.plan.note(position, changed=tensor._version != version)
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
