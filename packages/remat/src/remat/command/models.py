"""Commands over models: `plan` and `largest-batch`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from remat.budget import parse_budget
from remat.command.main import app
from remat.command.options import (
    Batch,
    Device,
    Measure,
    Model,
    Seq,
    Sets,
    Type,
    check_budget,
    dry_plan,
    read_target,
)
from remat.command.targets import costs_of
from remat.command.terminal import (
    BudgetOption,
    JsonOption,
    LimitOption,
    SolverOption,
    check_output,
    out,
    print_json,
    waiting,
)
from remat.errors import BudgetError, RematError
from remat.plans import Plan
from remat_solvers import BudgetTooSmall

__all__ = ["largest_batch", "plan"]


@app.command()
def plan(
    model: Model,
    budget: BudgetOption,
    batch: Batch = None,
    seq: Seq = None,
    set_: Sets = None,
    dtype: Type = "float32",
    device: Device = None,
    measure: Measure = False,
    solver: SolverOption = "auto",
    limit_seconds: LimitOption = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    json: JsonOption = False,
) -> None:
    """Plan for a model within a budget, without running the plan; by default without its data."""
    check_output(save)
    costs = costs_of(device, measure)
    check_budget(budget, costs)
    target = read_target(model, batch, seq, set_, dtype)
    with waiting("capturing and solving", limit_seconds) as report:
        made = dry_plan(target, costs, budget, solver, limit_seconds, report)
    if save is not None:
        made.save(save)
    if json:
        print_json(_document(made))
        return
    out.print(str(made), markup=False, highlight=False)
    if save is not None:
        out.print(f"written to {save}", markup=False)


@app.command("largest-batch")
def largest_batch(
    model: Model,
    budget: BudgetOption,
    most_overhead: Annotated[
        float, typer.Option(help="The most extra time, of computing everything once.")
    ] = 0.5,
    seq: Seq = None,
    set_: Sets = None,
    dtype: Type = "float32",
    device: Device = None,
    measure: Measure = False,
    solver: SolverOption = "auto",
    limit_seconds: Annotated[float, typer.Option(help="For each batch size.")] = 10.0,
    save: Annotated[Path | None, typer.Option(help="Write its plan here, as JSON.")] = None,
    json: JsonOption = False,
) -> None:
    """Find the largest batch that trains within a budget, by planning for several sizes."""
    check_output(save)
    if parse_budget(budget).size_bytes is None:
        raise BudgetError(f"budget={budget!r}: a batch is sought for a number of bytes")
    costs = costs_of(device, measure)
    target = read_target(model, None, seq, set_, dtype)
    tried: dict[int, Plan | None] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            with waiting(f"batch {size}", limit_seconds) as report:
                try:
                    made: Plan | None = dry_plan(
                        target.with_batch(size), costs, budget, solver, limit_seconds, report
                    )
                except BudgetTooSmall:
                    made = None
            slow = made is not None and made.predicted_overhead > most_overhead
            tried[size] = None if slow else made
        return tried[size] is not None

    with contextlib.suppress(KeyboardInterrupt):  # the best so far is kept
        _search(fits)
    best = max((size for size, made in tried.items() if made is not None), default=0)
    found = tried.get(best)
    if found is None:
        if not tried:
            raise KeyboardInterrupt
        raise RematError(f"not even a batch of one fits within {budget} at {most_overhead:.0%}")
    if save is not None:
        found.save(save)
    if json:
        print_json({"batch_size": best, "tried": sorted(tried), **_document(found)})
        return
    out.print(f"batch {best} fits, {best + 1} was not found to; tried {sorted(tried)}")
    out.print(str(found), markup=False, highlight=False)


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
    """Say a plan as JSON; sizes in bytes, times in seconds."""
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
