"""Tables of solvers side by side: on nine models at five budgets, and on MONeT's networks."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from page_tables.reading import Row, markdown, results

__all__ = ["TABLES", "cells_by_task", "overhead"]

FOUND = ("optimal", "feasible")
METHODS = ("checkpointing", "operators-first", "monet", "ours")


def overhead(cell: Row) -> float:
    """Give the overhead in percent, infinite where nothing was found."""
    return float(cell["overhead_percent"]) if cell["outcome"] in FOUND else math.inf


def cells_by_task() -> dict[tuple[str, float], dict[str, Row]]:
    """Group the cells by model and budget, and name them by solver."""
    found: dict[tuple[str, float], dict[str, Row]] = defaultdict(dict)
    for cell in results("solvers")["cells"]:
        found[cell["model"], cell["budget"]][cell["solver"]] = cell
    return found


def solvers() -> str:
    """List for each solver where it finds something, and how much slower than `refine` that is."""
    tasks = cells_by_task()
    names = sorted({name for task in tasks.values() for name in task})
    rows = [(name, _standing(name, tasks.values())) for name in names]
    rows.sort(key=lambda row: (-row[1].found, row[1].median))
    heading = ("solver", "finds a schedule", "median overhead, %", "of `refine` there",
               "proved optimal or impossible", "median seconds")  # fmt: skip
    cells = [
        (
            f"`{name}`",
            f"{row.found} of {len(tasks)}",
            f"{row.median:.1f}" if row.found else "",
            f"{row.median_of_refine:.1f}" if row.found else "",
            row.proved,
            f"{row.seconds:.1f}",
        )
        for name, row in rows
    ]
    return markdown(heading, cells, "solvers")


@dataclass(frozen=True, slots=True)
class _Standing:
    """How a solver does: medians in percent over what it finds, and seconds over all."""

    found: int
    median: float
    median_of_refine: float
    proved: int
    seconds: float


def _standing(name: str, tasks: Collection[dict[str, Row]]) -> _Standing:
    pairs = [(overhead(task[name]), overhead(task["refine"])) for task in tasks]
    found = [pair for pair in pairs if pair[0] < math.inf]
    return _Standing(
        len(found),
        statistics.median([own for own, _ in found] or [math.inf]),
        statistics.median([refine for _, refine in found] or [math.inf]),
        sum(task[name]["outcome"] in ("optimal", "infeasible") for task in tasks),
        statistics.median(task[name]["seconds"] for task in tasks),
    )


def monet(table: str) -> str:
    """Compare plans of MONeT's networks: without alternatives, with them, and as published."""
    rows = []
    for row in results("monet")["rows"]:
        if row["table"] != table:
            continue
        found = row["methods"]
        own = found["ours"]
        published = row["published_overhead"]
        rows.append(
            (
                row["model"],
                f"{row['budget_bytes'] / row['plain_bytes']:.2f}",
                *(_points(found[method]) for method in METHODS),
                "" if own["bound"] is None else f"{100 * own['bound']:.1f}",
                *(("" if published is None else f"{published:.1f}",) if table == "paper" else ()),
            )
        )
    heading = ["network", "budget of storing everything", "checkpointing alone",
               "operators first", "`monet`", "ours", "at least"]  # fmt: skip
    if table == "paper":
        heading.append("published")
    return markdown(heading, rows, "monet")


def _points(found: Row) -> str:
    if found["overhead"] is None:
        return "none"
    return f"{100 * found['overhead']:.1f}, {found['seconds']:.0f} s"


TABLES: dict[str, Callable[[], str]] = {
    "solvers": solvers,
    "monet-paper": lambda: monet("paper"),
    "monet-here": lambda: monet("here"),
}
