"""What it gains that a plan may choose how values are made: the same budget with and without.

Each cell is a process of its own: `remat.rematerialize` at a share of plain's peak, without
alternatives, with those that give the same bits, with other layouts, and with copies in 16 bits,
beside plain. Printed:
peak and time relative to plain (with quartiles), the predicted overhead and its bound, the distance
of all gradients from plain's, and what was chosen. Exit code 1 if a peak is over its budget, or
gradients that are to be the same are further from plain's than those of the plan without. With
`--predicted` nothing is timed beside plain: one graph of each model is planned several times, on a
machine that is too busy for more; exit code 1 if a wider choice is slower by a point.

    python benchmarks/alternatives.py [--models NAME ...] [--shares SHARE ...] [--rounds N]
        [--threads N] [--predicted RUNS] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
import zoo
from comparison import PLAIN, Runner, Variant, compare
from isolation import Ended, run_alone
from provenance import write_results
from remat.planning.solving import solved_in_best_program
from remat_graph import Numerics, simulate
from remat_graph.torch import capture
from remat_solvers import BudgetTooSmall, solve, store_all
from zoo import Example, vgg

RESULTS = Path(__file__).parent / "results" / "alternatives.json"
MODELS = ("vgg", "unet", "resnet", "transformer")
WAYS = ("none", "bitwise", "rounding", "lossy")
CELL_SECONDS = 400.0
SOLVE_SECONDS = 20.0
ROUNDING = 1e-6  # of the gradients' norm


@dataclass(frozen=True, slots=True)
class Cell:
    """What one plan predicts and takes; ratios are to plain, sizes in bytes."""

    model: str
    share: float
    numerics: str
    budget_bytes: int
    peak_bytes: int
    peak_ratio: float
    time_ratio: float
    quartiles: tuple[float, float]
    predicted_overhead: float
    bound_overhead: float | None
    gradient_error: float
    chosen: str
    setup_seconds: float


def example_of(name: str, quick: bool) -> Example:
    """Build a model: tiny, or of the size of the other benchmarks."""
    if name == "vgg":
        torch.manual_seed(0)
        return vgg.make("vgg", (4, (64,), 8, 32) if quick else (16, (64,), 8, 64))
    return zoo.build(name, "tiny" if quick else "peers" if name in zoo.PEERS else "medium")


def measure(name: str, share: float, numerics: str, quick: bool, rounds: int, threads: int) -> Cell:
    """Plan, and time beside plain."""
    os.environ["REMAT_CACHE"] = "0"
    torch.set_num_threads(threads)
    example = example_of(name, quick)
    plans: list[Any] = []

    def make(model: nn.Module) -> nn.Module:
        made = remat.rematerialize(
            model, example.args, dict(example.kwargs), budget=share, loss=example.loss,
            limit_seconds=2.0 if quick else SOLVE_SECONDS,
            numerics=None if numerics == "none" else numerics,
        )  # fmt: skip
        plans.append(made)
        return made

    ours = Runner(Variant(numerics, make), example)
    pair = compare(ours, Runner(PLAIN, example), rounds)
    plan = plans[0].plan
    chosen = [line for line in str(plan).splitlines() if "made another way" in line]
    return Cell(
        name, share, numerics, plan.budget_bytes, pair.one.peak_bytes, pair.peak_ratio,
        pair.time_ratio, pair.quartiles, plan.predicted_overhead, plan.bound_overhead,
        pair.gradient_error, chosen[0].partition("way")[2].strip() if chosen else "",
        pair.one.setup_seconds,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """Overheads over storing everything without alternatives, of several runs, and their bounds."""

    model: str
    share: float
    numerics: str
    overheads: tuple[float, ...]
    bounds: tuple[float, ...]


def predict(name: str, share: float, quick: bool, runs: int, threads: int) -> list[Prediction]:
    """Plan one graph in all ways; a share is of the predicted peak of storing everything."""
    torch.set_num_threads(threads)
    example = example_of(name, quick)
    captured = capture(example.model, example.args, dict(example.kwargs))
    alone = captured.graph
    budget = int(share * simulate(alone, store_all(alone)).peak_bytes)
    found = []
    for way in WAYS:
        asked = captured if way == "none" else captured.with_alternatives(Numerics(way))
        seconds = 2.0 if quick else SOLVE_SECONDS
        solve_for = functools.partial(solve, budget_bytes=budget, limit_seconds=seconds)
        try:
            plans = [solved_in_best_program(asked, budget, solve_for)[1] for _ in range(runs)]
        except BudgetTooSmall:
            plans = []
        overheads = tuple(plan.time / alone.time - 1 for plan in plans)
        bounds = tuple((plan.lower_bound or 0.0) / alone.time - 1 for plan in plans)
        found.append(Prediction(name, share, way, overheads, bounds))
        texts = (" ".join(f"{100 * each:.1f}" for each in row) for row in (overheads, bounds))
        print(f"{name:14}{share:5.2f} {way:9}", "   bounds ".join(texts), flush=True)
    return found


def predict_all(options: argparse.Namespace) -> int:
    """Plan all models, print and write; return the exit code."""
    found: list[Prediction] = []
    for name in options.models:
        for share in options.shares:
            arguments = (name, share, options.quick, options.predicted, options.threads)
            found += run_alone(predict, *arguments, timeout_seconds=10 * CELL_SECONDS)
    if not options.quick:
        cells = [asdict(each) for each in found]
        write_results(options.json, {"threads": options.threads, "timed": False, "cells": cells})
    return int(
        any(
            max(two.overheads, default=math.inf) > min(one.overheads, default=math.inf) + 0.01
            for one, two in pairwise(found)
            if (one.model, one.share) == (two.model, two.share)
        )
    )


def print_cell(cell: Cell) -> None:
    """Print one row."""
    first, third = cell.quartiles
    bound = "" if cell.bound_overhead is None else f"{100 * cell.bound_overhead:.1f}"
    print(f"{cell.model:14}{cell.share:5.2f} {cell.numerics:9}{cell.peak_ratio:6.3f}"
          f"{f'{cell.time_ratio:.3f} ({first:.3f}-{third:.3f})':>22}"
          f"{100 * cell.predicted_overhead:8.1f}{bound:>7}{cell.gradient_error:10.1e}"
          f"{cell.setup_seconds:7.0f}  {cell.chosen}", flush=True)  # fmt: skip


def is_right(cells: list[Cell]) -> bool:
    """Whether every peak is within its budget, and every gradient as near as asked for."""
    plain = {(c.model, c.share): c.gradient_error for c in cells if c.numerics == "none"}
    near = all(
        cell.gradient_error <= plain.get((cell.model, cell.share), 0.0) + ROUNDING
        for cell in cells
        if cell.numerics == "bitwise"
    )
    return near and all(cell.peak_bytes <= cell.budget_bytes for cell in cells)


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.7], metavar="SHARE")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="NUMERICS")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="tiny models; nothing is kept")
    parser.add_argument("--predicted", type=int, default=0, metavar="RUNS")
    options = parser.parse_args()
    if options.predicted:
        return predict_all(options)
    cells: list[Cell] = []
    failed: list[str] = []
    print(f"{'model':14}{'at':>5} {'numerics':9}{'peak':>6}{'time (quartiles)':>22}"
          f"{'over %':>8}{'bound':>7}{'error':>10}{'set-up':>7}  chosen")  # fmt: skip
    for name in options.models:
        for share in options.shares:
            for way in options.ways:
                arguments = (name, share, way, options.quick, options.rounds, options.threads)
                try:
                    cell = run_alone(measure, *arguments, timeout_seconds=CELL_SECONDS)
                except Ended as error:
                    failed.append(f"{name} at {share}, {way}: {error}")
                    print(failed[-1], flush=True)
                    continue
                cells.append(cell)
                print_cell(cell)
    if not options.quick:
        report = {
            "threads": options.threads,
            "rounds": options.rounds,
            "cells": [asdict(cell) for cell in cells],
            "failed": failed,
        }
        write_results(options.json, report)
    return int(not is_right(cells) or not cells)


if __name__ == "__main__":
    sys.exit(main())
