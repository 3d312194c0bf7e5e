"""How long a plan takes and how good it provably is: GPT-2 with 12 layers at 0.5 and 0.35.

Capture, costs and solving of the model of the side-by-side comparison, with and without dropout, at
fractions of plain autograd's measured peak. The certified gap is the time found less the lower
bound, in percent of the time of computing everything once. Exit code 1 if a gap is above 1.5 points
or capture and solving together take more than 60 s; with `--quick` nothing is asked for.

    python benchmarks/planning.py [--json FILE] [--fractions F ...] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import remat
import zoo
from provenance import write_results

MOST_GAP_POINTS = 1.5
MOST_SECONDS = 60.0


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.35])
    parser.add_argument("--quick", action="store_true", help="tiny models: a smoke test")
    parser.add_argument("--limit-seconds", type=float, default=30.0, help="for the solver")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    print(f"{'model':18}{'ops':>6}{'budget':>8}{'MiB':>8}{'capture s':>11}{'solve s':>9}"
          f"{'total s':>9}{'overhead':>10}{'bound':>8}{'gap':>7}  status")  # fmt: skip
    for name in ("gpt2-no-dropout", "gpt2"):
        full: zoo.Size = "peers" if name in zoo.PEERS else "medium"
        example = zoo.build(name, "tiny" if options.quick else full)
        for fraction in options.fractions:
            row = plan_once(name, example, fraction, options.limit_seconds)
            rows.append(row)
            print(f"{name:18}{row['ops']:>6}{fraction:>8.2f}{row['budget_bytes'] / 2**20:>8.1f}"
                  f"{row['capture_seconds']:>11.1f}{row['solve_seconds']:>9.1f}"
                  f"{row['total_seconds']:>9.1f}{row['overhead_points']:>9.2f}%"
                  f"{row['bound_points']:>7.2f}%{row['gap_points']:>7.2f}  {row['status']}",
                  flush=True)  # fmt: skip
    if options.json:
        write(options.json, rows)
    failed = [
        row
        for row in rows
        if not options.quick
        and (row["gap_points"] > MOST_GAP_POINTS or row["total_seconds"] > MOST_SECONDS)
    ]
    print(f"\n{len(failed)} of {len(rows)} above {MOST_GAP_POINTS} points or {MOST_SECONDS:.0f} s")
    return int(bool(failed))


def plan_once(name: str, example: zoo.Example, fraction: float, limit: float) -> dict[str, Any]:
    """Plan a model once, from capture to schedule; times in seconds, gaps in points."""
    start = time.perf_counter()
    plan = remat.plan(
        example.model, example.args, example.kwargs, budget=fraction, limit_seconds=limit
    )
    total = time.perf_counter() - start
    bound = 100 * (plan.bound_overhead or 0.0)
    overhead = 100 * plan.predicted_overhead
    return {
        "model": name,
        "ops": len(plan.graph.ops),
        "fraction": fraction,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.predicted_peak_bytes,
        "capture_seconds": plan.capture_seconds,
        "solve_seconds": plan.solution.solve_seconds,
        "total_seconds": total,
        "overhead_points": overhead,
        "bound_points": bound,
        "gap_points": max(0.0, overhead - bound),
        "status": plan.solution.status.value,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows."""
    write_results(path, {"threads": torch.get_num_threads(), "plans": rows})


if __name__ == "__main__":
    sys.exit(main())
