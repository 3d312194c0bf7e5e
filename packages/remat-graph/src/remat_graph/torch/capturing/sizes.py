"""A region traced once for calls of any size: a graph of sizes, which is evaluated for each call.

AOTAutograd traces it with symbols for the sizes and numbers that change. For a call the symbols are
replaced by its numbers, and all that follows, from the first rewrite on, is as for a graph that was
traced with these numbers: planning and execution see no symbols. All blocks are traced, also those
that do the same.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from remat_graph.graph import Graph
from remat_graph.torch.calls import state_bytes
from remat_graph.torch.capturing.capture import capture_joint, errors_told, leaves_of
from remat_graph.torch.capturing.captures import Capture, Costs
from remat_graph.torch.capturing.program_of_sizes import NotOfSizes, ProgramOfSizes
from remat_graph.torch.capturing.trace import FlatRegion, trace_region
from remat_graph.torch.cost.strides import RealStrides
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.program import LossCost, Program
from remat_graph.torch.tracing.joint import Key
from remat_graph.torch.tracing.joint_of_sizes import JointOfSizes
from remat_graph.torch.tracing.structure import Structure, distinct
from remat_graph.torch.tracing.symbols import SYMBOLIC, OtherSizes, Symbols, has_symbols

__all__ = ["BUCKET", "CallSizes", "SizedCapture", "SizedRegion", "has_sizes", "trace_sizes"]

logger = logging.getLogger(__name__)

BUCKET = 1.25  # times a size of which costs are known, for which they are scaled


def has_sizes(region: torch.fx.GraphModule) -> bool:
    """Whether TorchDynamo left sizes or numbers of a graph's inputs open."""
    return any(map(has_symbols, _examples_of(region)))


def trace_sizes(region: torch.fx.GraphModule, inputs: Sequence[Any]) -> SizedRegion:
    """Trace a graph of TorchDynamo's for calls of any size; `inputs` are those of one call.

    Raises:
        CaptureError: if torch fails to trace it with symbols, or it returns a size.
    """
    with errors_told():
        symbols = Symbols(inputs, _examples_of(region))
        _, slots = distinct([item for item in inputs if isinstance(item, torch.Tensor)])
        leaves = [item for item in symbols.stand_ins if isinstance(item, torch.Tensor)]
        first = dict(zip(reversed(slots), reversed(leaves), strict=True))
        shared = iter(slots)
        items = [
            first[next(shared)] if isinstance(item, torch.Tensor) else item
            for item in symbols.stand_ins
        ]
        numbers = [item for item in items if isinstance(item, SYMBOLIC)]
        flat_inputs: list[Any] = [*(first[slot] for slot in range(len(first))), *numbers]
        flat = FlatRegion(region, items, flat_inputs, whole=True)
        with torch.enable_grad():
            joint = trace_region(flat, flat_inputs)
        if any(isinstance(each, SYMBOLIC) for each in _constants(flat.output_structure)):
            raise CaptureError("it returns a size")
        own = JointOfSizes(joint, symbols.names)
        likes = flat_inputs[: len(first)]
        return SizedRegion(symbols, own, flat.output_structure, slots, likes)


@dataclass(frozen=True, slots=True)
class CallSizes:
    """What the symbols of a trace stand for in a call, and which inputs keep their gradient."""

    symbols: Mapping[str, Any]
    leaves: frozenset[Key]


class SizedRegion:
    """A region traced for calls of any size. `slots` says which inputs are the same tensor."""

    def __init__(
        self,
        symbols: Symbols,
        joint: JointOfSizes,
        structure: Structure,
        slots: tuple[int, ...],
        likes: Sequence[torch.Tensor],
    ) -> None:
        self.symbols = symbols
        self.joint = joint
        self._structure = structure
        self._slots = slots
        self._likes = list(likes)
        self._programs: dict[Any, ProgramOfSizes | None] = {}

    def capture(
        self,
        inputs: Sequence[Any],
        *,
        costs: Costs = "measure",
        loss_alone: bool = True,
        real: RealStrides | None = None,
    ) -> SizedCapture:
        """Capture it for a call, as `capture_region` does, without tracing.

        Raises:
            OtherSizes: if the trace does not hold for the sizes of this call.
            CaptureError: as `capture_region` does.
        """
        symbols, leaves = self.symbols_of(inputs)
        return self._at(symbols, leaves, costs=costs, loss_alone=loss_alone, real=real)

    def symbols_of(self, inputs: Sequence[Any]) -> tuple[dict[str, Any], frozenset[Key]]:
        """Read off a call what the symbols stand for, and which inputs are leaves.

        Raises:
            OtherSizes: if the trace does not hold for it.
        """
        tensors, slots = distinct([item for item in inputs if isinstance(item, torch.Tensor)])
        if slots != self._slots:
            raise OtherSizes("other inputs are the same tensor than where it was traced")
        return self.symbols.numbers(inputs), leaves_of(tensors)

    def sizes_of(self, inputs: Sequence[Any]) -> CallSizes | None:
        """Read off a call what `symbols_of` says; `None` if the trace does not hold for it."""
        try:
            return CallSizes(*self.symbols_of(inputs))
        except OtherSizes:
            return None

    def _at(
        self,
        symbols: Mapping[str, Any],
        leaves: frozenset[Key],
        *,
        costs: Costs,
        loss_alone: bool,
        real: RealStrides | None,
    ) -> SizedCapture:
        with errors_told():
            joint = dataclasses.replace(self.joint.at(symbols), leaves=leaves)
            captured = capture_joint(
                joint, self._likes, self._structure,
                costs=costs, loss_alone=loss_alone, real=real, dry=False,
            )  # fmt: skip
        return SizedCapture.of(captured, self, symbols, leaves)

    def evaluated(self, like: SizedCapture, symbols: Mapping[str, Any]) -> SizedCapture:
        """Capture it for numbers, through all passes, with the costs and gradients of another."""
        captured = self._at(
            symbols, like.leaves, costs="estimate", loss_alone=False, real=like._real
        )
        variant = captured.variant(like.missing) if like.missing else captured
        return cast("SizedCapture", variant.costed(like._costs, like._measured))

    def program_of_sizes(self, like: SizedCapture) -> ProgramOfSizes | None:
        """Give the program of a capture as one of sizes; `None` if nothing shows that it is one.

        It is read off the program for sizes that are near, and all differ; for those of the
        capture it must give the capture's.
        """
        program = like.program
        key = like.missing, program.deferred, like.leaving_gradients
        if key not in self._programs:
            self._programs[key] = None
            try:
                self._programs[key] = self._read(like)
            except CaptureError as error:
                logger.info("each size goes through all passes: %s", error)
        return self._programs[key]

    def _read(self, like: SizedCapture) -> ProgramOfSizes:
        symbols = self.symbols.generic(like.symbols, self.joint.is_generic)
        if symbols is None:
            raise NotOfSizes("no sizes near those of a call differ from all other numbers")
        generic: Capture = self.evaluated(like, symbols)
        generic = generic.with_deferred_outputs(like.program.deferred)
        generic = generic.with_leaving_gradients(like.leaving_gradients)
        of_sizes = ProgramOfSizes(self.joint, generic.program, self.joint.numbers(symbols))
        program = of_sizes.at(self.joint.numbers(like.symbols))
        if program != like.program or program.equivalence != like.program.equivalence:
            raise NotOfSizes("it is another program for other sizes")
        return of_sizes


@dataclass(frozen=True)
class SizedCapture(Capture):
    """A capture of a region that was traced for calls of any size, for one of these.

    `symbols` are its numbers, `leaves` the inputs that keep their gradient. One that was read off
    another of the same region has that as `_base`, and no joint graph of its own;
    `variants_are_read_off` says that with all gradients it is read off, too, whenever it is needed.
    """

    region: SizedRegion | None = field(default=None, repr=False, compare=False)
    symbols: Mapping[str, Any] = field(default_factory=dict)
    leaves: frozenset[Key] = frozenset()
    _base: SizedCapture | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        captured: Capture,
        region: SizedRegion,
        symbols: Mapping[str, Any],
        leaves: frozenset[Key],
    ) -> SizedCapture:
        """Say of what region and which numbers a capture is."""
        own = {each.name: getattr(captured, each.name) for each in dataclasses.fields(Capture)}
        return cls(**own, region=region, symbols=symbols, leaves=leaves)

    def at(self, call: CallSizes) -> SizedCapture | None:
        """Give the same capture for a call of other sizes, in milliseconds.

        Operators take time and workspace in proportion to what they touch; workspaces shrink for no
        size. `None` if it is to be captured by itself.
        """
        return self._for(call.symbols) if call.leaves == self.leaves else None

    def ratio(self, call: CallSizes) -> float:
        """Say how many times as large a call is, by the size of an input that grows most."""
        return self._ratio(call.symbols)

    def _ratio(self, symbols: Mapping[str, Any]) -> float:
        sizes = () if self.region is None else self.region.symbols.sizes
        return max((symbols[name] / self.symbols[name] for name in sizes), default=1.0)

    def costed_like(self, others: Sequence[SizedCapture]) -> SizedCapture | None:
        """Give it with the costs of the one of these that is nearest, scaled as `at` does.

        `None` if it is of none of their traces, or more than a quarter larger than all.
        """
        pairs = [
            (other._ratio(self.symbols), at)
            for at, other in enumerate(others)
            if other.region is self.region and other.program.order == self.program.order
        ]
        near = [(abs(math.log(ratio)), at) for ratio, at in pairs if ratio <= BUCKET]
        if not near:
            return None
        other = others[min(near)[1]]
        times, workspaces = _scaled_costs(other, self.program)
        graph = self.program.graph(times, workspaces, self.loss)
        same = dataclasses.replace(
            self, graph=graph, _costs=other._costs, _measured=other._measured,
            released_outputs=frozenset(), _variants={},
        )  # fmt: skip
        return cast("SizedCapture", same.with_released_outputs(self.released_outputs))

    def _for(self, symbols: Mapping[str, Any]) -> SizedCapture | None:
        region = self.region
        if region is None or self.numerics is not None:
            return None
        of_sizes, of_whole = region.program_of_sizes(self), None
        if self.program.deferred and of_sizes is not None:
            of_whole = region.program_of_sizes(self._with_all_outputs())
        if of_sizes is None or (self.program.deferred and of_whole is None):
            return None
        ready = not self.missing or self._is_read_off(region)
        numbers = region.joint.numbers(symbols)
        program = of_sizes.at(numbers)
        if program.facts == self.program.facts:  # other numbers, of the same sizes
            graph, loss, released = self.graph, self.loss, self.released_outputs
        else:
            released = frozenset()
            loss = _in_proportion(self.loss, _held_bytes(program), _held_bytes(self.program))
            graph = program.graph(*_scaled_costs(self, program), loss)
        other = dataclasses.replace(
            self,
            program=program,
            graph=graph,
            loss=loss,
            released_outputs=released,
            symbols=symbols,
            variants_are_read_off=ready,
            _base=self._base or self,
            _variants={},
            _finished={},
            _cuts={},
            _whole_program=None if of_whole is None else of_whole.at(numbers),
        )
        if released == self.released_outputs:
            return other
        return cast("SizedCapture", other.with_released_outputs(self.released_outputs))

    def _is_read_off(self, region: SizedRegion) -> bool:
        """Whether it can be read off with all gradients; what that takes is done once."""
        other = self.variant(frozenset())
        return isinstance(other, SizedCapture) and region.program_of_sizes(other) is not None

    def _with_all_outputs(self) -> SizedCapture:
        return cast("SizedCapture", self.with_deferred_outputs(frozenset()))

    def variant(self, missing: frozenset[int]) -> Capture:
        """Make the graph for when the gradients at these positions of `returned` do not come."""
        if self._base is None or missing in self._variants:
            return super().variant(missing)
        base = cast("SizedCapture", self._base.variant(missing))
        variant: Capture = base._for(self.symbols) or self._evaluated().variant(missing)
        variant = variant.with_deferred_outputs(self.program.deferred & missing)
        variant = variant.with_leaving_gradients(self.leaving_gradients)
        self._variants[missing] = variant
        return variant

    def _traced_variant(self, missing: frozenset[int]) -> Capture:
        assert self.region is not None
        variant = super()._traced_variant(missing)
        return SizedCapture.of(variant, self.region, self.symbols, self.leaves)

    def as_autograd(self) -> Graph:
        """Give the graph that plain autograd runs, of a capture without alternatives."""
        return super().as_autograd() if self._base is None else self._evaluated().as_autograd()

    def _evaluated(self) -> SizedCapture:
        """Give the same capture with a joint graph of its own."""
        assert self.region is not None
        captured = self.region.evaluated(self, self.symbols)
        captured = cast("SizedCapture", captured.with_deferred_outputs(self.program.deferred))
        other = captured.with_leaving_gradients(self.leaving_gradients).with_loss(self.loss)
        return cast("SizedCapture", other.with_released_outputs(self.released_outputs))


def _held_bytes(program: Program) -> int:
    values = {program.storage[name] for name in program.held}
    return sum(program.facts[value].storage_bytes for value in values)


def _in_proportion(loss: LossCost, bytes_: int, of_bytes: int) -> LossCost:
    """Give what a loss takes of outputs of other sizes."""
    if not of_bytes:
        return loss
    return LossCost(
        -(-loss.workspace_bytes * bytes_ // of_bytes), -(-loss.kept_bytes * bytes_ // of_bytes)
    )


def _scaled_costs(capture: Capture, program: Program) -> tuple[dict[str, float], dict[str, int]]:
    """Scale what operators take to other sizes, by what they touch; workspaces never down."""
    times, workspaces = {}, {}
    index, ops, device = capture.graph.op_index, capture.graph.ops, program.device
    for name in program.calls:
        op = ops[index[name]]
        touched, then = (each.touched_bytes(name, ()) for each in (program, capture.program))
        ratio = touched / then if then else 1.0
        times[name] = op.time * ratio
        own = op.workspace_bytes - state_bytes(program.calls[name], device)
        workspaces[name] = math.ceil(own * max(1.0, ratio))
    return times, workspaces


def _constants(structure: Structure) -> Iterator[Any]:
    if structure.kind == "constant":
        yield structure.constant
    for child in structure.children:
        yield from _constants(child)


def _examples_of(region: torch.fx.GraphModule) -> list[Any]:
    placeholders = region.graph.find_nodes(op="placeholder")
    return [node.meta.get("example_value") for node in placeholders]
