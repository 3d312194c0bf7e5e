"""The graphs of a model for a curve of time against peak, and their budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from remat.budgets.budget import Budget
from remat.budgets.plain import measure_plain
from remat.errors import RematError
from remat.planning.kernels import Kernels
from remat.planning.outputs import Outputs, are_optional
from remat.planning.planner import scalar_bytes
from remat.planning.settings import Settings, as_args
from remat.planning.slices import sliced_programs, whole_programs
from remat.planning.whole_module import plan_module
from remat_exec import Loss, get_executor, with_call
from remat_graph import Graph, Numerics
from remat_graph.torch import Capture, Costs, missing_compiler

__all__ = ["graphs_and_budgets"]

_UNBOUNDED = 1 << 62  # more than any machine has


def graphs_and_budgets(
    model: torch.nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
    wanted: Sequence[Budget] | None,
    costs: Costs,
    loss: Loss | None,
    numerics: Numerics | None = None,
    outputs: Outputs | None = None,
    optimizer_in_backward: bool = False,
    kernels: Kernels = "eager",
) -> tuple[list[list[Graph]], list[int | float] | None, int]:
    """Capture a model; give its graphs, their budgets in bytes, and what of each is set aside.

    The first graph is the program as it is; beside it are what `numerics` and `kernels` allow. If
    some outputs can be made when they are read, the same without these follow, for budgets at which
    the first have no plan.

    Raises:
        RematError: if the model is no module; as `remat.plan`.
    """
    if not isinstance(model, torch.nn.Module):
        raise RematError(
            f"model={model!r} is a {type(model).__name__}; give a torch.nn.Module or a Graph"
        )
    call = as_args(args), dict(kwargs)
    settings = Settings.read(
        _UNBOUNDED, "store-all", costs, None, None, loss,
        outputs=outputs, optimizer_in_backward=optimizer_in_backward,
    )  # fmt: skip
    in_groups = kernels == "inductor"
    planned = plan_module(model, *call, settings)
    captured, plan = planned.capture, planned.plan
    device = captured.program.device
    if in_groups and costs == "measure":  # nothing is compiled else
        in_groups = not missing_compiler(device)
    aside = scalar_bytes(device.type)
    programs = [captured]
    if are_optional(settings.outputs, get_executor(settings.executor)):
        without = captured.with_deferred_outputs(captured.deferrable)  # made when they are read
        programs += [without] if without is not captured else []
    if wanted is None:
        return [_graphs(each, numerics, 1, in_groups=in_groups) for each in programs], None, aside
    plain = (plan.plain_peak_bytes or plan.store_all_peak_bytes + aside) - aside
    if costs == "measure" and any(budget.fraction is not None for budget in wanted):
        bound_loss = None if loss is None else with_call(loss, *call)
        peak = measure_plain(model, *call, captured, plan.store_all_peak_bytes, device, bound_loss)
        plain = plain if peak is None else peak.peak_bytes
    stored = plain + aside
    sizes: list[int | float] = [max(1, b.resolve(lambda: stored) - aside) for b in wanted]
    target = int(min(sizes))
    ways = [_graphs(each, numerics, target, in_groups=in_groups) for each in programs]
    return ways, sizes, aside


def _graphs(
    captured: Capture, numerics: Numerics | None, target: int, *, in_groups: bool
) -> list[Graph]:
    """List the programs that a step may be run as, the finest slices for so many bytes."""
    if numerics is None:
        return [captured.graph]
    offered = captured.with_alternatives(numerics)
    if in_groups:
        offered = offered.in_groups()
    programs = (*whole_programs(offered), *sliced_programs(offered, target))
    return [each.graph for each in programs]
