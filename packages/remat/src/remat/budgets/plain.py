"""What plain autograd takes for the same step, and what a loss takes: the measures of a budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from remat.budgets.free_memory import free_bytes
from remat.dynamo.checkpoints import checkpoints_off
from remat.errors import BudgetError
from remat_exec import (
    Loss,
    Peak,
    as_handed,
    loss_gradients,
    measure_loss,
    measure_peak,
    stand_in_loss,
)
from remat_graph.torch import (
    Capture,
    LossCost,
    flatten,
    generators_restored,
    left_as_it_was,
    original_forward,
    original_forwards,
    read_call,
    remember_modes,
    tensor_at,
)

__all__ = ["has_room_for_plain", "measure_outside_loss", "measure_plain"]

logger = logging.getLogger(__name__)

_SAFE_SHARE = 0.7


def has_room_for_plain(expected_bytes: int, device: torch.device) -> bool:
    """Whether a plain step that is expected to take so much is sure to fit on the device."""
    try:
        return expected_bytes <= _SAFE_SHARE * free_bytes(device)
    except BudgetError:  # nobody can tell what is free here
        return False


def measure_plain(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture: Capture,
    expected_bytes: int,
    device: torch.device,
    loss: Loss | None = None,
) -> Peak | None:
    """Run one plain step for its peak; `None` if it would not fit on the device, or cannot be run.

    Nothing is checkpointed in it: a plan computes again what it chooses, not what the model does.
    Gradients go nowhere, not even into what the inputs were computed from; buffers, inputs and
    generators are put back.
    """
    if not has_room_for_plain(expected_bytes, device):
        return None
    with _undone(module, args, kwargs, capture) as (forward, sources):
        try:
            with checkpoints_off(), measure_peak(device, collect=False) as peak:
                if loss is None:
                    outputs = _with_gradient(forward(), capture)
                    _kept, gradients = stand_in_loss(capture.loss, outputs, device)
                    torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
                else:
                    _gradients = loss_gradients(loss, forward(), sources)
        except RuntimeError as error:
            logger.info("a plain step cannot be measured: %s", error)
            return None
    return peak


def measure_outside_loss(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture: Capture,
    device: torch.device,
    loss: Loss,
) -> tuple[LossCost, frozenset[int]]:
    """Measure a loss of the module's outputs, and find the outputs that get no gradient from it.

    The outputs are real ones, made by a forward without gradients, if it computes none itself, and
    put back as above; the positions are among what the captured program returns.

    Raises:
        LossError: if the loss fails, is no scalar, or depends on none of the outputs.
    """
    program = capture.program
    with _undone(module, args, kwargs, capture) as (forward, _):
        returned = _run_without_gradients(forward)
        tensors, structure = flatten(returned)
        leaf_by_variable: dict[str, torch.Tensor] = {}
        parts = []
        for tensor, output in zip(tensors, program.outputs, strict=True):
            leaf = tensor.detach()
            if output.requires_grad and output.kind in ("fresh", "view"):
                leaf = leaf_by_variable.setdefault(output.variable, leaf.requires_grad_())
            parts.append(leaf)
        leaves = list(leaf_by_variable.values())

        def again() -> Any:
            handed = {id(part): as_handed(part) for part in parts}
            return structure.rebuild(handed[id(part)] for part in parts)

        cost, reached = measure_loss(loss, again, leaves, device)
    bases = {output.variable: output.base for output in program.outputs}
    used = {bases[name] for name, got in zip(leaf_by_variable, reached, strict=True) if got}
    return cost, frozenset(
        position
        for position, name in enumerate(program.returned)
        if name in bases.values() and name not in used
    )


def _run_without_gradients(forward: Callable[[], Any]) -> Any:
    """Run a forward without gradients, or with them if it asks for some itself."""
    modes_put_back = remember_modes()
    try:
        with torch.no_grad():
            return forward()
    except RuntimeError:
        modes_put_back()
        return forward()


@contextmanager
def _undone(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    capture: Capture,
) -> Iterator[tuple[Callable[[], Any], list[torch.Tensor]]]:
    """Give the plain forward of a call and the tensors to differentiate by; undo what it writes."""
    call = read_call(args, kwargs)
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in call.tensors]
    args, kwargs = call.rebuild(leaves)
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
    modes_put_back = remember_modes()  # what raises within a context of the forward leaves them
    with generators_restored(), original_forwards(module), left_as_it_was(module):
        try:
            yield lambda: original_forward(module)(*args, **kwargs), sources
        finally:
            modes_put_back()
            with torch.no_grad():
                for target, data in zip(targets, before, strict=True):
                    target.copy_(data)


def _with_gradient(returned: Any, capture: Capture) -> list[torch.Tensor]:
    """Keep only the outputs that get a gradient."""
    outputs, _ = flatten(returned)
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
