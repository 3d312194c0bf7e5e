"""Kinds of regions, with the options of each, and the code of those options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from remat.planning.solving import have_same_ops
from remat.plans.outlines import Outline
from remat.plans.reads import read_by_backward
from remat.session.changes import Changes, Exposed
from remat.session.recording import RecordedCall, gradients_present
from remat_exec import Executor, Runnable
from remat_graph import Footprint, Graph, Schedule
from remat_graph.torch import AllocationRecorder, Capture
from remat_solvers import store_all
from remat_solvers.step import RegionFront, RegionOption, incoming_bytes, measure_option

__all__ = ["CapturedRegion", "RegionKind", "deferred_by", "plain_bytes"]

_CALLS = 8  # that a step is taken to make while nothing is known of it


class CapturedRegion:
    """A captured region: the number of its kind, and the code of the options that were used.

    `changed` is what was seen of `Changes`, for the regions of one place in the code. It
    `is_superseded` once its calls are to be planned anew, by what a step showed.
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
        self._let_go: dict[
            tuple[RegionOption, RegionOption], tuple[frozenset[str], frozenset[str]]
        ] = {}
        self.changes = Changes(of.exposed(capture), changed)
        self.is_superseded = False

    @functools.cached_property
    def deferrable(self) -> frozenset[int]:
        """The positions of outputs that may be made when they are read."""
        return self.capture.deferrable

    @functools.cached_property
    def leaving_bytes(self) -> int:
        """Sum the gradients that are planned to leave at once."""
        program = self.capture.program
        left = {program.storage[program.gradients[name]] for name in program.leaving}
        return sum(program.facts[value].storage_bytes for value in left)

    @property
    def lean(self) -> RegionOption:
        """The option by which a call goes on that gives memory back."""
        return self._of.lean

    @property
    def everything(self) -> RegionOption:
        """What it costs to store everything."""
        return self._of.everything

    def executable(self, option: RegionOption) -> Runnable:
        """Give the code of an option."""
        lean = self.lean
        if (option, lean) not in self._executables:
            low_memory_plan = None if option is lean else self.executable(lean)
            with AllocationRecorder.paused():  # a backward for other gradients may be measured
                self._executables[option, lean] = self._of.runnable(
                    self.capture, option, low_memory_plan, self.executor
                )
        return self._executables[option, lean]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Give the bytes of the inputs of a call, by value, but for parameters: the model's own."""
        program, there = self.capture.program, self.capture.outline.value_by_name
        values = (
            program.storage[item.variable]
            for item in program.inputs
            if item.kind == "input"
            and item.variable in program.storage
            and not isinstance(tensors[int(item.key)], torch.nn.Parameter)
        )
        return {value: self.capture.size_of(value) for value in values if value in there}

    def let_go(self, option: RegionOption) -> tuple[frozenset[str], frozenset[str]]:
        """Find the outputs that a backward by an option does not read, and one that went lean."""
        lean = self.lean
        if (option, lean) not in self._let_go:
            droppable = self.executable(option).low_memory_plan is not None
            self._let_go[option, lean] = (
                self._of.let_go(option, droppable=droppable),
                self._of.let_go(lean, droppable=False),
            )
        return self._let_go[option, lean]

    def noted(self, option: RegionOption, tensors: Sequence[torch.Tensor]) -> RecordedCall:
        """Note a call of a recorded step by an option."""
        inputs, released_outputs = self.inputs(tensors), {}
        if not self.capture.missing:  # else all are held for the gradients that may come
            droppable = self.executable(option).low_memory_plan is not None
            held = self._of.held_inputs(option, droppable=droppable)
            released_outputs = {value: size for value, size in inputs.items() if value not in held}
        present, input_bytes = gradients_present(tensors), sum(inputs.values())
        incoming = self._of.incoming_bytes
        return RecordedCall(
            self.kind, incoming, option, self.lean, present, released_outputs, input_bytes, self._of
        )


@dataclass(eq=False)
class RegionKind:
    """Regions of the same operations, sizes and results, which have the same options.

    `missing` are the positions of outputs whose gradients are taken not to come. Those of the same
    operations, and of any sizes, are a `family`, named by the first. One that is not `met` yet is
    that of a plan file, in the names of the file. `room` is what a step may take, once it is known.
    `plain_bytes` is what plain autograd keeps, whichever gradients come, where that is not what
    storing everything does. Where the front is of a program in slices or compiled groups, `whole`
    is the graph without, `sliced` and `unfused` say which; `least_bytes` is then what the forwards
    of all such programs need. `deferred` are positions of outputs that no step makes, and their
    bytes.
    `find_in_slices` finds options in slices where the user has not allowed them, for a refusal.
    """

    name: str
    front: RegionFront = field(repr=False)
    missing: frozenset[int] = frozenset()
    family: int = 0
    met: bool = True
    plain_bytes: int | None = None
    room: int | None = None
    whole: Graph | None = field(default=None, repr=False)
    sliced: tuple[tuple[int, int], ...] = ()
    unfused: tuple[int, ...] | None = None
    least_bytes: int | None = None
    deferred: tuple[tuple[int, int], ...] = ()
    find_in_slices: Callable[[], RegionFront | None] | None = field(default=None, repr=False)
    _lean: dict[int | None, RegionOption] = field(default_factory=dict, repr=False)
    _alike: dict[RegionOption, RegionOption] = field(default_factory=dict, repr=False)
    _read: dict[int, tuple[Schedule, frozenset[str]]] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def outline(self) -> str:
        """The hash of the outline of its graph, as `outline_of` gives it of a capture."""
        graph = self.front.graph if self.whole is None else self.whole
        return Outline.of(graph.without_alternatives()).hash

    @functools.cached_property
    def in_slices(self) -> RegionKind | None:
        """The same with the largest values made in slices, if they can be and are not yet."""
        front = self.find_in_slices() if self.find_in_slices is not None else None
        if front is None:
            return None
        return RegionKind(
            self.name, front, self.missing, self.family, self.met, self.plain_bytes, self.room,
            self.front.graph, least_bytes=self.least_bytes, deferred=self.deferred,
        )  # fmt: skip

    @property
    def options(self) -> Sequence[RegionOption]:
        """Its options, as far as they are known without solving."""
        return self.front.options

    @property
    def incoming_bytes(self) -> int:
        """The bytes of the gradients that come in between the halves."""
        return incoming_bytes(self.front.graph)

    def exposed(self, capture: Capture) -> Exposed:
        """Find what a capture of this kind has exposed."""
        return Exposed.of(capture)

    def runnable(
        self, capture: Capture, option: RegionOption, lean: Runnable | None, executor: Executor
    ) -> Runnable:
        """Give what runs an option, and may go on as a lean one, by a capture of this kind."""
        return executor(capture, option.schedule, low_memory_plan=lean)

    def held_inputs(self, option: RegionOption, *, droppable: bool = True) -> frozenset[str]:
        """Find the inputs that a call by an option holds between its halves.

        One that is `droppable` also holds what the lean option reads, to go on as that.
        """
        return self._held(option, droppable=droppable) & self.graph.resident

    def let_go(self, option: RegionOption, *, droppable: bool = True) -> frozenset[str]:
        """Find the outputs that are counted with what a call keeps, and its backward reads not.

        One that is `droppable` reads what the lean option does, too.
        """
        graph = self.graph
        between = set(graph.ops[graph.boundary_index].inputs) - graph.results - graph.resident
        return frozenset(between - self._held(option, droppable=droppable))

    def _held(self, option: RegionOption, *, droppable: bool) -> frozenset[str]:
        read = self.read_by(option.schedule)
        if droppable and option is not self.lean:
            read |= self.read_by(self.lean.schedule)
        return read

    def read_by(self, schedule: Schedule) -> frozenset[str]:
        """Find what the backward of a schedule reads."""
        if id(schedule) not in self._read:
            self._read[id(schedule)] = schedule, frozenset(read_by_backward(self.graph, schedule))
        return self._read[id(schedule)][1]

    @property
    def graph(self) -> Graph:
        """The graph of its options, whatever the sizes."""
        return self.front.graph

    def has(self, graph: Graph) -> bool:
        """Whether a graph is of this kind, with costs that were found as its own were."""
        own = self.whole or self.front.graph
        return (
            self.met
            and own.values == graph.values
            and have_same_ops(own, graph)
            and [(op.workspace_bytes, op.overwrites) for op in own.ops]
            == [(op.workspace_bytes, op.overwrites) for op in graph.ops]
        )

    def runs(self, capture: Capture) -> bool:
        """Whether a capture is of this kind, and may be in its groups."""
        may_be_in_groups = self.unfused is None or capture.may_be_in_groups(self.unfused)
        return self.has(capture.graph) and may_be_in_groups

    def is_like(self, capture: Capture) -> bool:
        """Whether a capture is of this family."""
        return (
            self.met
            and self.missing == capture.missing
            and have_same_ops(self.front.graph, capture.graph)
        )

    @property
    def schedules(self) -> list[Schedule]:
        """The schedules of its options."""
        return [option.schedule for option in self.front.options]

    @functools.cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        """What its options hold, for regions of this family and other sizes."""
        graph = self.front.graph
        return tuple(Footprint(graph, schedule) for schedule in self.schedules)

    @property
    def time(self) -> float:
        """The time of computing everything once, and nothing in slices."""
        return (self.whole or self.front.graph).time

    @property
    def least_forward_bytes(self) -> int:
        """What each plan of a call needs at least in its forward."""
        least = self.front.least_forward_bytes
        return least if self.least_bytes is None else min(least, self.least_bytes)

    def by(self, option: RegionOption) -> RegionOption:
        """Give an option of another kind of this family as one of this kind."""
        for own in self.options:
            if own.schedule is option.schedule:
                return own
        if option not in self._alike:
            self._alike[option] = self._measured(option.schedule)
        return self._alike[option]

    def _measured(self, schedule: Schedule) -> RegionOption:
        return measure_option(self.front.graph, schedule)

    @property
    def lean(self) -> RegionOption:
        """The option that keeps the least of those that fit, of those that were found first.

        While nothing is known of the room, the one by which `_CALLS` such calls take the least.
        """
        if self.room not in self._lean:
            options, room = self.options, self.room
            fitting = [o for o in options if room is not None and o.peak_bytes <= room]
            if room is None:
                lean = min(options, key=lambda o: (_CALLS - 1) * o.kept_bytes + o.peak_bytes)
            elif fitting:
                lean = min(fitting, key=lambda option: option.kept_bytes)
            else:
                lean = min(options, key=lambda option: option.peak_bytes)
            self._lean[room] = lean
        return self._lean[self.room]

    @functools.cached_property
    def everything(self) -> RegionOption:
        """What it costs to store everything."""
        return self._measured(store_all(self.front.graph))


def plain_bytes(capture: Capture) -> int | None:
    """Give what a region keeps for a backward over all outputs, if what it stores is not that.

    Some gradients are missing, some outputs are not made, or some of it is made in slices.
    """
    if not (capture.missing or capture.program.deferred or capture.has_other_ops):
        return None
    graph = capture.without_alternatives().variant(frozenset()).graph
    return measure_option(graph, store_all(graph)).kept_bytes


def deferred_by(program: Capture) -> tuple[tuple[int, int], ...]:
    """List the outputs that a program does not make, and their bytes."""
    positions = sorted(program.program.deferred)
    return tuple((each, program.deferred_bytes(frozenset({each}))) for each in positions)
