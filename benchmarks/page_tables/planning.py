"""Tables of planning: how long, how near to the proved bound, and what parts of it give."""

from __future__ import annotations

from collections.abc import Callable

from hiremate import PLANS
from page_tables.reading import Row, markdown, percent, results

__all__ = ["TABLES"]

PARTITIONERS = ("h-partition", "sequence", "repeats", "metis")
NAMES = {
    "layers": "random layers",
    "transformer": "transformer with a mask",
    "u-net": "U-Net",
    "2 hubs": "a chain that reads two values all along",
    "8 hubs": "a chain that reads eight values all along",
}


def planning() -> str:
    """List plans of a GPT-2 by their seconds and gaps."""
    rows = [
        (
            plan["model"],
            plan["fraction"],
            f"{plan['capture_seconds']:.1f}",
            f"{plan['solve_seconds']:.1f}",
            f"{plan['overhead_points']:.2f}",
            f"{plan['gap_points']:.2f}",
        )
        for plan in results("planning")["plans"]
    ]
    heading = ("model", "of plain", "capture s", "solving s", "overhead, points", "gap")
    return markdown(heading, rows, "planning")


def large() -> str:
    """List plans of models without their data."""
    rows = [
        (
            row["layers"],
            f"{row['parameters'] / 1e9:.1f}",
            row["made"],
            row["ops"],
            f"{row['seconds']:.0f}",
            f"{row['cpu_seconds']:.0f}",
            f"{row['peak_bytes'] / 2**30:.1f}",
            f"{row['overhead']:.2f} ({row['overhead'] - row['bound']:.2f})",
        )
        for row in results("large")["rows"]
    ]
    heading = ("layers", "parameters, 10^9", "made on", "operations", "seconds", "of CPU",
               "memory, GiB", "overhead (gap), points")  # fmt: skip
    return markdown(heading, rows, "large")


def growth() -> str:
    """List the largest graphs."""
    found = results("growth")
    rows = [
        (
            row["shape"],
            row["share"],
            row["ops"],
            f"{row['seconds']:.1f}",
            f"{row['overhead'] - row['bound']:.3f}",
            f"{row['peak_bytes'] / 2**30:.1f}",
            f"n^{_last(found, row):.1f}",
        )
        for row in found["rows"]
        if row["size"] >= 10**4
    ]
    heading = ("shape", "of storing everything", "operations", "seconds", "gap, points",
               "memory, GiB", "growth of CPU seconds")  # fmt: skip
    return markdown(heading, rows, "growth")


def _last(found: Row, row: Row) -> float:
    return float(found["growth"][f"{row['shape']} {row['share']}"]["last"])


def partition_growth() -> str:
    """List what cutting the largest graphs takes."""
    found = results("partition")
    largest = max(row["size"] for row in found["rows"])
    rows = [
        (
            NAMES[row["shape"]],
            f"{row['cpu_seconds']:.0f} s",
            f"n^{found['growth'][row['shape']]['fitted']:.2f}",
            f"n^{found['growth'][row['shape']]['last']:.2f}",
            f"{(row['peak_bytes'] - row['graph_bytes']) / 2**20:.0f} MiB",
        )
        for row in found["rows"]
        if row["size"] == largest
    ]
    exponent = len(str(largest)) - 1
    heading = (f"shape, 10^{exponent} operations", "CPU time", "growth from 10^2", "from 10^4",
               "peak beyond the graph")  # fmt: skip
    return markdown(heading, rows, "partition")


def certified() -> str:
    """List certified plans of the published models."""
    rows = []
    for name, row in results("certified")["models"].items():
        share, overhead, minutes = PLANS[name]
        at_share = row["published"]
        seconds = f" in {at_share['seconds']:.1f} s" if "overhead" in at_share else ""
        rows.append((
            name, row["ops"], share, f"{overhead:g} in {minutes:g} min",
            f"{_plan(at_share)}{seconds}", _plan(row["0.3"]), _smallest(row),
            _plan(row["tight"]) if "tight" in row else "not run",
        ))  # fmt: skip
    heading = ("model", "ops", "peak / storing all", "published", "`refine` there",
               "`refine` at 0.3", "smallest found / proved",
               "`refine` at 1.15 of the smallest found")  # fmt: skip
    return markdown(heading, rows, "certified")


def _smallest(row: Row) -> str:
    if "smallest" not in row:
        return "not run"
    shares = (
        row["smallest"][key] / row["store_all_bytes"] for key in ("found_bytes", "least_bytes")
    )
    return " / ".join(f"{share:.3f}" for share in shares)


def _plan(cell: Row) -> str:
    if cell["status"] == "infeasible":
        return "proved infeasible"
    if "overhead" not in cell:
        return "nothing found"
    return f"{cell['overhead']:.2f} (gap {cell['overhead'] - cell['bound']:.2f})"


def ablation(share: float) -> str:
    """Compare `refine` with one part left out, at a share of storing everything."""
    own = [row for row in results("ablation")["rows"] if row["share"] == share]
    models = list(dict.fromkeys(row["model"] for row in own))
    best = {m: max(row["bound"] or 0.0 for row in own if row["model"] == m) for m in models}
    cells = {(row["variant"], row["model"]): _part(row, best[row["model"]]) for row in own}
    variants = list(dict.fromkeys(row["variant"] for row in own))
    rows = [(variant, *(cells[variant, model] for model in models)) for variant in variants]
    return markdown(("", *models), rows, "ablation")


def _part(row: Row, best: float) -> str:
    if row["overhead"] is None:
        return str(row["status"])
    gaps = [f"{row['overhead'] - best:.2f}"]
    if row["bound"] is not None:
        gaps.append(f"{row['overhead'] - row['bound']:.2f}")
    return f"{row['overhead']:.2f} ({', '.join(gaps)})"


def tradeoff() -> str:
    """Compare curves with their points solved one by one."""
    rows = [
        (
            row["model"],
            "spread" if row["spread"] else "tenths",
            row["budgets"],
            percent(row["curve_seconds"] / row["alone_seconds"], 0),
            f"{row['curve_gap']:.2f}",
            f"{row['alone_gap']:.2f}",
        )
        for row in results("tradeoff")["rows"]
    ]
    heading = ("model", "budgets", "number", "seconds of those alone", "summed gap, points",
               "of those alone")  # fmt: skip
    return markdown(heading, rows, "tradeoff")


def structure() -> str:
    """Put what models are cut into beside the published figures, those in brackets."""
    rows = []
    for row in results("structure")["models"]:
        cells = [f"{row[column]} ({count})" for column, count in row["published"].items()]
        rows.append((row["model"], *cells, ", ".join(map(str, row["unique_by_level"]))))
    columns = next(iter(results("structure")["models"]))["published"]
    return markdown(("", *columns, "unique by level"), rows, "structure")


def cuts() -> str:
    """List the MiB that cross between the lowest blocks and at the top, by partitioner."""
    rows = []
    for row in results("structure")["models"]:
        lowest, top = row["cuts"]["lowest"], row["cuts"]["top"]
        cells = [
            f"{lowest[name]['size_bytes'] / 2**20:.1f} / {top[name]['size_bytes'] / 2**20:.1f} "
            f"in {lowest[name]['groups']}, {lowest[name]['largest']}"
            for name in PARTITIONERS
        ]
        rows.append((row["model"], f"{row['forward_bytes'] / 2**20:.0f}", *cells))
    return markdown(("", "made", *PARTITIONERS), rows, "structure")


TABLES: dict[str, Callable[[], str]] = {
    "planning": planning,
    "large": large,
    "growth": growth,
    "partition-growth": partition_growth,
    "certified": certified,
    "ablation-0.5": lambda: ablation(0.5),
    "ablation-0.4": lambda: ablation(0.4),
    "tradeoff": tradeoff,
    "structure": structure,
    "cuts": cuts,
}
