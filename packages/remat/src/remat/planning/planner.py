"""How the plan of one region is made: find the budget, solve, rehearse until it is within."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from traceback import clear_frames
from types import MappingProxyType
from typing import Any

import torch

from remat.budgets.blocks import later_blocks, or_with_expandable_segments
from remat.budgets.plain import measure_outside_loss, measure_plain
from remat.cache import remembered_peak, remembered_rehearsal
from remat.planning.ranks import has_other_ranks
from remat.planning.settings import Settings
from remat.planning.targets import Targets
from remat.planning.task import RunnablePlan, Task
from remat.planning.user_plan import PlanOrSchedule, over_budget
from remat_exec import (
    BudgetExceeded,
    Executable,
    Executor,
    Loss,
    Peak,
    Runnable,
)
from remat_graph import Schedule, Solution, Status, simulate
from remat_graph.torch import (
    Capture,
    LossCost,
    read_call,
)
from remat_solvers import BudgetTooSmall, store_all

__all__ = [
    "for_missing",
    "is_for_too_few",
    "make_plan",
    "plain_peak",
    "rehearsed",
    "scalar_bytes",
]

logger = logging.getLogger(__name__)

_ATTEMPTS = 5

_Rehearse = Callable[[Capture, Solution], tuple[RunnablePlan, int, int]]


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
    user_plan: PlanOrSchedule | None = None,
    is_last: bool = True,
    gives_way: bool = False,
) -> RunnablePlan:
    """Find the budget, solve; with `run`, run it once and plan again while it is over.

    Over is also what leaves no room for later steps, which on CUDA may get other blocks. If no plan
    leaves it, the last one that was within the budget when it ran is taken.

    `missing` are the gradients that will not come, `released_outputs` the outputs that the user
    will hold no more when the backward starts, `seen` what a loss took in an earlier step.
    `plain_bytes` is the most that plain autograd took for earlier calls, by what is missing: a
    fraction is of no less. `schedules` are of graphs with the same ops and values, of other sizes:
    the fastest that fits is taken without solving. A `user_plan` is tried alone. A refusal names
    what slices would reach, and what a loss reads, if it `is_last`: no other way is tried. One
    that `gives_way` is tried before one that takes less and makes less.

    Raises:
        PlanMismatch: if the user's plan is of another graph.
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
    whole_time = captured.graph.time
    schedule: Schedule | None = None
    if user_plan is not None:
        captured, schedule = user_plan.fit(captured, settings.numerics)
    seconds = time.perf_counter() - started
    aside = scalar_bytes(device.type)
    everything = simulate(captured.graph, store_all(captured.graph)).peak_bytes
    plain: int | None = None
    if settings.costs == "measure" and settings.budget.fraction is not None:
        plain = plain_peak(module, args, kwargs, captured, everything, loss)
    elif settings.costs != "measure" and not run:
        plain = _estimated_plain(captured)
    earlier = plain_bytes.get(captured.missing, 0)
    if plain is not None or earlier > everything:
        plain = max((plain or 0) + aside, earlier)
    stored = everything + aside
    budget = settings.budget.resolve(lambda: stored if plain is None else plain)
    task = Task(
        settings, captured, budget, plain, whole_time, seconds, user_plan, schedule, schedules,
        is_sure=missing is not None or len(captured.program.tangents) == 1,
        has_measured_loss=cost is not None and not seen,
        share=run and has_other_ranks(),
        is_last=is_last,
        gives_way=gives_way,
    )  # fmt: skip
    targets = Targets(budget - aside, budget - aside)
    if not run:
        try:
            return task.planned(*task.solved(targets, captured))
        except BudgetTooSmall as error:
            raise task.refusal(error, targets) from None
    tensors = read_call(args, kwargs).tensors
    return _rehearsed_until_within(task, targets, module, tensors, loss)


def _estimated_plain(captured: Capture) -> int:
    """Estimate what plain autograd takes where the loop holds what gets gradients alone."""
    whole, program = captured.without_alternatives(), captured.program
    others = frozenset(range(len(program.returned))).difference(program.tangents.values())
    autograd = whole.with_released_outputs(others).as_autograd()
    return simulate(autograd, store_all(autograd)).peak_bytes


def _rehearsed_until_within(
    task: Task,
    targets: Targets,
    module: torch.nn.Module,
    tensors: list[torch.Tensor],
    loss: Loss | None,
) -> RunnablePlan:
    """Run a plan once and measure it; plan again, for a smaller target, while it is over.

    So often by eager kernels, and as often by compiled groups. What takes the least is tried last.

    Raises:
        BudgetTooSmall: if no schedule within the budget was found.
        BudgetExceeded: if the measured peak stays over the budget.
    """
    budget, user_plan, device = task.budget, task.user_plan, task.offered.program.device
    rehearse = functools.partial(_rehearsed_plan, task, module, tensors, loss)
    captured, within = task.offered, None
    before: Solution | None = None
    bound: float | None = None
    attempts = Counter[bool]()
    while True:
        try:
            captured, solution = task.solved(targets, captured, before)
        except BudgetTooSmall as error:
            if within is not None:
                break
            if not task.tries_least(error.smallest_bytes, attempts.total()):
                raise task.refusal(error, targets) from None
            return _by_least(task, targets, error, bound, rehearse)
        attempt = attempts[captured.unfused is None]
        attempts[captured.unfused is None] += 1
        if attempts.total() > 1:  # what a tighter target proves, it does not prove about the budget
            solution = replace(solution, lower_bound=bound, status=Status.FEASIBLE)
        before = solution if before is None or solution.time < before.time else before
        bound = solution.lower_bound
        planned, needed, over = rehearse(captured, solution)
        if needed <= budget:
            within = planned
        elif user_plan is not None:
            raise over_budget(user_plan.name, needed, budget)
        if over <= 0 or user_plan is not None:
            break
        logger.info(
            "measured peak %d, and what later steps may take, are %d bytes over the budget of %d "
            "(predicted %d); planning again", needed, over, budget, solution.peak_bytes,
        )  # fmt: skip
        target = targets.of(captured) - over * (attempt + 1)
        if attempt >= _ATTEMPTS // 2:  # of blocks another plan may take more beyond: leave room
            target = min(target, budget - 2 * (needed - solution.peak_bytes))
        if attempt + 1 == _ATTEMPTS:
            target = 0
        targets = targets.at_most(max(0, target), captured)
        if targets.eager == 0:
            if within is not None or not task.tries_least(2 * budget, attempts.total()):
                break
            targets = Targets(1, 0)  # for which it is refused with what takes the least
    if within is not None:
        if logger.isEnabledFor(logging.INFO):  # a plan says what storing everything takes
            logger.info("planned: %s", str(within.plan).replace("\n", "; "))
        return within
    raise BudgetExceeded(
        f"the measured peak of {needed:,} bytes stays over the budget of {budget:,} bytes "
        f"(predicted {solution.peak_bytes:,}) after {attempts.total()} plans; raise the budget"
        f"{or_with_expandable_segments(device)}",
        budget,
        needed,
    )


def _rehearsed_plan(
    task: Task,
    module: torch.nn.Module,
    tensors: list[torch.Tensor],
    loss: Loss | None,
    captured: Capture,
    solution: Solution,
) -> tuple[RunnablePlan, int, int]:
    """Plan, and run it; give what a step needs, and how far it is over with later ones' blocks.

    That is its peak and, beside a loss that was not run, room for the number that it is.
    """
    planned = task.planned(captured, solution)
    run = functools.partial(rehearsed, planned.executable, module, tensors, loss, task.budget)
    if loss is None and type(planned.executable) is Executable:
        peak = remembered_rehearsal(module, captured, planned.executable.source, run)
    else:
        peak = run()
    plan = replace(planned.plan, measured_peak_bytes=peak.peak_bytes, measured_curve=peak.curve)
    needed = peak.peak_bytes
    if loss is None and task.user_plan is None:
        needed += scalar_bytes(captured.program.device.type)
    return replace(planned, plan=plan), needed, needed + later_blocks(peak) - task.budget


def _by_least(
    task: Task,
    targets: Targets,
    refusal: BudgetTooSmall,
    bound: float | None,
    rehearse: _Rehearse,
) -> RunnablePlan:
    """Run what takes the least, where these targets are refused: of groups, and of eager kernels.

    Raises:
        BudgetTooSmall: if that is over the budget, too. It names what was measured, which is
            enough the next time: then the same is tried in the end.
    """
    budget, tried, named = task.budget, targets, list[int]()
    known: BudgetTooSmall | None = refusal
    while True:
        try:
            captured, solution = task.least(tried, known)
        except BudgetTooSmall as error:  # by a solver that does not find it again
            named.append(error.smallest_bytes)
            break
        solution = replace(solution, lower_bound=bound, status=Status.FEASIBLE)
        planned, needed, over = rehearse(captured, solution)
        if needed <= budget:
            return planned
        named.append(budget + over)
        if captured.unfused is None:
            break
        tried, known = replace(targets, grouped=0), None
    raise task.refusal(refusal, targets, min(named))


def plain_peak(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    captured: Capture,
    everything: int,
    loss: Loss | None,
) -> int | None:
    """Measure a plain step, or take it from the cache, which has none with a loss.

    `everything` is what storing everything is predicted to take. `None` if it cannot be run.
    """

    def measured() -> int | None:
        logger.info("measuring one plain step")
        device = captured.program.device
        peak = measure_plain(module, args, kwargs, captured, everything, device, loss)
        return None if peak is None else peak.peak_bytes

    return measured() if loss is not None else remembered_peak(module, captured, measured)


def rehearsed(
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


def scalar_bytes(device_type: str) -> int:
    """Give what a loss and its gradient, a scalar each, take as a device allocates them."""
    return 2048 if device_type == "cuda" else 64


def for_missing(captured: Capture, missing: frozenset[int]) -> Capture:
    """Expect the gradients that the last backward had, where this capture has such outputs."""
    differentiable = {*captured.program.tangents.values(), *captured.missing}
    expected = missing & differentiable
    if expected in (captured.missing, differentiable):
        return captured
    return captured.variant(frozenset(expected))


def is_for_too_few(planned: RunnablePlan, executor: Executor) -> bool:
    """Whether a backward over more than what was taken for the loss is likely, or impossible.

    That is, where it would not fit: likely if some parameters get no gradient of that, as of a
    penalty beside the outputs; impossible, whatever the budget, if it needs again what may be
    computed only once, for it reads what the forward overwrites.
    """
    capture = planned.capture
    if not capture.missing or planned.executable.takes_all:
        return False
    if not set(capture.differentiable) <= capture.program.gradients.keys():
        return True
    return not executor(capture, planned.plan.schedule, budget_bytes=None).takes_all
