"""What plain autograd takes for the same step: the measure of a fractional budget."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from remat.budget import free_bytes
from remat_exec import Peak, generators_restored, measure_peak, stand_in_loss
from remat_graph.torch import (
    Capture,
    flatten,
    original_forward,
    original_forwards,
    read_call,
    tensor_at,
)

__all__ = ["measure_plain"]

logger = logging.getLogger(__name__)

_SAFE_SHARE = 0.7


def measure_plain(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture: Capture,
    expected_bytes: int,
    device: torch.device,
) -> Peak | None:
    """Run one plain step for its peak; `None` if it would not, or does not, fit on the device.

    Gradients go nowhere, not even into what the inputs were computed from; buffers, inputs and
    generators are put back.
    """
    if expected_bytes > _SAFE_SHARE * free_bytes(device):
        return None
    call = read_call(args, kwargs)
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in call.tensors]
    slots = call.signature.slots
    args, kwargs = call.signature.structure.rebuild(iter([leaves[slot] for slot in slots]))
    program = capture.program
    written = {write.target for write in program.writes.values()}
    targets = [
        tensor_at(module, leaves, item.kind, item.key)
        for item in program.inputs
        if item.variable in written
    ]
    before = [target.detach().clone() for target in targets]
    sources = [
        tensor_at(module, leaves, item.kind, item.key)
        for item in program.inputs
        if item.variable in program.gradients
    ]
    with ExitStack() as stack:
        stack.enter_context(generators_restored(device))
        stack.enter_context(original_forwards(module))
        try:
            with measure_peak(device) as peak:
                outputs = _forward(module, args, kwargs, capture)
                _kept, gradients = stand_in_loss(outputs)
                torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
        except torch.OutOfMemoryError:
            return None
        finally:
            with torch.no_grad():
                for target, data in zip(targets, before, strict=True):
                    target.copy_(data)
    return peak


def _forward(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], capture: Capture
) -> list[torch.Tensor]:
    """Run the forward and keep only the outputs that get a gradient."""
    outputs, _ = flatten(original_forward(module)(*args, **kwargs))
    program = capture.program
    wanted = {program.returned[position] for position in program.tangents.values()}
    return [
        tensor
        for tensor, output in zip(outputs, program.outputs, strict=True)
        if tensor.requires_grad
        and output.requires_grad
        and output.kind in ("fresh", "view")
        and output.base in wanted
    ]
