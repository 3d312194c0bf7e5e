"""Plans for a whole module, as one region, without running the plan: capture, then plan."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from remat.budgets.auto import AutoBudget, OptimizerLike, budget_on
from remat.budgets.budget import Budget
from remat.cache import remembered_costs
from remat.dynamo.checkpoints import checkpoints_off
from remat.errors import PlanMismatch
from remat.planning.kernels import Kernels
from remat.planning.outputs import Outputs, are_optional, not_named, with_named_outputs
from remat.planning.planner import make_plan
from remat.planning.settings import Settings, as_args
from remat.planning.task import RunnablePlan
from remat.refusals import refuse_wrapped
from remat.report.readable_plan import ReadablePlan
from remat_exec import Loss, get_executor, with_call
from remat_graph.torch import (
    AllocationRecorder,
    Capture,
    Cost,
    Costs,
    DeviceSpec,
    beside_profilers,
    capture,
    collector_at_rest,
    process_lock,
    read_call,
)
from remat_partition import Partitioner
from remat_solvers import BudgetTooSmall, Progress, Solver

__all__ = ["plan", "plan_module"]


def plan(
    model: torch.nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | float | str,
    solver: str | Solver = "auto",
    costs: Costs = "measure",
    limit_seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    numerics: str | None = None,
    partitioner: str | Partitioner | None = None,
    outputs: Outputs | None = None,
    optimizer_in_backward: bool = False,
    kernels: Kernels = "eager",
) -> ReadablePlan:
    """Plan without running the plan: arguments of `rematerialize`, for the whole model at once.

    With `costs="estimate"` or a `DeviceSpec` nothing is run at all, and a fractional budget is of
    what plain autograd is estimated to take; `"auto"` is what a `DeviceSpec` has beside the model
    and the optimizer's state. The model and its inputs, or some of them, may then be on the meta
    device or made under a `FakeTensorMode`, on a device that is there. (`.to("meta")`
    unties tied weights: make the model under `torch.device("meta")`.)

    With `optimizer_in_backward` gradients of parameters are taken to leave at once, as where hooks
    step an optimizer in the backward and drop `.grad`; what a step of theirs takes is not counted.

    Peaks are approximate then: estimated costs know of no workspace of an operator. What is on
    meta is planned as on the CPU, but for a `DeviceSpec` with a `capability`, such as those of
    `DEVICES`: for that it is planned as on such a device, with CUDA's operators for attention and
    the blocks of its allocator.

    Where no plan fits otherwise, outputs beside the loss are made when they are read.

    Raises:
        BudgetError: if the budget cannot be read.
        CaptureError: if the model cannot be captured as one static graph.
        BudgetTooSmall: if no schedule within the budget was found.
        SolverError: if the solver is unknown, broken or unsuitable.
        LossError: if the loss cannot be run or differentiated.
    """
    settings = Settings.read(
        budget, solver, costs, limit_seconds, progress, loss,
        optimizer=optimizer, numerics=numerics, partitioner=partitioner, outputs=outputs,
        optimizer_in_backward=optimizer_in_backward, kernels=kernels,
    )  # fmt: skip
    return plan_module(model, as_args(args), dict(kwargs or {}), settings).plan


def plan_module(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> RunnablePlan:
    """Plan for a whole module without running the plan."""
    refuse_wrapped(model)
    dry = settings.costs != "measure" and settings.loss is None
    rest = collector_at_rest() if dry else nullcontext()
    with process_lock, AllocationRecorder.paused(), rest:
        return beside_profilers(
            _device(model, args, kwargs), lambda: _plan_module(model, args, kwargs, settings)
        )


def _plan_module(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> RunnablePlan:
    started = time.perf_counter()
    if settings.loss is not None:
        settings = replace(settings, loss=with_call(settings.loss, args, kwargs))

    def captured(*, lstms_in_steps: bool) -> Capture:
        with checkpoints_off():
            return _captured(model, args, kwargs, settings.costs, lstms_in_steps=lstms_in_steps)

    by_layers = captured(lstms_in_steps=False)
    try:
        return _plan_captured(model, args, kwargs, settings, by_layers, started)
    except (BudgetTooSmall, PlanMismatch) as error:
        if not by_layers.has_lstm_layers:
            raise
        if isinstance(error, BudgetTooSmall) and settings.costs != "measure":
            # A fraction is of what eager takes, as estimated.
            settings = replace(settings, budget=Budget(size_bytes=error.budget_bytes))
    by_steps = captured(lstms_in_steps=True)
    return _plan_captured(model, args, kwargs, settings, by_steps, started)


def _plan_captured(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    captured: Capture,
    started: float,
) -> RunnablePlan:
    if settings.outputs is not None:
        captured = with_named_outputs(
            captured, not_named(settings.outputs, captured.output_structure, captured.program)
        )
    if settings.optimizer_in_backward:
        inputs = enumerate(captured.program.inputs)
        parameters = frozenset(at for at, item in inputs if item.kind == "parameter")
        captured = captured.with_leaving_gradients(parameters)
    if settings.numerics is not None:
        captured = captured.with_alternatives(settings.numerics)
    is_dry = settings.costs != "measure"  # nothing is compiled then
    if settings.kernels == "inductor" and (
        is_dry or settings.runs_groups_on(captured.program.device)
    ):
        captured = captured.in_groups()
    if settings.budget.is_auto and isinstance(settings.costs, DeviceSpec):
        budget = budget_on(settings.costs, model, settings.optimizer)
        settings = replace(settings, budget=budget)
    elif settings.budget.is_auto:
        auto = AutoBudget(settings.optimizer, model.parameters)
        auto.see((), captured.program.device)
        settings = replace(settings, budget=auto.fix())
    make = functools.partial(make_plan, model, args, kwargs, settings, run=False, started=started)
    others = captured.deferrable - captured.program.deferred
    optional = bool(others) and are_optional(settings.outputs, get_executor(settings.executor))
    try:
        return make(captured, is_last=not optional)
    except BudgetTooSmall:
        if not optional:
            raise
    return make(captured.with_deferred_outputs(captured.deferrable))  # made when they are read


def _device(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (*model.parameters(), *read_call(args, kwargs).tensors)
    devices = (tensor.device for tensor in tensors if tensor.device.type != "cpu")
    return next(devices, torch.device("cpu"))


def _captured(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    costs: Costs,
    *,
    lstms_in_steps: bool = False,
) -> Capture:
    """Capture a whole module; what was measured in other processes is not measured again."""
    measured: dict[str, Cost] = {}
    with remembered_costs(measured, _device(model, args, kwargs), costs):
        return capture(
            model, args, kwargs, costs=costs, measured=measured, lstms_in_steps=lstms_in_steps
        )
