"""What the budget `"auto"` comes to: what is free at the first step, less what is still to come.

A step's own gradients are within its budget. What an optimizer keeps for each parameter is not, and
is not there before its first step; nothing of that size may be given to a plan.
"""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from remat.budgets.budget import Budget
from remat.budgets.free_memory import free_bytes
from remat.errors import BudgetError
from remat_graph.torch import DeviceSpec

__all__ = ["AutoBudget", "OptimizerLike", "budget_on", "is_optimizer", "pending_state_bytes"]

logger = logging.getLogger(__name__)

OptimizerLike = torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

_SHARE = 0.9
_STEPS = 32  # from one power of two to the next, at which budgets are
_MOMENTS = 2  # for each parameter, as AdamW keeps them: the most of the usual optimizers


class AutoBudget:
    """Fixes `"auto"` once: at the first plan of a model, before an optimizer has allocated.

    Without `parameters` those that regions were called with are counted.
    """

    def __init__(
        self,
        optimizer: OptimizerLike | None,
        parameters: Callable[[], Iterable[torch.nn.Parameter]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._seen: dict[int, weakref.ref[torch.nn.Parameter]] = {}
        self._device: torch.device | None = None
        self._free = 0
        self._budget: Budget | None = None

    def see(self, inputs: Sequence[Any], device: torch.device) -> None:
        """Note what is free before the first step, and the parameters among a region's inputs."""
        if self._budget is not None:
            return
        if self._device is None:
            self._device, self._free = device, free_bytes(device)
        if self._parameters is None:
            parameters = (item for item in inputs if isinstance(item, torch.nn.Parameter))
            self._seen |= {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def fix(self) -> Budget:
        """Give the budget in bytes, the same each time.

        Raises:
            BudgetError: if nothing is left, or what the optimizer allocates cannot be found out.
        """
        if self._budget is None:
            device = self._device or torch.device("cpu")
            if self._parameters is not None:
                parameters = list(self._parameters())
            else:
                parameters = [p for seen in self._seen.values() if (p := seen()) is not None]
            here = [parameter for parameter in parameters if parameter.device.type == device.type]
            pending = pending_state_bytes(here, self._optimizer)
            size = _rounded(int(_SHARE * self._free) - pending)
            logger.info(
                "budget 'auto' takes %d bytes: %.0f%% of %d that are free on %s, less %d for the "
                "state of the optimizer", size, 100 * _SHARE, self._free, device, pending,
            )  # fmt: skip
            if size <= 0:
                raise BudgetError(
                    f"budget='auto': of {self._free:,} bytes that are free on {device} the state "
                    f"of the optimizer will take {pending:,}; give the optimizer as optimizer=, "
                    f"if it keeps less than two numbers for each parameter, or a budget in bytes"
                )
            self._budget = Budget(size_bytes=size)
        return self._budget


def _rounded(size: int) -> int:
    """Round down, by a 32nd at most: what is free is never the same twice, and plans are cached."""
    step = max(1, (1 << max(0, size.bit_length() - 1)) // _STEPS)
    return size // step * step


def budget_on(
    device: DeviceSpec, module: torch.nn.Module, optimizer: OptimizerLike | None
) -> Budget:
    """Give what is left for a step on a device that holds a model and an optimizer's state.

    Nine tenths of its memory, less parameters, buffers and what the optimizer will keep.

    Raises:
        BudgetError: if nothing is left, or it is not known what memory the device has.
    """
    if device.memory_bytes is None:
        raise BudgetError(
            f"budget='auto': DeviceSpec {device.name!r} has no memory_bytes; give it, or a budget "
            f"in bytes or a share"
        )
    held = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    pending = pending_state_bytes(list(module.parameters()), optimizer)
    size = int(_SHARE * device.memory_bytes) - held - pending
    if size <= 0:
        raise BudgetError(
            f"budget='auto': of the {device.memory_bytes:,} bytes of {device.name} the model takes "
            f"{held:,} and the state of the optimizer {pending:,}, so nothing is left for a step; "
            f"take a larger device, smaller types, or an optimizer that keeps less"
        )
    return Budget(size_bytes=size)


def pending_state_bytes(
    parameters: Sequence[torch.nn.Parameter], optimizer: OptimizerLike | None
) -> int:
    """Tell what an optimizer will keep for these parameters and has not allocated yet.

    One that is made already knows its parameters, and for which of them it has its state; a class,
    or a function of a list of parameters, is asked to make one. It takes a step on parameters of
    these shapes on the meta device, where nothing is computed. `None` stands for two tensors of the
    size of each parameter, as AdamW keeps them.

    Raises:
        BudgetError: if it cannot take such a step.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if optimizer is None:
        return _MOMENTS * sum(parameter.nbytes for parameter in trainable)
    try:
        if isinstance(optimizer, torch.optim.Optimizer):
            trial = _like(optimizer)
        else:
            trial = optimizer([_on_meta(parameter) for parameter in trainable])
        return 0 if trial is None else _state_after_a_step(trial)
    except Exception as error:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise BudgetError(
            f"budget='auto' cannot tell what {name} keeps for each parameter "
            f"({type(error).__name__}: {error}); give the budget in bytes"
        ) from error


def is_optimizer(optimizer: object) -> bool:
    """Whether it is an optimizer that is made already."""
    return isinstance(optimizer, torch.optim.Optimizer)


def _on_meta(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    on_meta = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    on_meta.grad = torch.empty_like(on_meta)
    return on_meta


def _like(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Make an optimizer of the same class and settings, of the parameters without a state."""
    groups = []
    for group in optimizer.param_groups:
        pending = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        if pending:
            settings = {key: copy.copy(value) for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": [_on_meta(p) for p in pending]})
    if not groups:
        return None
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    alike: torch.optim.Optimizer = kind(groups, **defaults)
    return alike


def _state_after_a_step(trial: torch.optim.Optimizer) -> int:
    for group in trial.param_groups:  # how it is computed, which the meta device knows one way of
        group.update((way, False) for way in ("fused", "capturable") if group.get(way))
    trial.step()
    return sum(
        item.nbytes
        for state in trial.state.values()
        for item in state.values()
        if isinstance(item, torch.Tensor) and item.device.type == "meta"
    )
