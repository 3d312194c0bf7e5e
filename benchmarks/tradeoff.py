"""What a curve of time against peak takes beside its points, solved one by one.

`tradeoff` with `auto` on published models, at operator granularity with estimated costs, against
`solve` with `auto` at each of the same budgets, knowing nothing of the others: budgets spread from
the smallest found to storing everything (for which `smallest_budget` is asked first, on both
sides), and the tenths of storing everything. Both take what they take unless told: 15 s at most for
a budget of a curve, 30 s for a single one. Gaps, time found less the proved bound, are summed over
the budgets where both found a schedule, in points: percent of the time of computing everything
once.

Bars: the curve takes fewer seconds, and its summed gap is no more than 0.1 point a budget above.
Exit code 1 if one is missed; with `--quick`, at two budgets, seconds are not asked for.

    python benchmarks/tradeoff.py [--models NAME ...] [--points N] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphs import captured
from hiremate import PLANS
from provenance import write_results
from remat_graph import Graph, simulate
from remat_solvers import BudgetTooSmall, smallest_budget, solve, store_all, tradeoff

MODELS = ("mlp-mixer", "transformer-6-6", "gpt-24", "fno-1d", "unet")
TENTHS = tuple(i / 10 for i in range(1, 11))
SMALLEST_SECONDS = 5.0  # as the curve takes
MOST_MORE_GAP = 0.1  # points a budget


@dataclass(frozen=True, slots=True)
class Row:
    """One model: seconds and summed gaps in points, of the curve and of its points one by one.

    Budgets are `spread` over the curve, or tenths; `alone` is at how many of them a single solve
    found a schedule.
    """

    model: str
    ops: int
    spread: bool
    budgets: int
    alone: int
    curve_seconds: float
    alone_seconds: float
    curve_gap: float
    alone_gap: float

    @property
    def label(self) -> str:
        """Which budgets."""
        return f"{self.budgets} {'spread' if self.spread else 'tenths'}"

    @property
    def is_worse(self) -> bool:
        """Whether the gap of the curve is larger."""
        return self.curve_gap - self.alone_gap > MOST_MORE_GAP * self.alone

    @property
    def missed(self) -> bool:
        """Whether the curve is dearer, or worse."""
        return self.is_worse or self.curve_seconds >= self.alone_seconds


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=PLANS, default=MODELS, metavar="NAME")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--quick", action="store_true", help="one model at two budgets")
    given = parser.parse_args()
    models = MODELS[:1] if given.quick else given.models
    tenths = TENTHS[4:6] if given.quick else TENTHS
    print(f"{'model':18}{'ops':>6}  {'budgets':12}{'alone':>6}{'curve s':>9}{'alone s':>9}"
          f"{'ratio':>7}{'curve gap':>11}{'alone gap':>11}")  # fmt: skip
    rows: list[Row] = []
    for name in models:
        graph = captured(name)
        for spread in (False,) if given.quick else (True, False):
            row = measure(name, graph, given.points if spread else tenths)
            rows.append(row)
            print(f"{row.model:18}{row.ops:>6}  {row.label:12}{row.alone:>6}"
                  f"{row.curve_seconds:>9.1f}{row.alone_seconds:>9.1f}"
                  f"{row.curve_seconds / row.alone_seconds:>7.2f}"
                  f"{row.curve_gap:>11.2f}{row.alone_gap:>11.2f}{'  MISSED' * row.missed}",
                  flush=True)  # fmt: skip
    if given.json:
        write_results(given.json, {"rows": [asdict(row) for row in rows]})
    missed = [f"{row.model} {row.label}" for row in rows
              if (row.is_worse if given.quick else row.missed)]  # fmt: skip
    print(f"\nmissed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


def measure(name: str, graph: Graph, wanted: int | Sequence[float]) -> Row:
    """Draw the curve of a model, by so many points or these shares, then solve them one by one."""
    solve(graph, simulate(graph, store_all(graph)).peak_bytes - 1, limit_seconds=1.0)  # imports
    spread = isinstance(wanted, int)
    asked: dict[str, Any] = {"points" if spread else "budgets": wanted}
    curve = tradeoff(graph, **asked)
    alone, curve_gap, alone_gap = 0, 0.0, 0.0
    started = time.perf_counter()
    if spread:
        smallest_budget(graph, limit_seconds=SMALLEST_SECONDS)
    for point in curve.points:
        try:
            answer = solve(graph, point.budget_bytes)
        except BudgetTooSmall:
            continue
        alone += 1
        if point.solution is not None:
            alone_gap += answer.time - (answer.lower_bound or 0.0)
            curve_gap += point.solution.time - (point.lower_bound or 0.0)
    return Row(
        model=name,
        ops=len(graph.ops),
        spread=spread,
        budgets=len(curve.points),
        alone=alone,
        curve_seconds=curve.seconds,
        alone_seconds=time.perf_counter() - started,
        curve_gap=100 * curve_gap / graph.time,
        alone_gap=100 * alone_gap / graph.time,
    )


if __name__ == "__main__":
    sys.exit(main())
