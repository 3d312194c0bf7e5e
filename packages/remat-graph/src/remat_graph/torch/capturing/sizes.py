"""A region traced once for calls of any size: a graph of sizes, which is evaluated for each call.

AOTAutograd traces it with symbols for the sizes and numbers that change. For a call the symbols are
replaced by its numbers, and all that follows, from the first rewrite on, is as for a graph that was
traced with these numbers: planning and execution see no symbols. All blocks are traced, also those
that do the same.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from remat_graph.graph import Graph
from remat_graph.torch.capturing.capture import capture_joint, errors_told, leaves_of
from remat_graph.torch.capturing.captures import Capture, Costs
from remat_graph.torch.capturing.choice_of_sizes import ChoiceOfSizes
from remat_graph.torch.capturing.groups_of_sizes import GroupsOfTrace
from remat_graph.torch.capturing.program_of_sizes import NotOfSizes, ProgramOfSizes
from remat_graph.torch.capturing.sized_ways import SizedWays
from remat_graph.torch.cost.other_sizes import (
    graph_costed_like,
    loss_in_proportion,
    op_costs_like,
)
from remat_graph.torch.cost.strides import RealStrides
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.program import Program
from remat_graph.torch.rewrites.attention import MasksOfSizes
from remat_graph.torch.tracing.joint import Key
from remat_graph.torch.tracing.joint_of_sizes import JointOfSizes, Numbers
from remat_graph.torch.tracing.structure import Structure, tensors_of_call
from remat_graph.torch.tracing.symbols import OtherSizes, Symbols

__all__ = ["BUCKET", "CallSizes", "SizedCapture", "SizedRegion"]

logger = logging.getLogger(__name__)

BUCKET = 1.25  # times a size of which costs are known, for which they are scaled


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
        self._masks = MasksOfSizes(joint)
        self.groups = GroupsOfTrace()

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
        tensors, slots = tensors_of_call(inputs)
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
        numbers: Numbers | None = None,
        costs: Costs,
        loss_alone: bool,
        real: RealStrides | None,
    ) -> SizedCapture:
        with errors_told():
            if numbers is None:
                numbers = self.joint.numbers(symbols)
            joint = dataclasses.replace(self.joint.at(numbers), leaves=leaves)
            captured = capture_joint(
                joint, self._likes, self._structure,
                costs=costs, loss_alone=loss_alone, real=real, dry=False,
            )  # fmt: skip
        return SizedCapture.of(captured, self, symbols, leaves)

    def evaluated(
        self, like: SizedCapture, symbols: Mapping[str, Any], numbers: Numbers | None = None
    ) -> SizedCapture:
        """Capture it for numbers, through all passes, with the costs and gradients of another."""
        captured = self._at(
            symbols,
            like.leaves,
            numbers=numbers,
            costs="estimate",
            loss_alone=False,
            real=like._real,
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
        found = self._programs[key]
        return found if found is not None and found.order == program.order else None

    def _read(self, like: SizedCapture) -> ProgramOfSizes:
        joint, numbers = self.joint, like.symbols
        symbols = self.symbols.generic(numbers, joint.is_generic, joint.ties)
        if symbols is None:
            joint = joint.tied(self.symbols.ties(numbers))
            symbols = self.symbols.generic(numbers, joint.is_generic, joint.ties)
        if symbols is None:
            raise NotOfSizes("no sizes near those of a call differ from all other numbers")
        apart = joint.numbers_apart(symbols)
        generic: Capture = self.evaluated(like, symbols, apart)
        if like.program.deferred:  # over all outputs, also of one that gets a gradient
            generic = generic._deferring(like.program.deferred)
        generic = generic.with_leaving_gradients(like.leaving_gradients)
        of_sizes = ProgramOfSizes(joint, generic.program, apart, self._masks)
        program = of_sizes.at(joint.numbers(numbers))
        if program != like.program or program.equivalence != like.program.equivalence:
            raise NotOfSizes("it is another program for other sizes")
        return of_sizes


@dataclass(frozen=True)
class SizedCapture(SizedWays):
    """A capture of a region that was traced for calls of any size, for one of these.

    `symbols` are its numbers, `leaves` the inputs that keep their gradient. One that was read off
    another of the same region has that as `_base`, and no joint graph of its own.
    """

    region: SizedRegion | None = field(default=None, repr=False, compare=False)
    symbols: Mapping[str, Any] = field(default_factory=dict)
    leaves: frozenset[Key] = frozenset()
    _base: SizedCapture | None = field(default=None, repr=False, compare=False)
    _of_sizes: ChoiceOfSizes | None = field(default=None, repr=False, compare=False)

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

    def has_same_sizes(self, call: CallSizes) -> bool:
        """Whether all tensors of a call are as in this one: numbers alone may differ."""
        return self._have_same_sizes(call.symbols)

    def _have_same_sizes(self, symbols: Mapping[str, Any]) -> bool:
        assert self.region is not None
        of_sizes = self.region.program_of_sizes(self._uncut)
        numbers = self.region.joint.numbers(symbols)
        return of_sizes is not None and of_sizes.have_same_sizes(numbers, self._numbers)

    def is_above(self, other: SizedCapture) -> bool:
        """Whether no number of another capture of this trace is more than in this one."""
        return all(
            number <= most for number, most in zip(other._numbers, self._numbers, strict=True)
        )

    def ratio(self, call: CallSizes) -> float:
        """Say how many times as large a call is, by what grows most: a size, or a value if less."""
        ratio = self._ratio(call.symbols)
        of_sizes = None if self.region is None else self.region.program_of_sizes(self._uncut)
        if ratio <= 1.0 or of_sizes is None or self.region is None:
            return ratio
        return min(ratio, of_sizes.growth(self.region.joint.numbers(call.symbols), self._numbers))

    def _ratio(self, symbols: Mapping[str, Any]) -> float:
        sizes = () if self.region is None else self.region.symbols.sizes
        return max((symbols[name] / self.symbols[name] for name in sizes), default=1.0)

    def nearest(self, others: Sequence[SizedCapture]) -> SizedCapture | None:
        """Find that of these of which operators take in proportion, the nearest of the same trace.

        `None` if it is of none of their traces, or more than a quarter larger than all.
        """
        ratios = [
            (other._ratio(self.symbols), at)
            for at, other in enumerate(others)
            if other.region is self.region and other.program.order == self.program.order
        ]
        near = [(abs(math.log(ratio)), at) for ratio, at in ratios if ratio <= BUCKET]
        return others[min(near)[1]] if near else None

    def costed_like(self, other: SizedCapture) -> SizedCapture:
        """Give it with the costs of another of its trace, scaled as `at` does."""
        make = functools.partial(
            graph_costed_like, other.graph, other.program, self.program, self.loss
        )
        same = self._later(
            make, _costs=other._costs, _measured=other._measured, released_outputs=frozenset(),
            _variants={},
        )  # fmt: skip
        return same.with_released_outputs(self.released_outputs)

    def op_costs_like(self, other: SizedCapture, graph: Graph) -> tuple[list[float], list[int]]:
        """Give the seconds and the workspace of each op of a graph, scaled as `at` does.

        That is what they are in the graph of this capture, which is not made. `graph` has the ops
        of that.
        """
        return op_costs_like(other.graph, other.program, self.program, self.loss, graph)

    def _for(self, symbols: Mapping[str, Any]) -> SizedCapture | None:
        region = self.region
        if region is None:
            return None
        if self._choice is not None:
            plain = self._uncut._for(symbols)
            return plain and self._written_for(plain)
        programs = self._programs_for(symbols)
        if programs is None:
            return None
        (of_sizes, of_whole), numbers = programs, region.joint.numbers(symbols)
        program = of_sizes.at(numbers)
        other = self._later(
            **self._costs_for(program, symbols),
            program=program,
            symbols=symbols,
            _base=self._base or self,
            _variants={},
            _finished={},
            _cuts={},
            _whole_program=None if of_whole is None else of_whole.at(numbers),
        )
        return other.with_released_outputs(self.released_outputs)

    def _programs_for(
        self, symbols: Mapping[str, Any]
    ) -> tuple[ProgramOfSizes, ProgramOfSizes | None] | None:
        """Give the program of all sizes, and that with every output, if they are of these."""
        assert self.region is not None
        of_sizes, of_whole = self.region.program_of_sizes(self), None
        if of_sizes is None or not of_sizes.holds_for(symbols):
            return None
        if self.program.deferred:
            of_whole = self.region.program_of_sizes(self._with_all_outputs())
            if of_whole is None or not of_whole.holds_for(symbols):
                return None
        return of_sizes, of_whole

    def sizes_of(self, graph: Graph) -> list[int]:
        """Give the bytes of the values of a graph of the same ops, in its order."""
        of_sizes = None if self.region is None else self.region.program_of_sizes(self._uncut)
        if of_sizes is None:
            return [self.size_of(value.name) for value in graph.values]
        bytes_, places = of_sizes.value_bytes(self._numbers), of_sizes.value_bytes.places
        return [
            bytes_[places[value.name]] if value.name in places else self.size_of(value.name)
            for value in graph.values
        ]

    def _costs_for(self, program: Program, symbols: Mapping[str, Any]) -> dict[str, Any]:
        """Give the graph and the loss of the program of other numbers, if these are sizes."""
        if self._have_same_sizes(symbols):
            return {"graph": self._graph_later, "loss": self.loss}
        loss = loss_in_proportion(self.loss, program, self.program)
        graph = functools.partial(graph_costed_like, self.graph, self.program, program, loss)
        return {"graph": graph, "loss": loss, "released_outputs": frozenset()}

    @functools.cached_property
    def over_all_outputs(self) -> Capture:
        """The graph for all gradients after the forward of this one: it makes no more outputs."""
        base = self._base_alike
        over_all = None if base is self else base.over_all_outputs
        read_off = over_all._for(self.symbols) if isinstance(over_all, SizedCapture) else None
        return super().over_all_outputs if read_off is None else read_off

    @property
    def variants_are_read_off(self) -> bool:
        """Whether `over_all_outputs` is read off, too, whenever it is needed.

        What that takes is done once, for the capture off which this one was read.
        """
        base = self._base_alike
        if base is self:
            return False
        over_all = base.over_all_outputs
        return isinstance(over_all, SizedCapture) and over_all._allows(self.symbols)

    def _allows(self, symbols: Mapping[str, Any]) -> bool:
        """Whether the same capture for other numbers can be read off this one."""
        if self._choice is None:
            return self._programs_for(symbols) is not None
        plain, of_sizes = self._uncut._for(symbols), self._choice_of_sizes
        return plain is not None and of_sizes is not None and of_sizes.allows(plain.program)

    def _with_all_outputs(self) -> SizedCapture:
        return cast("SizedCapture", self.with_deferred_outputs(frozenset()))

    def variant(self, missing: frozenset[int]) -> Capture:
        """Make the graph for when the gradients at these positions of `returned` do not come."""
        is_chosen = self._choice is not None and self._base_in_ways is self
        if self._base is None or is_chosen or missing in self._variants:
            return super().variant(missing)
        base = cast("SizedCapture", self._base.variant(missing))
        variant: Capture = base._for(self.symbols) or self._evaluated().variant(missing)
        variant = variant.with_deferred_outputs(self.program.deferred & missing)
        variant = variant.with_leaving_gradients(self.leaving_gradients)
        self._variants[missing] = variant
        return variant

    def _traced_variant(self, missing: frozenset[int]) -> Capture:
        assert self.region is not None
        if self._base is not None:
            return self._uncut.variant(missing)
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
        if self._choice is not None:
            captured = self._as_this(captured, self._choice.laid)
        other = captured.with_leaving_gradients(self.leaving_gradients).with_loss(self.loss)
        return cast("SizedCapture", other.with_released_outputs(self.released_outputs))
