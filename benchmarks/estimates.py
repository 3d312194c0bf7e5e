"""Peaks and times of plain steps as estimated without a GPU, beside those measured on one.

The five models of `gpu.py`, made without data and captured for the device that `gpu.json` is of.
Peaks are those of plain autograd, whose steps were measured; as in these, nobody holds another
output than the loss. Of times three figures are fitted to
the five, all that so few can tell apart: the share of the data sheet's rates that products and
memory reach, the rate of convolutions in 32 bits (which cuDNN computes in TF32), and the time that
an operation takes to be launched. They are those of `remat.DEVICES`; what each model would be
estimated to take by a fit to the other four says how far they can be trusted.

Bar: no peak is off by more than a tenth. Exit code 1 if one is.

    python benchmarks/estimates.py [--models NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

import gpu
import remat
from provenance import write_results
from remat_graph import Graph, simulate
from remat_graph.torch import Capture, capture
from remat_solvers import store_all

MEASURED = Path(__file__).parent / "results" / "gpu.json"
SHEET = remat.DeviceSpec("data sheet of the H100", 67.0e12, 989.5e12, 3.35e12, 0.0)
START = (0.7, 1e14, 1e-5)  # of a search for share, convolutions per second, seconds of a launch
MOST_OFF = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Of each operation of a step: products in 32 and 16 bits, convolutions, bytes moved."""

    products: Sequence[float]
    half: Sequence[float]
    convolutions: Sequence[float]
    moved: Sequence[float]

    def seconds(self, share: float, convolutions: float, launch: float) -> float:
        """Add up what the operations are estimated to take."""
        computing = (
            np.asarray(self.products) / (share * SHEET.flops_per_second)
            + np.asarray(self.half) / (share * SHEET.half_flops_per_second)
            + np.asarray(self.convolutions) / convolutions
        )
        moving = np.asarray(self.moved) / (share * SHEET.bytes_per_second)
        launches = np.count_nonzero(self.moved)
        return float(np.maximum(computing, moving).sum() + launch * launches)


def main() -> int:
    """Estimate, fit, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=gpu.MODELS, default=list(gpu.MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    given = parser.parse_args()
    measured = plain_steps()
    captured = {name: dry(name) for name in given.models}
    work = {name: work_of(found) for name, found in captured.items()}
    seconds = {name: measured[name]["plain_seconds"] for name in work}
    fitted = fit(work, seconds)
    rows = []
    for name, found in captured.items():
        others = {other: work[other] for other in work if other != name}
        row = {
            "model": name,
            "peak_bytes": stored_peak(found.as_autograd()),
            "measured_peak_bytes": measured[name]["plain_peak_bytes"],
            "by_data_sheet_seconds": work[name].seconds(1.0, SHEET.flops_per_second, 4e-6),
            "seconds": work[name].seconds(*fitted),
            "by_others_seconds": work[name].seconds(*fit(others, seconds)) if others else None,
            "measured_seconds": seconds[name],
        }
        rows.append(row)
        print(", ".join(f"{key} {item}" for key, item in row.items()), flush=True)
    share, convolutions, launch = fitted
    told = {"share": share, "convolutions_per_second": convolutions, "launch_seconds": launch}
    print(", ".join(f"{key} {item:.4g}" for key, item in told.items()))
    if given.json:
        write_results(given.json, {"fitted": told, "rows": rows})
    off = [row["model"] for row in rows
           if abs(row["peak_bytes"] / row["measured_peak_bytes"] - 1) > MOST_OFF]  # fmt: skip
    print(f"off by more than a tenth: {', '.join(off) or 'none'}")
    return int(bool(off))


def plain_steps() -> dict[str, dict[str, Any]]:
    """Read what plain steps took, by model: rows of one model have the same."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    return {row["model"]: row for row in reversed(rows)}


def dry(name: str) -> Capture:
    """Capture a step of a model of `gpu.py`, without its data, as on an H100."""
    with torch.device("meta"):
        example = gpu.MODELS[name](False)
    model = example.model.train()
    captured = capture(model, example.args, example.kwargs, costs=remat.DEVICES["h100"])
    returned = frozenset(range(len(captured.program.returned)))
    return captured.with_released_outputs(returned.difference(captured.program.tangents.values()))


def stored_peak(graph: Graph) -> int:
    """Find the peak of storing everything, in bytes."""
    return simulate(graph, store_all(graph)).peak_bytes


def work_of(captured: Capture) -> Work:
    """Find what a plain step computes and moves, by what it takes on devices that do one thing."""
    names = ("flops_per_second", "half_flops_per_second", "convolution_flops_per_second",
             "bytes_per_second")  # fmt: skip

    def taken(name: str) -> list[float]:
        rates: dict[str, Any] = dict.fromkeys(names, math.inf) | {name: 1.0}
        spec = remat.DeviceSpec("one rate", launch_seconds=0.0, **rates)
        return [op.time for op in captured.costed(spec).as_autograd().ops]

    return Work(*map(taken, names))


def fit(work: dict[str, Work], seconds: dict[str, float]) -> tuple[float, float, float]:
    """Find share, convolutions per second and seconds of a launch, by least squares of ratios."""

    def off(scales: Any) -> list[float]:
        figures = np.asarray(START) * np.exp(scales)
        return [math.log(work[name].seconds(*figures) / seconds[name]) for name in work]

    highest = (-math.log(START[0]), math.inf, math.inf)  # a share of at most one
    found = least_squares(off, np.zeros(3), bounds=((-math.inf,) * 3, highest)).x
    share, convolutions, launch = np.asarray(START) * np.exp(found)
    return float(share), float(convolutions), float(launch)


if __name__ == "__main__":
    sys.exit(main())
