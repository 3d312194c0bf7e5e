"""A region traced once for calls of any size: a graph of sizes, which is evaluated for each call.

AOTAutograd traces it with symbols for the sizes and numbers that change. For a call the symbols are
replaced by its numbers, and all that follows, from the first rewrite on, is as for a graph that was
traced with these numbers: planning and execution see no symbols. All blocks are traced, also those
that do the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat_graph.torch.capturing.capture import capture_joint, errors_told
from remat_graph.torch.capturing.captures import Capture, Costs
from remat_graph.torch.capturing.trace import FlatRegion, trace_region
from remat_graph.torch.cost.strides import RealStrides
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.joint_of_sizes import JointOfSizes
from remat_graph.torch.tracing.structure import Structure, distinct
from remat_graph.torch.tracing.symbols import SYMBOLIC, OtherSizes, Symbols, has_symbols

__all__ = ["SizedRegion", "has_sizes", "trace_sizes"]


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
        return SizedRegion(
            symbols, JointOfSizes(joint, symbols.names), flat.output_structure, slots
        )


@dataclass(frozen=True, slots=True)
class SizedRegion:
    """A region traced for calls of any size. `slots` says which inputs are the same tensor."""

    symbols: Symbols
    joint: JointOfSizes
    structure: Structure
    slots: tuple[int, ...]

    def capture(
        self,
        inputs: Sequence[Any],
        *,
        costs: Costs = "measure",
        loss_alone: bool = True,
        real: RealStrides | None = None,
    ) -> Capture:
        """Capture it for a call, as `capture_region` does, without tracing.

        Raises:
            OtherSizes: if the trace does not hold for the sizes of this call.
            CaptureError: as `capture_region` does.
        """
        tensors, slots = distinct([item for item in inputs if isinstance(item, torch.Tensor)])
        if slots != self.slots:
            raise OtherSizes("other inputs are the same tensor than where it was traced")
        with errors_told():
            joint = self.joint.at(self.symbols.numbers(inputs))
            return capture_joint(
                joint, tensors, self.structure, costs=costs, loss_alone=loss_alone, real=real
            )


def _constants(structure: Structure) -> Iterator[Any]:
    if structure.kind == "constant":
        yield structure.constant
    for child in structure.children:
        yield from _constants(child)


def _examples_of(region: torch.fx.GraphModule) -> list[Any]:
    placeholders = region.graph.find_nodes(op="placeholder")
    return [node.meta.get("example_value") for node in placeholders]
