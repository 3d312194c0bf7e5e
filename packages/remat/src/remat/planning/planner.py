"""How a plan is made: capture, budget, solve."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from traceback import clear_frames
from types import MappingProxyType
from typing import Any

import torch

from remat.budgets.auto import AutoBudget, OptimizerLike, budget_on
from remat.budgets.blocks import later_blocks, or_with_expandable_segments
from remat.budgets.budget import Budget
from remat.budgets.plain import measure_outside_loss, measure_plain
from remat.cache import remembered_costs, remembered_peak, remembered_rehearsal
from remat.dynamo.checkpoints import checkpoints_off
from remat.errors import RematError
from remat.planning.certain import with_certain_bound
from remat.planning.given import Given, over_budget
from remat.planning.ranks import MOST_TIMES, has_other_ranks, of_first_rank
from remat.planning.settings import Settings, as_args
from remat.planning.slices import sliced_programs, with_finest_slices
from remat.planning.solving import adapted, solution_for, solved_in_best_program
from remat.plans.origin import Origin
from remat.refusals import refuse_wrapped
from remat.report.shown import ShownPlan
from remat.report.words import mib
from remat_exec import (
    BudgetExceeded,
    Executable,
    Loss,
    Peak,
    Runnable,
    get_executor,
    with_call,
)
from remat_graph import Graph, Schedule, Solution, Status, simulate
from remat_graph.torch import (
    AllocationRecorder,
    Capture,
    Cost,
    Costs,
    DeviceSpec,
    LossCost,
    beside_profilers,
    capture,
    collector_at_rest,
    process_lock,
    read_call,
)
from remat_partition import Partitioner
from remat_solvers import BudgetTooSmall, Progress, Solver, store_all

__all__ = [
    "SCALAR_BYTES",
    "Planned",
    "for_missing",
    "make_plan",
    "plan",
    "plan_module",
]

logger = logging.getLogger(__name__)

SCALAR_BYTES = {"cpu": 64, "cuda": 2048}  # of the loss itself and its gradient, as allocated
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan together with what runs it."""

    plan: ShownPlan
    capture: Capture
    executable: Runnable


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
) -> ShownPlan:
    """Plan without running the plan: arguments of `rematerialize`, for the whole model at once.

    With `costs="estimate"` or a `DeviceSpec` nothing is run at all, and a fractional budget is of
    what plain autograd is estimated to take; `"auto"` is what a `DeviceSpec` has beside the model
    and the optimizer's state. The model and its inputs, or some of them, may then be on the meta
    device or made under a `FakeTensorMode`, on a device that is there. (`.to("meta")`
    unties tied weights: make the model under `torch.device("meta")`.)

    Peaks are approximate then: estimated costs know of no workspace of an operator. What is on
    meta is planned as on the CPU, but for a `DeviceSpec` with a `capability`, such as those of
    `DEVICES`: for that it is planned as on such a device, with CUDA's operators for attention and
    the blocks of its allocator.

    Raises:
        BudgetError: if the budget cannot be read.
        CaptureError: if the model cannot be captured as one static graph.
        BudgetTooSmall: if no schedule within the budget was found.
        SolverError: if the solver is unknown, broken or unsuitable.
        LossError: if the loss cannot be run or differentiated.
    """
    settings = Settings.read(
        budget,
        solver,
        costs,
        limit_seconds,
        progress,
        loss,
        optimizer=optimizer,
        numerics=numerics,
        partitioner=partitioner,
    )
    return plan_module(model, as_args(args), dict(kwargs or {}), settings).plan


def plan_module(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> Planned:
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
) -> Planned:
    started = time.perf_counter()
    if settings.loss is not None:
        settings = replace(settings, loss=with_call(settings.loss, args, kwargs))
    with checkpoints_off():
        captured = _captured(model, args, kwargs, settings.costs)
    if settings.numerics is not None:
        captured = captured.with_alternatives(settings.numerics)
    if settings.budget.is_auto and isinstance(settings.costs, DeviceSpec):
        budget = budget_on(settings.costs, model, settings.optimizer)
        settings = replace(settings, budget=budget)
    elif settings.budget.is_auto:
        auto = AutoBudget(settings.optimizer, model.parameters)
        auto.see((), captured.program.device)
        settings = replace(settings, budget=auto.fix())
    return make_plan(model, args, kwargs, settings, captured, run=False, started=started)


def _device(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (*model.parameters(), *read_call(args, kwargs).tensors)
    devices = (tensor.device for tensor in tensors if tensor.device.type != "cpu")
    return next(devices, torch.device("cpu"))


def _captured(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], costs: Costs
) -> Capture:
    """Capture a whole module; what was measured in other processes is not measured again."""
    known: dict[str, Cost] = {}
    with remembered_costs(known, _device(model, args, kwargs), costs):
        return capture(model, args, kwargs, costs=costs, measured=known)


def make_plan(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    captured: Capture,
    *,
    run: bool,
    started: float,
    missing: frozenset[int] | None = None,
    released_outputs: frozenset[int] = frozenset(),
    seen: LossCost | None = None,
    plain_bytes: Mapping[frozenset[int], int] = MappingProxyType({}),
    schedules: Sequence[Schedule] = (),
    given: Given | None = None,
) -> Planned:
    """Find the budget, solve; with `run`, run it once and plan again while it is over.

    Over is also what leaves no room for later steps, which on CUDA may get other blocks. If no plan
    leaves it, the last one that was within the budget when it ran is taken.

    `missing` are the gradients that will not come, `released_outputs` the outputs that the user
    will hold no more when the backward starts, `seen` what a loss took in an earlier step.
    `plain_bytes` is the most that plain autograd took for earlier calls, by what is missing: a
    fraction is of no less. `schedules` are of graphs with the same ops and values, of other sizes:
    the fastest that fits is taken without solving. A `given` plan is the only one that is tried.

    Raises:
        PlanMismatch: if the given plan is of another graph.
        BudgetTooSmall: if no schedule within the budget was found.
        BudgetExceeded: if the measured peak stays over the budget.
        LossError: if the loss cannot be run or differentiated.
    """
    device = captured.program.device
    loss = settings.loss
    cost: LossCost | None = None
    if loss is not None:
        logger.info("measuring the loss")
        cost, unused = measure_outside_loss(module, args, kwargs, captured, device, loss)
        missing = unused if missing is None else missing
    if missing is not None:
        captured = for_missing(captured, missing)
    if cost is not None:
        if captured.missing != for_missing(captured, unused).missing:
            loss = None  # the backward that came was over other outputs
            cost = cost.at_least(captured.loss)
        captured = captured.with_loss(cost)
    if seen is not None:
        captured = captured.with_loss(captured.loss.at_least(seen))
    if released_outputs != captured.released_outputs:
        captured = captured.with_released_outputs(released_outputs)
    if given is not None:
        captured, schedule = given.fit(captured, settings.numerics)
    seconds = time.perf_counter() - started
    tensors = read_call(args, kwargs).tensors
    scalar_bytes = SCALAR_BYTES["cuda" if device.type == "cuda" else "cpu"]
    everything = _stored(captured)
    plain: int | None = None
    if settings.costs == "measure" and settings.budget.fraction is not None:
        plain = _plain_peak(module, args, kwargs, captured, everything, loss)
    elif settings.costs != "measure" and not run:
        autograd = captured.without_alternatives().as_autograd()
        plain = simulate(autograd, store_all(autograd)).peak_bytes
    earlier = plain_bytes.get(captured.missing, 0)
    if plain is not None or earlier > everything:
        plain = max((plain or 0) + scalar_bytes, earlier)
    stored = everything + scalar_bytes
    budget = settings.budget.resolve(lambda: stored if plain is None else plain)
    target = budget - scalar_bytes
    bound: float | None = None
    within: Planned | None = None
    offered = captured
    for attempt in range(_ATTEMPTS):
        if given is not None:
            solution = given.solution(captured.graph, schedule, target, budget)
        else:
            known = adapted(captured.graph, target, schedules)
            if known is not None:
                solution = known
            else:
                solve_for = functools.partial(
                    solution_for, budget=budget, target=target, solver=settings.solver,
                    limit_seconds=settings.limit_seconds, progress=settings.progress,
                    keep_best=settings.keep_best, partitioner=settings.partitioner,
                )  # fmt: skip
                try:
                    captured, solution = solved_in_best_program(offered, target, solve_for)
                except BudgetTooSmall as error:
                    if within is None:
                        programs = offered, offered.in_traced_layouts()
                        sure = missing is not None or len(offered.program.tangents) == 1
                        refused = with_certain_bound(
                            error, *programs, *sliced_programs(offered, target),
                            sure=sure, measured_loss=cost is not None and not seen,
                        )  # fmt: skip
                        if settings.numerics is None:
                            _note_what_slices_reach(refused, offered, solve_for)
                        raise refused from None
                    break
                everything = _stored(captured)
            if solution.schedule is None:
                raise RematError(f"solver {solution.solver} returned no schedule")
            schedule = solution.schedule
            if run and has_other_ranks():
                captured, solution = _shared(
                    offered, captured, solution, schedule, settings.budget, target
                )
                schedule, everything = solution.schedule or schedule, _stored(captured)
        if attempt:  # what a tighter target proves, it does not prove about the budget
            solution = replace(solution, lower_bound=bound, status=Status.FEASIBLE)
        bound = solution.lower_bound
        executable = get_executor(settings.executor)(captured, schedule, budget_bytes=budget)
        plan = ShownPlan.of_one_region(
            captured.graph,
            schedule,
            solution,
            budget,
            missing=captured.missing,
            released_outputs=captured.released_outputs,
            laid_out=captured.laid_out,
            sliced=captured.sliced,
            plain_peak_bytes=plain,
            capture_seconds=seconds,
            source=executable.source,
            origin=Origin.here(device),
        )
        if not run:
            return Planned(plan, captured, executable)
        rehearse = functools.partial(_rehearsed, executable, module, tensors, loss, budget)
        if loss is None and type(executable) is Executable:
            peak = remembered_rehearsal(module, captured, executable.source, rehearse)
        else:
            peak = rehearse()
        measured = peak.peak_bytes
        plan = replace(plan, measured_peak_bytes=measured, measured_curve=peak.curve)
        over = measured + later_blocks(peak) - budget
        if measured <= budget:
            within = Planned(plan, captured, executable)
        elif given is not None:
            raise over_budget(given.name, measured, budget)
        if over <= 0 or given is not None:
            break
        logger.info(
            "measured peak %d, and what later steps may take, are %d bytes over the budget of %d "
            "(predicted %d); planning again", measured, over, budget, solution.peak_bytes,
        )  # fmt: skip
        target -= over * (attempt + 1)
        if attempt >= _ATTEMPTS // 2:  # of blocks another plan may take more beyond: leave room
            target = min(target, budget - 2 * (measured - solution.peak_bytes))
        if target <= 0:
            break
    if within is not None:
        if logger.isEnabledFor(logging.INFO):  # a plan says what storing everything takes
            logger.info("planned: %s", str(within.plan).replace("\n", "; "))
        return within
    raise BudgetExceeded(
        f"the measured peak of {measured:,} bytes stays over the budget of {budget:,} bytes "
        f"(predicted {solution.peak_bytes:,}) after {attempt + 1} plans; raise the budget"
        f"{or_with_expandable_segments(device)}",
        budget,
        measured,
    )


def _note_what_slices_reach(
    error: BudgetTooSmall, offered: Capture, solve_for: Callable[[Graph], Solution]
) -> None:
    """Say beside a refusal what the same step takes with its largest values made in slices."""
    sliced = with_finest_slices(offered)
    if sliced is None:
        return
    try:
        solve_for(sliced.graph)
        reach = error.budget_bytes
    except BudgetTooSmall as still:
        reach = still.smallest_bytes
    if reach < error.smallest_bytes:
        error.add_note(
            f"With numerics='rounding' the largest values are made in slices, in another order of "
            f"sums: then {mib(reach)} are enough."
        )


def _shared(
    offered: Capture,
    captured: Capture,
    solution: Solution,
    schedule: Schedule,
    asked: Budget,
    target: int,
) -> tuple[Capture, Solution]:
    """Take the schedule of the rank that had one first, and its layouts, if it is as good here.

    `captured` is `offered`, or the same in the layouts that were traced. What was proved here holds
    of it, too.
    """
    captures = [offered, offered.in_traced_layouts()] if offered.laid_out else [offered]
    if captured.sliced:
        captures.append(captured)
    mine = len(captures) - 1 if captured.sliced else int(captured is not offered)
    captures[mine] = captured
    graphs = [each.graph for each in captures]
    ((which, theirs),) = of_first_rank(str(asked), graphs, [(mine, schedule)])
    timeline = simulate(graphs[which], theirs)
    is_own = (which, theirs) == (mine, schedule)
    if is_own or timeline.peak_bytes > target or timeline.time > MOST_TIMES * solution.time:
        return captured, solution
    bound = solution.lower_bound
    return captures[which], replace(
        solution,
        schedule=theirs,
        status=Status.FEASIBLE,
        peak_bytes=timeline.peak_bytes,
        time=timeline.time,
        lower_bound=None if bound is None else min(bound, timeline.time),
        solver="another rank",
        trials=(),
    )


def _stored(captured: Capture) -> int:
    return simulate(captured.graph, store_all(captured.graph)).peak_bytes


def _plain_peak(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    captured: Capture,
    everything: int,
    loss: Loss | None,
) -> int | None:
    """Measure a plain step, unless it is known; no two losses can be told to be the same."""

    def measured() -> int | None:
        logger.info("measuring one plain step")
        device = captured.program.device
        peak = measure_plain(module, args, kwargs, captured, everything, device, loss)
        return None if peak is None else peak.peak_bytes

    return measured() if loss is not None else remembered_peak(module, captured, measured)


def _rehearsed(
    executable: Runnable,
    module: torch.nn.Module,
    tensors: list[torch.Tensor],
    loss: Loss | None,
    budget: int,
) -> Peak:
    """Run a plan once for its peak.

    Raises:
        BudgetExceeded: if the device has less memory than the plan takes.
    """
    try:
        return executable.rehearse(module, tensors, loss)
    except torch.OutOfMemoryError as error:
        clear_frames(error.__traceback__)  # which hold what the step had allocated
        raise BudgetExceeded(
            f"the device ran out of memory in the first step by a plan of "
            f"{executable.peak_bytes:,} bytes, within the budget of {budget:,}: it has not as much "
            f"free as the budget says; give a smaller one ({str(error).splitlines()[0]})",
            budget,
            executable.peak_bytes,
        ) from error


def for_missing(captured: Capture, missing: frozenset[int]) -> Capture:
    """Expect the gradients that the last backward had, where this capture has such outputs."""
    differentiable = {*captured.program.tangents.values(), *captured.missing}
    expected = missing & differentiable
    if expected in (captured.missing, differentiable):
        return captured
    return captured.variant(frozenset(expected))
