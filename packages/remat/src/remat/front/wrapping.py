"""The line: a model that trains within a budget, with the interface of the model it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from remat.budgets.auto import OptimizerLike
from remat.errors import RematError
from remat.front.bound import bind_to_copy
from remat.front.planned_forward import RematForward, is_rematerialized
from remat.front.units import (
    RegionForward,
    Regions,
    choose_regions,
    copy_within,
    shallow_copy,
    unwrap_units,
)
from remat.planning.infeasible import NotPlanned, OnInfeasible
from remat.planning.kernels import Kernels
from remat.planning.outputs import Outputs
from remat.planning.settings import Settings, as_args
from remat.planning.user_plan import PlanLike
from remat.refusals import refuse_scripted, refuse_wrapped
from remat_exec import Loss
from remat_graph.torch import Costs
from remat_partition import Partitioner
from remat_solvers import Progress, Solver

__all__ = ["rematerialize"]

Module = TypeVar("Module", bound=torch.nn.Module)


def rematerialize(
    model: Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | float | str = "auto",
    solver: str | Solver = "auto",
    costs: Costs = "measure",
    limit_seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    loss: Loss | None = None,
    regions: Regions | None = None,
    capture: str = "aot",
    executor: str = "generated",
    optimizer: OptimizerLike | None = None,
    on_infeasible: OnInfeasible = "raise",
    plan: PlanLike | None = None,
    numerics: str | None = None,
    partitioner: str | Partitioner | None = None,
    outputs: Outputs | None = None,
    kernels: Kernels = "eager",
    wait: bool = False,
) -> Module:
    """Return a copy of a model whose training steps stay within a budget of memory.

    The copy is of the same class and shares parameters, buffers and submodules with the original,
    which stays as it is. Its training loop needs no change; without gradients it runs the
    original. Its `plan` says what was planned and can be printed.

    `args` and `kwargs` are an example call, with the shapes that training will have; a tensor may
    stand for `(tensor,)`. Without them the plan is made at the first training call. `budget` bounds
    what one forward plus backward allocates on the device beyond what was there before: a whole
    number of bytes, a string with a unit (`"8GiB"`), a fraction of plain autograd's peak (`0.5`
    or `"50%"`), or `"auto"`, the default. That is nine tenths of what is free at the first training
    call, at which the plan is made then, less what an optimizer will keep and has not allocated:
    `optimizer` is one, its class, or a function that makes one of a list of parameters; `None`
    stands for two tensors like each trainable parameter, as AdamW keeps them. It is rounded down by
    a 32nd at most: a cached plan is found again.

    `solver` is a name from `list_solvers()`, or an object with its settings, such as
    `remat_solvers.published.checkmate.Checkmate(back_end="GUROBI")`; `limit_seconds` bounds its
    time, `progress` is called as it goes. For a solver that needs a hierarchy, `partitioner` is a
    name from `list_partitioners()`, or such an object (`"h-partition"` without one). `costs` are
    measured on the device or estimated. `loss`, a function of what the model returns, is measured
    with the plan, so that the budget covers it; it is run a few times for each plan and must change
    nothing. If it has further arguments without a default, `*args` or `**kwargs`, it is given those
    of the call: `loss(output, *args, **kwargs)`. Without it a loss outside the model is allowed
    about three buffers the size of each output, its gradient included; if it takes more, the first
    step goes over the budget, a `BudgetWarning` says so, and the next is planned for it.

    A part of the forward that is checkpointed (`torch.utils.checkpoint`, gradient checkpointing of
    transformers) is planned as any other code: what is computed again is the plan's to say.

    TorchDynamo finds the graphs. A forward without graph breaks is one region, planned at once; one
    with breaks is several, and what stands between them runs in eager autograd. Their first steps
    keep as little as possible and are recorded; then one plan for all is made. `regions` names
    submodules that are to be one region each, such as blocks that FSDP2 shards: dotted names, with
    wildcards (`"layers.*"`), or classes, or a list of these. The rest is not planned then. What
    makes a region's graph is a `capture` of `list_captures()`, what runs it an `executor`.

    `on_infeasible` says what happens in training where no plan is within the budget, or none can be
    made: `"raise"`, or `"plain"`, which warns once for each kind of call (`BudgetWarning`) and runs
    it as it is.

    `plan` is one that was made before, here or on another machine: a `Plan`, such as `remat.plan`
    gives, or the path of a file that `Plan.save` wrote. Its budget is taken for `"auto"`. It
    must be of the graph that the first call gives, whatever the names and times, and is simulated,
    run and measured within the budget as any plan. A `Schedule` or `Solution`, or a file of one,
    must be in the names of that graph. Each region of a plan of several is found again by its
    graph, and runs by the schedules of the plan, without solving. The first steps are recorded as
    ever, since the code between the regions is in no graph; what was chosen is taken if the step
    makes the same calls and fits, else chosen anew.

    `numerics` lets the plan of a forward that is one region choose how values are made, too: the
    backward of a convolution at once or in halves, masks and indices kept packed. `"bitwise"` asks
    for the same bits, `"rounding"` also takes other orders of summing, and `"lossy"` copies in 16
    bits of what is kept for the backward. `None`, the default, runs the operators as they are.

    `kernels` are what operators run by: `"eager"`, or `"inductor"`, with which those between two
    products are compiled to one and planned as one, with `numerics="rounding"` at least. Training
    starts by eager ones and is planned anew when the others are there, or waits with `wait`.

    `outputs` says which of what the model returns is read or differentiated: a field, a key or a
    position, or a list of these, such as `"loss"` or `[0, 2]`. Large outputs that are not named,
    such as the logits beside the loss, are not made in a step: what is returned in their place is
    made, by running that part of the forward again, when it is first read. It is the same tensor
    then, or an `OutputGone` where a parameter or an input has changed since, as by the optimizer's
    step. Without `outputs`, and with `numerics="rounding"`, what the first step does not read is
    not made from then on, until a step reads it; and from the first step on where no plan fits
    otherwise. Of a forward of several regions the first step makes all outputs, and shows which of
    them later regions read.

    A call that differs from what was planned for (another batch size, a frozen parameter) is
    planned anew; a known schedule is taken if it fits. What outputs leave free that the loop
    does not hold until the backward is found out in the first step, and planned for. A fraction
    never gives a smaller call, such as the last batch, less than an earlier one was given.

    Raises:
        PlanMismatch: if `plan` is of another graph, saying where that first differs, and in which
            region, or is of one region, and the forward is not.
        DocumentError: if the file of the plan is damaged.
        OSError: if it cannot be read.
        BudgetError: if the budget cannot be read; `"auto"`, if nothing is left, or it cannot be
            told what is free or what the optimizer keeps.
        CaptureError: if a graph of the model cannot be captured, or the capture is unknown or
            broken.
        ExecutionError: if the executor is unknown or broken.
        BudgetTooSmall: if no schedule within the budget was found.
        BudgetExceeded: if the measured peak stays over the budget, or that of `plan` is.
        SolverError: if the solver is unknown, broken or unsuitable.
        PartitionError: if the partitioner is, or cannot cut the graph.
        LossError: if the loss cannot be run or differentiated.
        RematError: if the model is no module, is rematerialized already, was made by `torch.jit`,
            or is wrapped by DDP or FSDP; if a loss cannot be called, or costs are not measured; if
            an entry of `regions` matches no submodule, or `plan` is of one region and `regions` are
            given; if a partitioner is given, and the solver needs no hierarchy; if `outputs` names
            what the model does not return.

    Warns:
        BudgetWarning: if a step of several regions took more than the budget, which what runs
            between them can bring about; the next is planned anew. The fourth in a row raises.
    """
    if not isinstance(model, torch.nn.Module):
        raise RematError(f"need a torch.nn.Module, not a {type(model).__name__}")
    if is_rematerialized(model):
        raise RematError("the model is rematerialized already; start from the original")
    refuse_wrapped(model)
    refuse_scripted(model)
    settings = Settings.read(
        budget, solver, costs, limit_seconds, progress, loss, capture, executor, optimizer,
        on_infeasible, plan, numerics, partitioner, outputs, kernels=kernels, wait=wait,
    )  # fmt: skip
    if regions is not None and settings.region_plan is not None:
        raise RematError(
            f"{settings.region_plan.name} is for a model that is one region; leave out regions= "
            f"or plan="
        )
    wrapped = shallow_copy(model)
    chosen = choose_regions(wrapped, regions)
    unwrap_units(wrapped)
    for name in chosen:
        refuse_scripted(wrapped.get_submodule(name))
    blocks = [copy_within(wrapped, name) for name in chosen]
    bound = bind_to_copy(wrapped, model)
    forward = RematForward(wrapped, settings, wrapped.__dict__.get("forward"), bool(chosen))
    forward.original, forward.bound = model, bound  # the first for weak references within it
    forward.stand_in()
    wrapped.__dict__["plan"] = NotPlanned()
    wrapped.register_forward_pre_hook(forward.check_owner)
    for block in blocks:
        block.__dict__["forward"] = RegionForward(block, forward)
    if args is not None or kwargs:
        with torch.enable_grad():
            forward.prepare(as_args(args), dict(kwargs or {}))
    return wrapped
