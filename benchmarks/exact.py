"""Whether plans that choose how values are made leave every bit as it is, within their budgets.

Each model of the zoo is planned at shares of plain's peak with `numerics="bitwise"`, or at the
smallest budget that the error offers, and trained for two steps beside the plan that stores
everything and chooses nothing: losses, gradients, buffers and weights must be the same bits, and
measured peaks within their budgets. Nothing is timed, so it may run on a busy machine. Exit code 1
if anything differs or is over, or if a model failed.

    python benchmarks/exact.py [--models NAME ...] [--shares SHARE ...] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import remat
import zoo
from isolation import Ended, run_alone
from provenance import write_results
from zoo import Example

RESULTS = Path(__file__).parent / "results" / "exact.json"
SHARES = (1.0, 0.7, 0.5, 0.35)
STEPS = 2
SOLVE_SECONDS = 3.0
MODEL_SECONDS = 900.0
SMALLER_LOSS = ("inplace",)  # than what a loss of all outputs is allowed, so it is handed over


@dataclass(frozen=True, slots=True)
class Cell:
    """One plan: sizes in bytes, the share of plain's peak that was asked for, and what differed.

    `budget_bytes` is above the share where nothing fits within it. `chosen` says what the plan
    makes another way.
    """

    model: str
    share: float
    budget_bytes: int
    predicted_peak_bytes: int
    peak_bytes: int
    plain_peak_bytes: int | None
    recomputations: int
    chosen: str
    different: tuple[str, ...]


def train(example: Example, model: nn.Module) -> dict[str, Tensor]:
    """Train some steps from one seed; give all that is left behind."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    left: dict[str, Tensor] = {}
    torch.manual_seed(0)
    for step in range(STEPS):
        optimizer.zero_grad()
        left[f"loss {step}"] = example.step(model)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                left[f"gradient {step} of {name}"] = parameter.grad.clone()
        optimizer.step()
    return left | {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rematerialized(example: Example, **options: Any) -> Any:
    """Plan for a copy of the model, at the least that fits where the budget is too small."""
    loss = example.loss if example.name in SMALLER_LOSS else None
    arguments = (copy.deepcopy(example.model), example.args, dict(example.kwargs))
    try:
        return remat.rematerialize(*arguments, loss=loss, **options)
    except remat.BudgetTooSmall as error:
        if error.smallest_bytes is None:
            raise
        options["budget"] = int(1.005 * error.smallest_bytes)
        return remat.rematerialize(*arguments, loss=loss, **options)


def check(name: str, shares: tuple[float, ...], quick: bool) -> list[Cell]:
    """Plan one model at all shares, and train by each plan."""
    os.environ["REMAT_CACHE"] = "0"
    example = zoo.build(name, "tiny" if quick else "medium")
    stored = rematerialized(example, budget="64GiB", solver="store-all")
    expected = train(example, stored)
    found = []
    for share in shares:
        limit = 0.5 if quick else SOLVE_SECONDS
        model = rematerialized(example, budget=share, numerics="bitwise", limit_seconds=limit)
        got = train(example, model)
        same = {n for n in expected.keys() & got.keys() if torch.equal(expected[n], got[n])}
        different = tuple(sorted((expected.keys() | got.keys()) - same))
        model.zero_grad()
        with remat.measure_peak() as peak:
            example.step(model)  # as in training: what was let go of there is taken to be here
        plan = model.plan
        chosen = [line for line in str(plan).splitlines() if "made another way" in line]
        found.append(
            Cell(
                name, share, plan.budget_bytes, plan.predicted_peak_bytes, peak.peak_bytes,
                plan.plain_peak_bytes, plan.recomputations,
                chosen[0].partition("way")[2].strip() if chosen else "", different,
            )
        )  # fmt: skip
    return found


def print_cell(cell: Cell) -> None:
    """Print one row."""
    bits = "same bits" if not cell.different else f"differ: {', '.join(cell.different[:3])}"
    over = "" if cell.peak_bytes <= cell.budget_bytes else "  OVER"
    print(f"{cell.model:24}{cell.share:5.2f}{cell.peak_bytes / 2**20:9.1f} of "
          f"{cell.budget_bytes / 2**20:.1f} MiB{over}  {cell.recomputations} again  {bits}"
          f"  {cell.chosen}", flush=True)  # fmt: skip


def main() -> int:
    """Check, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=zoo.NAMES, default=zoo.NAMES, metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, metavar="SHARE")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="tiny models; nothing is kept")
    options = parser.parse_args()
    cells: list[Cell] = []
    failed: list[str] = []
    for name in options.models:
        arguments = (name, tuple(options.shares), options.quick)
        try:
            found = run_alone(check, *arguments, timeout_seconds=MODEL_SECONDS)
        except Ended as error:
            failed.append(f"{name}: {error}")
            print(failed[-1], flush=True)
            continue
        for cell in found:
            print_cell(cell)
        cells += found
        if not options.quick:  # what ran is kept if the rest is stopped
            kept = {"cells": [asdict(cell) for cell in cells], "failed": failed}
            write_results(options.json, kept)
    wrong = [cell for cell in cells if cell.different or cell.peak_bytes > cell.budget_bytes]
    print(f"\n{len(cells)} plans, {len(wrong)} differ or are over their budget")
    return int(bool(wrong or failed) or not cells)


if __name__ == "__main__":
    sys.exit(main())
