"""Tracing a graph of TorchDynamo's for calls of any size, with symbols for what it left open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from remat_graph.torch.capturing.capture import errors_told
from remat_graph.torch.capturing.sizes import SizedRegion
from remat_graph.torch.capturing.trace import FlatRegion, trace_region
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.joint_of_sizes import JointOfSizes
from remat_graph.torch.tracing.structure import Structure, tensors_of_call
from remat_graph.torch.tracing.symbols import SYMBOLIC, Symbols, has_symbols
from remat_graph.torch.tracing.whole_slices import drop_whole_slices

__all__ = ["has_sizes", "trace_sizes"]


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
        _, slots = tensors_of_call(inputs)
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
            joint = drop_whole_slices(trace_region(flat, flat_inputs))
        if any(isinstance(each, SYMBOLIC) for each in _constants(flat.output_structure)):
            raise CaptureError("it returns a size")
        own = JointOfSizes(joint, symbols.names, symbols.ranges)
        likes = flat_inputs[: len(first)]
        return SizedRegion(symbols, own, flat.output_structure, slots, likes)


def _constants(structure: Structure) -> Iterator[Any]:
    if structure.kind == "constant":
        yield structure.constant
    for child in structure.children:
        yield from _constants(child)


def _examples_of(region: torch.fx.GraphModule) -> list[Any]:
    placeholders = region.graph.find_nodes(op="placeholder")
    return [node.meta.get("example_value") for node in placeholders]
