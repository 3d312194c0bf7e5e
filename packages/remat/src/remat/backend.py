"""The other way in: `torch.compile(model, backend="remat", options={"budget": "8GiB"})`.

The options are `budget`, `solver`, `costs`, `limit_seconds`, `progress`, `capture`, `executor`,
`optimizer`, `on_misfit`, `plan`, `numerics` and `partitioner`, as of `rematerialize`; without a
budget it is `"auto"`. `on_plan` is a function that is called with each plan that a step begins to
run by, such as `lambda plan: plan.save("plan.json")`. All that one `torch.compile` compiles is of
one step, under one budget. Settings of TorchDynamo are the user's here: past its recompile limit it
runs code as it is, so the last compilation before it raises, and names the setting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from remat.budgets.auto import AutoBudget
from remat.dynamo import found_in, is_last_compilation, let_through
from remat.errors import RematError
from remat.planning.settings import Settings
from remat.steps.region import Region
from remat.steps.stepper import Stepper

__all__ = ["remat_backend"]

logger = logging.getLogger(__name__)

_DEFAULTS = {
    "budget": "auto",
    "solver": "auto",
    "costs": "measure",
    "limit_seconds": None,
    "progress": None,
    "capture": "aot",
    "executor": "generated",
    "optimizer": None,
    "on_misfit": "raise",
    "plan": None,
    "numerics": None,
    "partitioner": None,
    "on_plan": None,
}
_steppers: dict[int, tuple[Any, Stepper, set[int]]] = {}


def remat_backend(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Region:
    """Make a region of a graph, as a back end of `torch.compile`.

    Raises:
        RematError: if an option or mode is unknown, or the recompile limit is reached.
        BudgetError: if the budget cannot be read.
        SolverError: if the solver does not exist or cannot be loaded.
        PartitionError, CaptureError, ExecutionError: if the partitioner, the capture or the
            executor does not.
    """
    try:
        if mode is not None:
            raise RematError(f"mode={mode!r}: the back end 'remat' has no modes; leave it out")
        if is_last_compilation():
            raise RematError(
                "with one more shape or setting TorchDynamo would reach its recompile limit and "
                "run the rest without a plan; raise torch._dynamo.config.recompile_limit, or use "
                "remat.rematerialize, which has none"
            )
        stepper, frames = _stepper_for(options)
        return stepper.add(found_in(graph, frames))
    except RematError as error:
        raise let_through(error) from error.__cause__


def _log_plan(plan: object) -> None:
    logger.info("%s", plan)


def _reset() -> None:
    for _, stepper, _ in _steppers.values():
        stepper.stop_recording()
    _steppers.clear()


remat_backend.reset = _reset  # type: ignore[attr-defined]


def _stepper_for(options: Mapping[str, Any] | None) -> tuple[Stepper, set[int]]:
    """Find what plans for one `torch.compile`, which hands its options over as one object."""
    known = _steppers.get(id(options))
    if known is None:
        given = dict(options or {})
        unknown = sorted(given.keys() - _DEFAULTS.keys())
        if unknown:
            raise RematError(
                f"unknown options {', '.join(map(repr, unknown))} of the back end 'remat'; "
                f"there are {', '.join(_DEFAULTS)}"
            )
        taken = {**_DEFAULTS, **given}
        on_plan = taken.pop("on_plan")
        if on_plan is not None and not callable(on_plan):
            raise RematError(f"on_plan={on_plan!r} cannot be called; give a function of a plan")
        settings = Settings.read(**taken, loss=None)
        told: Callable[[Any], None] = on_plan or _log_plan
        known = _steppers[id(options)] = (
            options,
            Stepper(settings, told, AutoBudget(settings.optimizer)),
            set(),
        )
    return known[1], known[2]
