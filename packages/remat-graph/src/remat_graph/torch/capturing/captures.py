"""A captured step: its graph for planning, its program for running, and its variants.

A variant expects other gradients, or has other costs, other makers of its values or a measured
loss; all are made of the one joint graph that was traced.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from remat_graph.graph import Graph
from remat_graph.torch.capturing.between import released_values, with_loss, with_released
from remat_graph.torch.capturing.expecting import differentiable_inputs, program_expecting
from remat_graph.torch.capturing.ways import Ways
from remat_graph.torch.cost.costs import Cost, Costs, costed_graph
from remat_graph.torch.cost.strides import RealStrides
from remat_graph.torch.deferring import deferrable, with_deferred
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.kernels.lstm import lstm_layer
from remat_graph.torch.program import LossCost, Program
from remat_graph.torch.recomputing import is_collective
from remat_graph.torch.repeats.blocks import Repeat
from remat_graph.torch.repeats.periods import Irregular
from remat_graph.torch.tracing.fakes import own_modes
from remat_graph.torch.tracing.joint import Joint
from remat_graph.torch.tracing.structure import Structure
from remat_graph.torch.ways.choice import Choice
from remat_graph.torch.ways.cuts import Cut

__all__ = ["Capture", "Costs", "finish"]

logger = logging.getLogger(__name__)

_LEAST_LET_GO = 0.01  # of all values of a graph, to be worth another plan
_LEAST_DEFERRED = 0.01  # of the largest value of a graph, to be made when read


@dataclass(frozen=True)
class Capture(Ways):
    """One training graph of a module, for one call of it.

    `graph` is what planning sees, `program` what execution runs. `missing` are the positions, among
    what the forward returns, whose gradients the graph takes to be absent; `released_outputs` those
    that it takes the user to hold no more when the backward starts; those that no step makes are
    `program.deferred`, and in `whole_program` each is made. `loss` is what a loss outside
    the module takes: an allowance, unless it was measured and set by `with_loss`. A `dry` capture
    is of tensors without data: its program can be read but not run. Nothing says whether another
    call would give the same graph. `_finished` are graphs for other gradients, as traced, which
    captures of one trace share; `_trace_whole` traces all of what was traced in part; `_merged`
    says whether what eager computes several times is computed once.
    """

    graph: Graph
    program: Program
    output_structure: Structure
    missing: frozenset[int]
    loss: LossCost
    dry: bool
    _joint: Joint = field(repr=False)
    _costs: Costs = field(repr=False)
    _measured: dict[str, Cost] = field(repr=False)
    _real: RealStrides | None = field(repr=False)
    _repeats: tuple[Repeat, ...] = field(default=(), repr=False)
    _merged: bool = field(default=False, repr=False)
    released_outputs: frozenset[int] = frozenset()
    _choice: Choice | None = field(default=None, repr=False)
    _plain: Capture | None = field(default=None, repr=False)
    _whole_program: Program | None = field(default=None, repr=False)
    _variants: dict[frozenset[int], Capture] = field(
        default_factory=dict, repr=False, compare=False
    )
    _trace_whole: Callable[[], Capture] | None = field(default=None, repr=False, compare=False)
    _cuts: dict[str, tuple[tuple[Cut, ...], ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _finished: dict[frozenset[int], Capture] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The inputs of the program that get a gradient if every output does."""
        return differentiable_inputs(self._joint, self._repeats)

    @property
    def communicates(self) -> bool:
        """Whether it has an operator that the ranks of a group run together."""
        return any(is_collective(call.target, call.body) for call in self.program.calls.values())

    @property
    def has_lstm_layers(self) -> bool:
        """Whether it has layers of LSTMs as one operator each, which could be in steps."""
        return any(call.target is lstm_layer for call in self.program.calls.values())

    def variant(self, missing: frozenset[int]) -> Capture:
        """Make the graph for when the gradients at these positions of `returned` do not come.

        Its forward ops are those of this capture; operators already measured are not measured
        again, and a variant is made once.

        Raises:
            CaptureError: if no gradient is left.
        """
        if missing not in self._variants:
            if missing not in self._finished:
                self._finished[missing] = self._traced_variant(missing)
            other = self._finished[missing].with_deferred_outputs(self.program.deferred & missing)
            if self._choice is not None:
                other = replace(other, _costs=self._costs, _measured=self._measured)
                other = self._as_this(other, self._choice.laid)
            elif other._costs != self._costs:
                other = other.costed(self._costs, self._measured)
            self._variants[missing] = other.with_leaving_gradients(self.leaving_gradients)
        return self._variants[missing]

    def _traced_variant(self, missing: frozenset[int]) -> Capture:
        try:
            with own_modes():
                variant = finish(
                    self._joint, missing, self._costs, self._measured,
                    self.output_structure, self._real, self.dry, self._repeats,
                )  # fmt: skip
            return replace(variant, _finished=self._finished, _trace_whole=self._trace_whole)
        except Irregular as error:
            if self._trace_whole is None:
                raise
            logger.info("every block is traced for other gradients: %s", error)
            return self._trace_whole().variant(missing)

    def costed(self, costs: Costs, measured: dict[str, Cost] | None = None) -> Capture:
        """Give the same graph with other costs; `measured` are earlier ones, and are added to.

        Raises:
            CaptureError: if an operator cannot be measured.
        """
        measured = self._measured if measured is None else measured
        with own_modes():
            graph = costed_graph(self.program, costs, measured, self.loss)
        other = replace(
            self, graph=graph, _costs=costs, _measured=measured, released_outputs=frozenset(),
            _variants={},
        )  # fmt: skip
        return other.with_released_outputs(self.released_outputs)

    def _with(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def with_loss(self, loss: LossCost) -> Capture:
        """Plan for a loss outside the module that takes this much."""
        if loss == self.loss:
            return self
        return replace(self, graph=with_loss(self.graph, loss), loss=loss)

    def with_released_outputs(self, positions: frozenset[int]) -> Capture:
        """Plan for outputs that the user holds no more when the backward starts.

        They are positions of what the forward returns. Such a value is there until the loss has
        run, and after it only if the backward reads it.
        """
        if positions == self.released_outputs:
            return self
        gone = self.released_values(positions) - self.released_values(self.released_outputs)
        return replace(self, graph=with_released(self.graph, gone), released_outputs=positions)

    @property
    def outline(self) -> Graph:
        """A graph with the ops and values of this one, whose sizes and times may be others."""
        return self.graph

    def size_of(self, value: str) -> int:
        """Give the bytes of a value of the graph; none if it has no such value."""
        found = self.graph.value_by_name.get(value)
        return 0 if found is None else found.size_bytes

    @property
    def whole_program(self) -> Program:
        """The program without alternatives in which every output is made."""
        plain = self if self._plain is None else self._plain
        return plain.program if plain._whole_program is None else plain._whole_program

    @property
    def deferrable(self) -> frozenset[int]:
        """The positions of outputs that get no gradient and can be made when read, if large."""
        return deferrable(self.whole_program, _LEAST_DEFERRED)

    def deferred_bytes(self, positions: frozenset[int]) -> int:
        """Sum the bytes of outputs."""
        program = self.whole_program
        return sum(program.facts[program.handed[p]].storage_bytes for p in positions)

    def with_deferred_outputs(self, positions: frozenset[int]) -> Capture:
        """Plan for outputs that are made when they are read, instead of in the step.

        Raises:
            CaptureError: if one of them cannot be, or an operator cannot be measured.
        """
        if positions == self.program.deferred:
            return self
        whole = self.whole_program
        if not positions <= deferrable(whole):
            raise CaptureError(
                f"outputs {sorted(positions - deferrable(whole))} cannot be made when read: one "
                f"gets a gradient, shares its memory, or is made by what may run but once"
            )
        return self._deferring(positions)

    @property
    def variants_are_read_off(self) -> bool:
        """Whether `over_all_outputs` takes no pass over a graph, so that a backward can ask it."""
        return False

    @functools.cached_property
    def over_all_outputs(self) -> Capture:
        """The graph for all gradients after the forward of this one: it makes no more outputs."""
        other, positions = self.variant(frozenset()), self.program.deferred
        return other if other.program.deferred == positions else other._deferring(positions)

    def _deferring(self, positions: frozenset[int]) -> Capture:
        whole, plain = self.whole_program, self.without_alternatives()
        program = with_deferred(whole, positions) if positions else whole
        other = replace(plain, program=program, _whole_program=whole, _cuts={})
        other = other.costed(self._costs)
        if self._choice is not None:
            other = self._as_this(other, self._choice.laid.intersection(program.calls))
        return other

    @property
    def leaving_gradients(self) -> frozenset[int]:
        """The inputs of the program, by position, whose gradients leave at once."""
        inputs = enumerate(self.program.inputs)
        return frozenset(at for at, item in inputs if item.variable in self.program.leaving)

    def with_leaving_gradients(self, positions: frozenset[int]) -> Capture:
        """Plan for gradients that whoever gets them lets go of at once.

        They are those of inputs of the program, by position, as of parameters whose hooks step an
        optimizer in the backward. Such a gradient counts until it is given out, and that comes
        after all that reads its parameter.
        """
        inputs = self.program.inputs
        leaving = frozenset(inputs[at].variable for at in positions if at < len(inputs))
        leaving = leaving.intersection(self.program.gradients)
        if leaving == self.program.leaving:
            return self
        whole = self._whole_program
        other = replace(
            self,
            program=replace(self.program, leaving=leaving),
            _plain=None if self._plain is None else self._plain.with_leaving_gradients(positions),
            _whole_program=whole and replace(whole, leaving=leaving),
        )
        return other.costed(self._costs)

    def as_autograd(self) -> Graph:
        """Give the graph that plain autograd runs, of a capture without alternatives.

        It holds all gradients to the end. What eager computes several times from the same, such as
        casts under autocast, is several values in it.
        """
        if not self._merged:
            return self.with_leaving_gradients(frozenset()).graph
        with contextlib.suppress(Irregular), own_modes():
            eager = finish(
                self._joint, self.missing, self._costs, self._measured, self.output_structure,
                self._real, self.dry, self._repeats,
                leave_out=frozenset({"merge-equal"}),
            )  # fmt: skip
            return eager.with_loss(self.loss).with_released_outputs(self.released_outputs).graph
        return self.graph

    def release_changes_plan(self, positions: frozenset[int]) -> bool:
        """Whether it makes a difference to let go of outputs at these positions."""
        gone = self.released_values(positions) ^ self.released_values(self.released_outputs)
        everything = sum(self.size_of(value.name) for value in self.outline.values)
        return sum(map(self.size_of, gone)) >= _LEAST_LET_GO * max(1, everything)

    def released_values(self, positions: frozenset[int]) -> frozenset[str]:
        """Name the values that are held for the user alone, who lets go of these outputs."""
        return released_values(self.program, self.outline, positions)

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        """Return the capture itself: it is immutable and belongs to no module."""
        return self


def finish(
    base: Joint,
    missing: frozenset[int],
    costs: Costs,
    measured: dict[str, Cost],
    output_structure: Structure,
    real: RealStrides | None,
    dry: bool,
    repeats: tuple[Repeat, ...] = (),
    *,
    leave_out: frozenset[str] = frozenset(),
) -> Capture:
    """Make the capture of a traced step in which the gradients at positions `missing` do not come.

    Raises:
        CaptureError: if no gradient is left, or an operator cannot be measured.
    """
    program, merged = program_expecting(base, missing, real, repeats, leave_out)
    loss = program.loss_allowance
    graph = costed_graph(program, costs, measured, loss)
    logger.info(
        "captured %d ops, %d values, costs %s", len(graph.ops), len(graph.values),
        costs if isinstance(costs, str) else costs.name,
    )  # fmt: skip
    return Capture(
        graph, program, output_structure, missing, loss, dry, base, costs, measured, real, repeats,
        merged,
    )  # fmt: skip
