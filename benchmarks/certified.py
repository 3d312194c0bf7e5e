"""Certified plans of the twelve published models: how fast, and how near the proved bound.

Each model is planned by `refine`, one operator at a time, at three budgets: its published peak
relative to storing everything, 0.3 of storing everything, and 1.15 times the smallest budget found
(`tight`). Costs are estimated for one fixed device (`graphs.DEVICE`); nothing is run. Overheads,
bounds and gaps are in points: percent of the time of computing everything once. `first` is the
overhead of the best schedule after 5 s less the final bound. Where it is proved that nothing fits,
the status is `infeasible`. The published overhead and minutes are those of HiRemate's table 3
(predicted; Gurobi, other hardware and costs).

Bars: a gap of 0.5 point within 60 s at the published peak, `first` of 1.5 points there for graphs
below 1,500 ops, 1 point within 60 s at 0.3, 3 points within 120 s at 1.15 times the smallest,
and a smallest budget (looked for with `tight`) within 5% of its lower bound. Exit code 1 if one is
missed.

Every result is written as soon as it is there; a second run does what is missing (`--fresh` all).

    python benchmarks/certified.py [--models NAME ...] [--points NAME ...] [--limit SECONDS]
                                   [--json FILE] [--fresh]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphs import DEVICE, captured
from hiremate import PLANS as PUBLISHED
from provenance import write_results
from remat_graph import Graph, simulate
from remat_solvers import BudgetTooSmall, Progress, smallest_budget, solve, store_all

RESULTS = Path(__file__).parent / "results" / "certified.json"
FIRST_SECONDS = 5.0
FIRST_POINTS = 1.5
FIRST_OPS = 1_500
SMALLEST_SECONDS = 60.0
SMALLEST_SHARE = 1.15
MOST_ABOVE = 1.05


@dataclass(frozen=True, slots=True)
class Point:
    """A budget to plan for, how long, and the gap that is asked for."""

    seconds: float
    most_gap: float


POINTS = {
    "published": Point(60.0, 0.5),
    "0.3": Point(60.0, 1.0),
    "tight": Point(120.0, 3.0),
}


def main() -> int:
    """Plan, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="the most for one solve")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="forget the results that are there")
    options = parser.parse_args()
    limit = float("inf") if options.limit is None else options.limit
    rows: dict[str, Any] = {}
    if options.json.exists() and not options.fresh:
        rows = json.loads(options.json.read_text(encoding="utf-8"))["models"]
    for name in options.models:
        row = rows.setdefault(name, {})
        wanted = {*options.points, *(["smallest"] if "tight" in options.points else [])}
        if not wanted <= row.keys():
            graph = captured(name)
            everything = simulate(graph, store_all(graph)).peak_bytes
            row |= {"ops": len(graph.ops), "store_all_bytes": everything}
            budgets = {
                "published": int(PUBLISHED[name][0] * everything),
                "0.3": int(0.3 * everything),
            }
            if "tight" in options.points:
                if "smallest" not in row:
                    row["smallest"] = look_for_smallest(graph, min(SMALLEST_SECONDS, limit))
                    write(options.json, rows)
                budgets["tight"] = int(SMALLEST_SHARE * row["smallest"]["found_bytes"])
            for point in options.points:
                if point not in row:
                    row[point] = plan(graph, budgets[point], min(POINTS[point].seconds, limit))
                    write(options.json, rows)
        show(name, row)
    missed = [f"{n} {what}" for n in options.models for what in misses(rows[n])]
    print(f"\nmissed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


@dataclass(slots=True)
class Record:
    """What was known when: seconds, time found, bound."""

    entries: list[tuple[float, float | None, float | None]] = field(default_factory=list)

    def __call__(self, progress: Progress, /) -> None:
        """Note it."""
        self.entries.append((progress.seconds, progress.incumbent_time, progress.lower_bound))

    def at(self, seconds: float) -> tuple[float | None, float | None]:
        """Give the time found and the bound after some seconds."""
        known = [entry for entry in self.entries if entry[0] <= seconds]
        return known[-1][1:] if known else (None, None)


def plan(graph: Graph, budget_bytes: int, seconds: float) -> dict[str, Any]:
    """Plan once; overheads in points."""
    record = Record()
    start = time.perf_counter()
    row: dict[str, Any] = {"budget_bytes": budget_bytes, "limit_seconds": seconds}
    try:
        found = solve(graph, budget_bytes, solver="refine", limit_seconds=seconds, progress=record)
    except BudgetTooSmall as error:
        seconds_taken = time.perf_counter() - start
        return row | {"seconds": seconds_taken, "status": error.status.value}
    seconds_taken = time.perf_counter() - start
    first, first_bound = record.at(FIRST_SECONDS)
    if seconds_taken <= FIRST_SECONDS:
        first, first_bound = found.time, found.lower_bound
    return row | {
        "seconds": seconds_taken,
        "status": found.status.value,
        "peak_bytes": found.peak_bytes,
        "overhead": points(graph, found.time),
        "bound": points(graph, found.lower_bound),
        "first_overhead": points(graph, first),
        "first_bound": points(graph, first_bound),
    }


def points(graph: Graph, seconds: float | None) -> float | None:
    """Express a time as overhead in percent of one iteration."""
    return None if seconds is None else 100 * (seconds / graph.time - 1)


def look_for_smallest(graph: Graph, limit_seconds: float) -> dict[str, Any]:
    """Look for the smallest budget."""
    start = time.perf_counter()
    found = smallest_budget(graph, limit_seconds=limit_seconds)
    return {
        "found_bytes": found.peak_bytes,
        "least_bytes": found.least_bytes,
        "seconds": time.perf_counter() - start,
    }


def gap(cell: dict[str, Any]) -> float | None:
    """Give the certified gap in points; 0 where it is proved that nothing fits."""
    if cell["status"] == "infeasible":
        return 0.0
    return None if "overhead" not in cell else cell["overhead"] - cell["bound"]


def misses(row: dict[str, Any]) -> list[str]:
    """List the bars that are missed."""
    missed = []
    for point, bar in POINTS.items():
        found = gap(row[point]) if point in row else 0.0
        if found is None or found > bar.most_gap:
            missed.append(point)
    cell = row.get("published", {})
    if row["ops"] < FIRST_OPS and "bound" in cell:
        first = cell["first_overhead"]
        if first is None or first - cell["bound"] > FIRST_POINTS:
            missed.append("first")
    smallest = row.get("smallest")
    if smallest and smallest["found_bytes"] > MOST_ABOVE * smallest["least_bytes"]:
        missed.append("smallest")
    return missed


def show(name: str, row: dict[str, Any]) -> None:
    """Print the lines of one model."""
    everything, smallest = row["store_all_bytes"], row.get("smallest")
    share, overhead, minutes = PUBLISHED[name]
    print(f"\n{name}, {row['ops']} ops, storing everything {everything / 2**20:.1f} MiB; published "
          f"at {share}: {overhead}% after {minutes} min")  # fmt: skip
    if smallest:
        print(f"  smallest {smallest['found_bytes'] / everything:.3f} of that, proved "
              f"{smallest['least_bytes'] / everything:.3f}: "
              f"{100 * (smallest['found_bytes'] / smallest['least_bytes'] - 1):.1f}% above, "
              f"{smallest['seconds']:.1f} s")  # fmt: skip
    for point in POINTS:
        if point not in row:
            continue
        cell = row[point]
        line = f"  {point:10}{cell['budget_bytes'] / everything:>7.3f}{cell['seconds']:>8.1f} s  "
        if "overhead" in cell:
            first = cell["first_overhead"]
            early = "     -" if first is None else f"{first - cell['bound']:6.2f}"
            line += (f"overhead {cell['overhead']:6.2f}  bound {cell['bound']:6.2f}  gap "
                     f"{gap(cell):5.2f}  first {early}")  # fmt: skip
        print(f"{line}  {cell['status']}", flush=True)


def write(path: Path, rows: dict[str, Any]) -> None:
    """Write the results."""
    write_results(path, {"costs": f"estimated: {DEVICE.name}", "models": rows})


if __name__ == "__main__":
    sys.exit(main())
