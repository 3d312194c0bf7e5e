"""Tables, claims and plots of what `solvers.py` has found: overheads of solvers side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from remat_solvers.solve import AUTO

MODELS = (
    "fno-1d", "unet-128", "transformer-2-2", "mlp-mixer", "resnet-50-128", "gpt-12",
    "transformer-6-6", "resnet-101-128", "gpt-24",
)  # fmt: skip
FOUND = ("optimal", "feasible")
SILENT = (*FOUND, "infeasible", "limit")
OURS = (AUTO, "refine")

# What `refine` leaves unproved when it stops; two answers closer than this are equally good.
SAME_POINTS = 0.1
MOST_POINTS_ABOVE = 0.6
MOST_ABOVE_OPTIMUM = 1.06
LEAST_BOUND_PERCENT = 0.005

Row = dict[str, Any]
Key = tuple[str, float, str]  # model, budget, solver


def in_order(names: Iterable[str]) -> list[str]:
    """Sort models as in `MODELS`."""
    return sorted(names, key=MODELS.index)


def short(value: float) -> str:
    """Write a percentage with about three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def describe(row: Row) -> str:
    """Say in a line how a cell went."""
    text = f"{row['outcome']:11}{row['seconds']:>6.1f} s"
    if row["outcome"] in FOUND:
        text += f"{short(row['overhead_percent']):>7}%  peak {row['peak_share']:.3f}"
    if proves(row):
        text += f"  bound {short(row['bound_percent'])}%"
    return text + ("" if row["outcome"] in SILENT else f"  {row.get('message', '')[:110]}")


def proves(row: Row) -> bool:
    """Say whether a cell has a bound above that of computing every op once."""
    return bool(row.get("bound_percent", 0.0) > LEAST_BOUND_PERCENT)


def shown(row: Row | None) -> str:
    """Write a cell of a table."""
    if row is None:
        return ""
    text: str = row["outcome"]
    if text in FOUND:
        text = short(row["overhead_percent"]) + "*" * (text == "optimal")
    return text + (f" ({short(row['bound_percent'])})" if proves(row) else "")


def print_model(name: str, model: Row, rows: list[Row]) -> None:
    """Print what each solver found at each budget, in percent; in brackets what it proved."""
    captured = model["capture_seconds"]
    print(f"\n{name}: {model['ops']} ops, {model['forward_ops']} forward; storing everything "
          f"{model['store_all_bytes'] / 2**20:.1f} MiB; cut into {model['blocks']} blocks in "
          f"{model['partition_seconds']:.2f} s; capture "
          + ("not timed" if captured is None else f"{captured:.1f} s"))  # fmt: skip
    budgets = sorted({row["budget"] for row in rows}, reverse=True)
    by_key = {(row["solver"], row["budget"]): row for row in rows}
    heads = "".join(f"{budget:>17}" for budget in budgets)
    print(f"{'overhead (bound) %, * optimal':30}{heads}{'most s':>8}")
    for solver in by_merit(rows):
        own = [by_key.get((solver, budget)) for budget in budgets]
        seconds = max(row["seconds"] for row in own if row is not None)
        print(f"{solver:30}" + "".join(f"{shown(row):>17}" for row in own) + f"{seconds:>8.1f}")


def by_merit(rows: list[Row]) -> list[str]:
    """Sort the solvers of a model: those that find most first, and of these the fastest schedules.

    Where a solver finds nothing, it counts as the slowest schedule that another one finds there.
    """
    worst: dict[float, float] = {}
    for row in rows:
        overhead = row.get("overhead_percent", 0.0)
        worst[row["budget"]] = max(worst.get(row["budget"], 0.0), overhead)

    def merit(solver: str) -> tuple[int, float, str]:
        own = [row for row in rows if row["solver"] == solver]
        found = sum(row["outcome"] in FOUND for row in own)
        return -found, sum(row.get("overhead_percent", worst[row["budget"]]) for row in own), solver

    return sorted({row["solver"] for row in rows}, key=merit)


def grouped(cells: dict[Key, Row]) -> list[tuple[str, float, dict[str, Row]]]:
    """Collect what can be compared: the solvers at equal model, budget and limit."""
    groups: dict[tuple[str, float, float], dict[str, Row]] = {}
    for row in cells.values():
        key = row["model"], row["budget"], row["limit"]
        groups.setdefault(key, {})[row["solver"]] = row
    order = sorted(groups, key=lambda key: (MODELS.index(key[0]), -key[1], key[2]))
    return [(key[0], key[1], groups[key]) for key in order]


def difference(row: Row | None, other: Row) -> float | None:
    """Say how many points the overhead of one is above that of another, if it has found any."""
    if row is None or row["outcome"] not in FOUND:
        return None
    return float(row["overhead_percent"] - other["overhead_percent"])


def print_standing(cells: dict[Key, Row]) -> list[str]:
    """Print who is best where, and how far `auto` and `refine` are from the best other solver."""
    print(f"\nbest of the others, and the points by which ours are above it (below: negative)\n"
          f"{'model':18}{'budget':>7}  {'best other':20}{'overhead':>9}"
          + "".join(f"{name:>17}" for name in OURS))  # fmt: skip
    missed, above, compared = [], 0, 0
    for model, budget, group in grouped(cells):
        found = [r for n, r in group.items() if n not in OURS and r["outcome"] in FOUND]
        ours = [group[name] for name in OURS if name in group]
        if not found:
            texts = "".join(f"{shown(group.get(name)):>17}" for name in OURS)
            print(f"{model:18}{budget:>7}  {'none':20}{'':>9}{texts}")
            continue
        best = min(found, key=lambda row: (row["overhead_percent"], row["solver"]))
        line = f"{model:18}{budget:>7}  {best['solver']:20}{short(best['overhead_percent']):>8}%"
        for name in OURS:
            points = difference(group.get(name), best)
            line += f"{shown(group.get(name)) if points is None else f'{points:+.2f}':>17}"
        for row in ours:
            points = difference(row, best)
            compared += 1
            above += points is None or points > 1e-6
            if points is None or points > SAME_POINTS:
                missed.append(f"{row['solver']} on {model} at {budget}")
        print(line)
    print(f"of {compared} comparisons, worse in {above}, by more than {SAME_POINTS} points "
          f"(where refine stops) in {len(missed)}")  # fmt: skip
    return missed


def print_hierarchical(cells: dict[Key, Row]) -> list[str]:
    """Print how far `h-ilp` is from `rk-checkmate`, wherever that one found a schedule."""
    missed, lines = [], []
    for model, budget, group in grouped(cells):
        flat, deep = group.get("rk-checkmate"), group.get("h-ilp")
        if flat is None or deep is None or flat["outcome"] not in FOUND:
            continue
        points = difference(deep, flat)
        text = "" if points is None else f"{points:+.2f}"
        lines.append(f"{model:18}{budget:>7}{shown(flat):>18}{shown(deep):>18}{text:>9}")
        if flat["outcome"] == "optimal" and (points is None or points > MOST_POINTS_ABOVE):
            missed.append(f"h-ilp on {model} at {budget}")
    title = f"h-ilp above rk-checkmate, in points; at most {MOST_POINTS_ABOVE} where it finishes"
    print_table(title, f"{'rk-checkmate':>18}{'h-ilp':>18}{'points':>9}", lines)
    return missed


def print_rounding(cells: dict[Key, Row]) -> list[str]:
    """Print how much longer `checkmate-rounding` takes than the optimum, or than the best bound."""
    missed, lines = [], []
    for model, budget, group in grouped(cells):
        row = group.get("checkmate-rounding")
        if row is None or row["outcome"] == "unsuitable":
            continue
        proved = [r["overhead_percent"] for r in group.values() if r["outcome"] == "optimal"]
        bounds = [r["bound_percent"] for r in group.values() if "bound_percent" in r]
        if not proved and not (bounds and row["outcome"] in FOUND):
            continue
        base = min(proved) if proved else max(bounds)
        ratio = (100 + row["overhead_percent"]) / (100 + base) if row["outcome"] in FOUND else None
        text = "" if ratio is None else f"{'' if proved else '<= '}{ratio:.3f}"
        optimum, bound = (short(base) if known else "" for known in (proved, not proved))
        lines.append(f"{model:18}{budget:>7}{shown(row):>18}{optimum:>10}{bound:>10}{text:>9}")
        if proved and (ratio is None or ratio > MOST_ABOVE_OPTIMUM):
            missed.append(f"checkmate-rounding on {model} at {budget}")
    title = f"""checkmate-rounding relative to the optimum, at most {MOST_ABOVE_OPTIMUM}, or where
that is not known to the best bound"""
    print_table(title, f"{'rounding':>18}{'optimum':>10}{'bound':>10}{'ratio':>9}", lines)
    return missed


def print_table(title: str, heads: str, lines: list[str]) -> None:
    """Print lines that begin with model and budget, if there are any."""
    if lines:
        print(f"\n{title}\n{'model':18}{'budget':>7}{heads}", *lines, sep="\n")


def print_troubles(cells: dict[Key, Row]) -> None:
    """Print the cells that went wrong, and those that took much more than their limit."""
    lines = []
    for row in cells.values():
        late = row["seconds"] > 1.1 * row["limit"] + 1
        if late or row["outcome"] in ("broken", "died", "overran"):
            lines.append(f"{row['model']:18}{row['budget']:>7}  {row['solver']:20}{describe(row)}")
    print_table("without an answer, or late", "", lines)


# Colour and marker; what is not here gets the next of the colour cycle. The baselines are grey.
STYLES = {
    AUTO: ("black", "o"),
    "refine": ("tab:red", "o"),
    "rk-checkmate": ("navy", "D"),
    "h-ilp": ("tab:green", "P"),
    "checkmate": ("tab:blue", "s"),
    "checkmate-rounding": ("tab:cyan", "s"),
    "monet": ("teal", "h"),
    "rotor": ("tab:orange", "^"),
    "rk-rotor": ("tab:brown", "^"),
    "tw-remat": ("tab:purple", "v"),
    "h-tw-remat": ("tab:pink", "v"),
    "pw-remat": ("orchid", ">"),
    "xla-greedy": ("tab:olive", "X"),
    "gist": ("0.5", "p"),
    "last-node": ("0.2", "."),
    "griewank": ("0.3", "*"),
    "chen-sqrt": ("0.6", "<"),
    "chen-greedy": ("0.4", "<"),
    "ap-sqrt": ("0.6", "d"),
    "ap-greedy": ("0.4", "d"),
    "linearized-sqrt": ("0.6", "x"),
    "linearized-greedy": ("0.4", "x"),
}
# Drawn as outlines around what they often coincide with, these with a line or without.
OUTLINES = {AUTO: "none", "checkmate-rounding": "-"}


def plot(path: Path, models: dict[str, Row], cells: dict[Key, Row]) -> None:
    """Draw overhead against peak for every model, with the best bound at each budget."""
    import matplotlib as mpl  # noqa: PLC0415 - only for the plot

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415

    names = list(models)
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(1 + 4.6 * columns, 1.2 + 3.9 * lines), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    drawn: dict[str, Any] = {}
    for axes, name in zip(grid.flat, names, strict=False):
        rows = [row for row in cells.values() if row["model"] == name]
        shade_patch = shade(axes, rows)
        for solver in sorted({row["solver"] for row in rows}, key=rank):
            own = sorted(
                {
                    (row["peak_share"], row["overhead_percent"])
                    for row in rows
                    if row["solver"] == solver and row["outcome"] in FOUND
                }
            )
            if not own:
                continue
            colour, marker = STYLES.get(solver, (None, "h"))
            minor = colour is not None and colour.startswith("0.")
            (line,) = axes.plot(
                *zip(*own, strict=True), color=colour, marker=marker,
                linestyle=OUTLINES.get(solver, "-"), linewidth=0.7 if minor else 1.3,
                markersize=10 if solver in OUTLINES else 4.5 if minor or solver in OURS else 6.5,
                markerfacecolor="none" if solver in OUTLINES else None,
                zorder=2 if minor else 4 if solver in OURS else 3,
            )  # fmt: skip
            drawn.setdefault(solver, line)
        (whole,) = axes.plot(1, 0, "k*", markersize=9, linestyle="none", clip_on=False, zorder=5)
        axes.set_yscale("symlog", linthresh=1.0, linscale=0.4)
        axes.set(title=f"{name}, {models[name]['ops']} ops", ylim=(0, None))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(color="0.9", linewidth=0.6)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("peak, of storing everything")
    for axes in grid[:, 0]:
        axes.set_ylabel("overhead, %")
    handles = {solver: drawn[solver] for solver in sorted(drawn, key=rank)}
    handles |= {"storing everything": whole, "proved impossible in the graph's order": shade_patch}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2 * columns)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def shade(axes: Any, rows: list[Row]) -> Any:
    """Shade what is proved impossible: a bound at a budget holds for every smaller peak too."""
    peaks = [row["peak_share"] for row in rows if row["outcome"] in FOUND]
    left = min([row["budget"] for row in rows] + peaks) - 0.02
    axes.set_xlim(left, 1.02)
    bounds = {1.0: 0.0}
    for row in rows:
        if proves(row):
            bounds[row["budget"]] = max(bounds.get(row["budget"], 0.0), row["bound_percent"])
        if row["outcome"] == "infeasible":
            axes.axvspan(left, row["budget"], color="0.9", linewidth=0, zorder=0)
    at = sorted(bounds, reverse=True)
    heights = list(itertools.accumulate((bounds[x] for x in at), max))
    return axes.fill_between(
        [*at, left], [*heights, heights[-1]], step="post", color="0.9", linewidth=0, zorder=0
    )


def rank(solver: str) -> tuple[int, str]:
    """Sort solvers as in `STYLES`, others last."""
    return list(STYLES).index(solver) if solver in STYLES else len(STYLES), solver
