"""Commands over models: `plan` and `largest-batch`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.budgets.budget import parse_budget
from remat.command.main import app
from remat.command.options import (
    Budget,
    MakingOptions,
    Model,
    PlanOptions,
    check_solver,
    dry_plan,
    names_of_outputs,
    read_budget,
    taking,
)
from remat.command.terminal import (
    JsonOption,
    KernelsOption,
    LeavingOption,
    NumericsOption,
    OutputsOption,
    SolverOption,
    check_output,
    err,
    out,
    print_json,
    waiting,
)
from remat.errors import BudgetError, RematError

if TYPE_CHECKING:
    from remat.plans.plan import Plan

__all__ = ["largest_batch", "plan"]


@app.command()
@taking(PlanOptions)
def plan(
    model: Model,
    options: PlanOptions,
    budget: Budget = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    json: JsonOption = False,
) -> None:
    """Plan for a model within a budget, without running the plan; by default without its data."""
    check_output(save)
    result, _ = options.plan(model, budget)
    if save is not None:
        result.save(save)
    if json:
        print_json(_document(result))
        return
    out.print(str(result), markup=False, highlight=False)
    if save is not None:
        out.print(f"written to {save}", markup=False)


@app.command("largest-batch")
@taking(MakingOptions)
def largest_batch(
    model: Model,
    options: MakingOptions,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Bytes with a unit ('8GiB'). With --device it may be left out: nine tenths of its "
            "memory, less the model and what AdamW keeps."
        ),
    ] = None,
    most_overhead: Annotated[
        float, typer.Option(help="The most extra time, of computing everything once.")
    ] = 0.5,
    solver: SolverOption = "auto",
    numerics: NumericsOption = None,
    outputs: OutputsOption = None,
    optimizer_in_backward: LeavingOption = False,
    kernels: KernelsOption = "eager",
    limit_seconds: Annotated[float, typer.Option(min=0, help="For each batch size.")] = 10.0,
    save: Annotated[Path | None, typer.Option(help="Write its plan here, as JSON.")] = None,
    json: JsonOption = False,
) -> None:
    """Find the largest batch that trains within a budget, by planning for several sizes."""
    check_output(save)
    target = options.target(model)
    wanted = read_budget(budget, options)
    if parse_budget(wanted).fraction is not None:
        raise BudgetError(f"budget={budget!r}: a batch is sought for a number of bytes")
    check_solver(solver)
    costs = options.costs
    from remat_solvers import BudgetTooSmall

    tried: dict[int, Plan | None] = {}
    refused: dict[int, BudgetTooSmall] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            with waiting(f"batch {size}", limit_seconds) as report:
                try:
                    example = target.with_batch(size).build(costs)
                    result: Plan | None = dry_plan(
                        example, costs, wanted, solver, limit_seconds, report,
                        numerics=numerics, outputs=names_of_outputs(outputs),
                        optimizer_in_backward=optimizer_in_backward, kernels=kernels,
                    )  # fmt: skip
                except BudgetTooSmall as error:
                    result, refused[size] = None, error
            slow = result is not None and result.predicted_overhead > most_overhead
            tried[size] = None if slow else result
        return tried[size] is not None

    said = "was not found to"
    try:
        _search(fits)
    except KeyboardInterrupt:  # the best so far is kept
        said = "was not tried before it was stopped"
    best = max((size for size, result in tried.items() if result is not None), default=0)
    largest = tried.get(best)
    if largest is None:
        if not tried:
            raise KeyboardInterrupt
        if 1 in refused:
            err.print("not even a batch of one fits")
            raise refused[1]
        raise RematError(
            f"not even a batch of one fits within {budget or 'the device'} at {most_overhead:.0%} "
            f"more time"
        )
    if save is not None:
        largest.save(save)
    if json:
        print_json({"batch_size": best, "tried": sorted(tried), **_document(largest)})
        return
    out.print(f"batch {best} fits, {best + 1} {said}; tried {sorted(tried)}")
    out.print(str(largest), markup=False, highlight=False)


def _search(fits: Callable[[int], bool]) -> None:
    """Double, then halve: what fits at a size is taken to fit at every smaller one."""
    if not fits(1):
        return
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)


def _document(plan: Plan) -> dict[str, Any]:
    """Give a plan as JSON; sizes in bytes, times in seconds."""
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "store_all_peak_bytes": plan.store_all_peak_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "operations": len(plan.graph.ops),
        "recomputations": plan.recomputations,
        "time": plan.solution.time,
        "overhead": plan.predicted_overhead,
        "bound_overhead": plan.bound_overhead,
        "solver": plan.solution.solver,
        "status": plan.solution.status.value,
        "solve_seconds": plan.solution.solve_seconds,
        "capture_seconds": plan.capture_seconds,
    }
