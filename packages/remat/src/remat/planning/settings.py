"""How to plan, as the user said it: read and checked before a model is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from remat.budgets.auto import OptimizerLike, is_optimizer
from remat.budgets.budget import Budget, parse_budget
from remat.errors import RematError
from remat.planning.cutting import check_method
from remat.planning.flags import check_flag
from remat.planning.infeasible import OnInfeasible, check_on_infeasible
from remat.planning.kernels import Kernels, read_kernels
from remat.planning.numerics import read_numerics
from remat.planning.outputs import Outputs, read_outputs
from remat.planning.user_plan import PlanLike, PlanOrSchedule, UserPlan, read_user_plan
from remat_exec import Ability, Loss, abilities_of, get_executor
from remat_graph import Numerics
from remat_graph.torch import (
    CaptureError,
    Costs,
    DeviceSpec,
    check_passes,
    get_capture,
    missing_compiler,
)
from remat_partition import Partitioner
from remat_solvers import Limit, Progress, Solver, check_progress

__all__ = ["Settings", "as_args"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to plan; with `keep_best`, Ctrl-C while solving ends with the best schedule so far.

    `user_plan` is that of the option `plan`.
    """

    budget: Budget
    solver: str | Solver
    costs: Costs
    limit_seconds: float | None
    progress: Callable[[Progress], None] | None
    loss: Loss | None
    capture: str
    executor: str
    optimizer: OptimizerLike | None
    on_infeasible: OnInfeasible
    user_plan: PlanOrSchedule | None
    numerics: Numerics | None
    partitioner: str | Partitioner | None
    keep_best: bool = False
    outputs: tuple[str | int, ...] | None = None
    optimizer_in_backward: bool = False
    kernels: Kernels = "eager"
    wait: bool = False

    @property
    def region_plan(self) -> PlanOrSchedule | None:
        """The user's plan, if it is of a model that is one region."""
        plan = self.user_plan
        return plan if plan is not None and plan.is_one_region else None

    @property
    def step_plan(self) -> UserPlan | None:
        """The user's plan, if it is of a step of several regions."""
        plan = self.user_plan
        return plan if isinstance(plan, UserPlan) and not plan.is_one_region else None

    def runs_groups_on(self, device: torch.device) -> bool:
        """Whether groups of operators are compiled for a device: a compiler may be missing."""
        return self.kernels == "inductor" and not missing_compiler(device)

    @classmethod
    def read(
        cls,
        budget: int | float | str = "auto",
        solver: str | Solver = "auto",
        costs: Costs = "measure",
        limit_seconds: float | None = None,
        progress: Callable[[Progress], None] | None = None,
        loss: Loss | None = None,
        capture: str = "aot",
        executor: str = "generated",
        optimizer: OptimizerLike | None = None,
        on_infeasible: OnInfeasible = "raise",
        plan: PlanLike | None = None,
        numerics: str | None = None,
        partitioner: str | Partitioner | None = None,
        outputs: Outputs | None = None,
        optimizer_in_backward: bool = False,
        kernels: Kernels = "eager",
        wait: bool = False,
    ) -> Settings:
        """Check what can be checked before a model is looked at.

        With a plan that has one, the budget `"auto"` is that of the plan.

        Raises:
            DocumentError, OSError: if the file of the plan is damaged, or cannot be read.
            BudgetError, CaptureError, SolverError, PartitionError, ExecutionError: if the option
                of that name cannot be read, does not exist or cannot be loaded.
            RematError: if another option cannot be what it is, or has no use beside the others.
        """
        check_on_infeasible(on_infeasible)
        Limit.starting_now(limit_seconds)
        check_progress(progress)
        check_flag("optimizer_in_backward", optimizer_in_backward)
        allowed = read_kernels(kernels, read_numerics(numerics), wait=wait)
        if not (optimizer is None or callable(optimizer) or is_optimizer(optimizer)):
            raise RematError(
                f"optimizer={optimizer!r}; give an optimizer, its class, or a function that makes "
                f"one of a list of parameters"
            )
        if loss is not None and not callable(loss):
            raise RematError(
                f"loss={loss!r} cannot be called; give a function of what the model returns"
            )
        if loss is not None and costs != "measure":
            raise RematError(
                "loss= is measured by running it, and estimated costs run nothing; leave it out, "
                "or compute the loss in the model's forward"
            )
        if costs not in ("measure", "estimate") and not isinstance(costs, DeviceSpec):
            raise CaptureError(f"costs={costs!r}; give 'measure', 'estimate' or a DeviceSpec")
        user_plan = None if plan is None else read_user_plan(plan)
        read = parse_budget(budget)
        if read.is_auto and user_plan is not None and user_plan.budget_bytes is not None:
            read = parse_budget(user_plan.budget_bytes)
        check_method(solver, partitioner)
        check_passes()
        get_capture(capture)
        makes_all = Ability.DEFERS_OUTPUTS not in abilities_of(get_executor(executor))
        if makes_all and (outputs is not None or _defers_outputs(user_plan)):
            raise RematError(
                f"the executor {executor!r} makes every output; leave out outputs=, or the plan of "
                f"a step that does not"
            )
        return cls(
            read, solver, costs, limit_seconds, progress, loss, capture, executor, optimizer,
            on_infeasible,
            user_plan,
            allowed,
            partitioner,
            outputs=read_outputs(outputs),
            optimizer_in_backward=optimizer_in_backward,
            kernels=kernels,
            wait=wait,
        )  # fmt: skip


def _defers_outputs(plan: PlanOrSchedule | None) -> bool:
    """Whether a step by a plan leaves outputs out."""
    return isinstance(plan, UserPlan) and any(kind.deferred for kind in plan.plan.kinds)


def as_args(args: Any) -> tuple[Any, ...]:
    """Accept one positional argument bare."""
    if args is None:
        return ()
    return tuple(args) if isinstance(args, (tuple, list)) else (args,)
