"""Options that commands over models share, and what they are read as."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from remat.budget import parse_budget
from remat.command.targets import Target, read_settings
from remat.errors import BudgetError, RematError
from remat.planning import Settings, plan_module
from remat.plans import Plan
from remat_graph.torch import Costs

__all__ = [
    "Batch",
    "Device",
    "Measure",
    "Model",
    "ModelOrGraph",
    "Seq",
    "Sets",
    "Type",
    "check_budget",
    "dry_plan",
    "read_target",
]

Model = Annotated[str, typer.Argument(help="FILE.py:factory, or a model type of transformers.")]
ModelOrGraph = Annotated[
    str, typer.Argument(help="FILE.py:factory, a model type of transformers, or a GRAPH.json.")
]
Batch = Annotated[int | None, typer.Option(min=1, help="Batch size; of a model type 8, else.")]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens; of a model type at most 1024, else.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value of the configuration, or for the factory; repeatable."),
]
Type = Annotated[str, typer.Option("--dtype", help="Of a model type: float32, bfloat16, float16.")]
Device = Annotated[
    str | None, typer.Option(help="Estimate for h100, a100, l4, 4090 or mi300x, without data.")
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Make the model with its data and measure it here.")
]


def read_target(
    name: str, batch: int | None, seq: int | None, entries: list[str] | None, dtype: str
) -> Target:
    """Read what names a model.

    Raises:
        RematError: if the type is not known, or a setting cannot be read.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise RematError(f"--dtype {dtype!r}; give float32, bfloat16 or float16")
    return Target(name, batch, seq, read_settings(entries), dtype)


def check_budget(budget: str, costs: Costs) -> None:
    """Refuse, before a model is made, what is no budget.

    Raises:
        BudgetError: if it cannot be read, or is `"auto"` where nothing is measured.
    """
    if parse_budget(budget).is_auto and costs != "measure":
        raise BudgetError("budget='auto' is of what is free here; give bytes or a share")


def dry_plan(
    target: Target,
    costs: Costs,
    budget: str | int,
    solver: str,
    limit_seconds: float | None,
    progress: Any,
) -> Plan:
    """Plan without running the plan; Ctrl-C keeps the best so far.

    Raises:
        RematError: as `Target.build` and `remat.plan`.
    """
    example = target.build(costs)
    settings = Settings.read(budget, solver, costs, limit_seconds, progress, None)
    settings = dataclasses.replace(settings, keep_best=True)
    return plan_module(example.model, example.args, example.kwargs, settings).plan
