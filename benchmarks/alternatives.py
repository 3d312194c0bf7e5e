"""What it gains that a plan may choose how values are made: the same budget with and without.

Each cell is a process of its own: `remat.rematerialize` at a share of plain's peak, without
alternatives, with those that give the same bits, and with copies in 16 bits, beside plain. Printed:
peak and time relative to plain (with quartiles), the predicted overhead and its bound, the distance
of all gradients from plain's, and what was chosen. Exit code 1 if a peak is over its budget, or
gradients that are to be the same are further from plain's than those of the plan without.

    python benchmarks/alternatives.py [--models NAME ...] [--shares SHARE ...] [--rounds N]
        [--threads N] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
import zoo
from comparison import PLAIN, Runner, Variant, compare
from isolation import Ended, run_alone
from provenance import provenance
from remat_graph.files import write_atomically
from zoo import Example
from zoo.example import distance_to

RESULTS = Path(__file__).parent / "results" / "alternatives.json"
MODELS = ("vgg", "unet", "resnet", "transformer")
WAYS = ("none", "bitwise", "lossy")
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


def vgg(quick: bool) -> Example:
    """VGG-16 (Simonyan and Zisserman, 2015) with fewer channels, and dropout before its head."""
    torch.manual_seed(0)
    width, size = (4, 32) if quick else (16, 64)
    layers: list[nn.Module] = []
    before = 3
    for count, factor in ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8)):
        for _ in range(count):
            layers += [nn.Conv2d(before, factor * width, 3, padding=1), nn.ReLU()]
            before = factor * width
        layers.append(nn.MaxPool2d(2))
    features = before * (size // 32) ** 2
    head = [nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10)]
    batch = torch.randn(8, 3, size, size)
    model = nn.Sequential(*layers, *head)
    return Example("vgg", model, (batch,), {}, distance_to(torch.randn(8, 10)))


def example_of(name: str, quick: bool) -> Example:
    """Build a model: tiny, or of the size of the other benchmarks."""
    if name == "vgg":
        return vgg(quick)
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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="tiny models; nothing is kept")
    options = parser.parse_args()
    cells: list[Cell] = []
    failed: list[str] = []
    print(f"{'model':14}{'at':>5} {'numerics':9}{'peak':>6}{'time (quartiles)':>22}"
          f"{'over %':>8}{'bound':>7}{'error':>10}{'set-up':>7}  chosen")  # fmt: skip
    for name in options.models:
        for share in options.shares:
            for way in WAYS:
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
            "machine": provenance(),
            "threads": options.threads,
            "rounds": options.rounds,
            "cells": [asdict(cell) for cell in cells],
            "failed": failed,
        }
        write_atomically(options.json, json.dumps(report, indent=1) + "\n")
    return int(not is_right(cells) or not cells)


if __name__ == "__main__":
    sys.exit(main())
