"""Commands that tell what a plan does: `explain` and `report`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from remat.command.main import app
from remat.command.options import Budget, PlanOptions, most_seconds, taking
from remat.command.terminal import (
    JsonOption,
    check_output,
    out,
    print_json,
    print_rows,
    waiting,
)
from remat.errors import RematError
from remat.report.words import mib
from remat_graph import printable

if TYPE_CHECKING:
    from remat.report.explanation import Explanation, Part
    from remat.report.readable_plan import ReadablePlan

__all__ = ["explain", "report", "trace"]

_SPACE, _INDENT = 2, 4  # before a figure, and before why

ModelOrPlan = Annotated[
    str, typer.Argument(help="FILE.py:factory, a model type of transformers, or a PLAN.json.")
]


class _By(enum.StrEnum):
    LINE = "line"
    MODULE = "module"


class _Sort(enum.StrEnum):
    ORDER = "order"
    BYTES = "bytes"
    KEPT = "kept"
    RECOMPUTED = "recomputed"
    TIME = "time"
    PEAK = "peak"


_KEYS: dict[_Sort, Callable[[Part], float]] = {
    _Sort.ORDER: lambda part: 0,
    _Sort.BYTES: lambda part: -(part.kept_bytes + part.recomputed_bytes),
    _Sort.KEPT: lambda part: -part.kept_bytes,
    _Sort.RECOMPUTED: lambda part: -part.recomputed_bytes,
    _Sort.TIME: lambda part: -part.recompute_time,
    _Sort.PEAK: lambda part: -part.peak_bytes,
}


@app.command()
@taking(PlanOptions)
def explain(
    model: ModelOrPlan,
    options: PlanOptions,
    budget: Budget = None,
    by: Annotated[_By, typer.Option(help="Rows for source lines, or for modules.")] = _By.MODULE,
    depth: Annotated[
        int | None, typer.Option(min=0, help="Put together what is below so many components.")
    ] = None,
    sort: Annotated[_Sort, typer.Option(help="The largest first; or in order.")] = _Sort.BYTES,
    rows: Annotated[int, typer.Option(min=0, help="Show so many; 0 for all.")] = 30,
    json: JsonOption = False,
) -> None:
    """Explain what a plan keeps or makes again of each part of a model, and why."""
    plan, _ = _plan_of(model, budget, options)
    step = plan.explain(by=by.value, depth=depth)
    ordered = [
        (each, sorted(filter(_counts, each.parts), key=_KEYS[sort]))
        for each in step.regions or (step,)
    ]
    if json:
        documents = [_document(each, parts[: rows or None]) for each, parts in ordered]
        print_json(
            {
                "budget_bytes": plan.budget_bytes,
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "store_all_peak_bytes": plan.store_all_peak_bytes,
                **({"regions": documents} if step.regions else documents[0]),
            }
        )
        return
    print_rows(
        {
            "budget": mib(plan.budget_bytes),
            "peak, predicted": mib(plan.predicted_peak_bytes),
            "storing everything": mib(plan.store_all_peak_bytes),
            "computed again": f"{plan.recomputations:,} runs, "
            f"overhead {100 * plan.predicted_overhead:.2f}%",
        }
    )
    for each, parts in ordered:
        kept, again = sum(p.kept_bytes for p in parts), sum(p.recomputed_bytes for p in parts)
        print_rows(
            {
                **({"region": printable(each.name)} if each.name else {}),
                "most is held at": printable(str(each.peak or "-")),
                "kept for the backward": mib(kept),
                "made again": mib(again),
            }
        )
        shown = parts[: rows or None]
        for line in _lines(shown, out.width):
            out.print(line)
        if len(shown) < len(parts):
            out.print(f"{len(parts) - len(shown):,} more parts; --rows 0 shows all")


def _document(region: Explanation, parts: Sequence[Part]) -> dict[str, Any]:
    peak = None if region.peak is None else asdict(region.peak)
    document = {"peak": peak, "parts": [asdict(part) for part in parts]}
    return {"name": region.name, **document} if region.name else document


@app.command()
@taking(PlanOptions)
def report(
    model: ModelOrPlan,
    options: PlanOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the page here.")] = Path(
        "report.html"
    ),
    budget: Budget = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Solve for eight budgets, and draw the curve.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write a plan as one page, to be read in a browser without a network."""
    check_output(output)
    from remat.report.page import check_plotly
    from remat_solvers import tradeoff

    check_plotly()
    plan, title = _plan_of(model, budget, options)
    seconds = options.limit_seconds
    if curve and plan.is_one_region:
        with waiting("solving for the curve", most_seconds("auto", seconds, points=8)) as progress:
            drawn = tradeoff(plan.graph, limit_seconds=seconds, progress=progress, keep_best=True)
        plan.report(output, title=title, curve=drawn)
    else:
        with waiting("choosing for the curve" if curve else "drawing", seconds):
            plan.report(output, title=title, curve=curve, limit_seconds=seconds)
    _print_written(output, json)


@app.command()
@taking(PlanOptions)
def trace(
    model: ModelOrPlan,
    options: PlanOptions,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="A .json for Perfetto, or a .pickle for pytorch.org/memory_viz."
        ),
    ] = Path("trace.json"),
    budget: Budget = None,
    json: JsonOption = False,
) -> None:
    """Write what a plan runs and holds, for a viewer of traces or of memory."""
    check_output(output)
    from remat.report.traces import check_ending

    check_ending(output)
    plan, _ = _plan_of(model, budget, options)
    plan.save_trace(output)
    _print_written(output, json)


def _print_written(output: Path, json: bool) -> None:
    if json:
        print_json({"written": str(output)})
    else:
        out.print(f"written to {output}", markup=False, soft_wrap=True)


def _plan_of(model: str, budget: str | None, options: PlanOptions) -> tuple[ReadablePlan, str]:
    """Read a plan from its file, or make one; also say what it is for.

    Raises:
        RematError: if there is no budget for a model, or one for a plan, which has its own.
    """
    if model.endswith(".json"):
        if budget is not None:
            raise RematError(f"{model} is a plan and has its budget; leave out --budget")
        from remat.report.readable_plan import ReadablePlan

        return ReadablePlan.load(model), model
    return options.plan(model, budget)


def _lines(parts: Sequence[Part], width: int) -> Iterator[Text]:
    """Lay out the parts: figures in columns, and why on lines of its own below each.

    Columns in which nothing stands are left out. Where a name is too wide for what the figures
    leave of a line, they stand on the next.
    """
    cells: dict[tuple[str, str], list[str]] = {
        ("kept", "MiB"): [_figure(part.kept_bytes / 2**20) for part in parts],
        ("packed", "MiB"): [_figure(part.packed_bytes / 2**20) for part in parts],
        ("again", "MiB"): [_figure(part.recomputed_bytes / 2**20) for part in parts],
        ("runs", ""): [str(part.most_runs) if part.most_runs > 1 else "" for part in parts],
        ("again", "ms"): [_figure(1000 * part.recompute_time) for part in parts],
        ("other", "ways"): [str(part.other_ways or "") for part in parts],
        ("at peak", "MiB"): [_figure(part.peak_bytes / 2**20) for part in parts],
    }
    shown = {head: texts for head, texts in cells.items() if any(texts)}
    wide = {head: max(map(len, (*head, *texts))) for head, texts in shown.items()}
    places = [" ".join(map(printable, filter(None, (p.label, p.source)))) for p in parts]
    room = max(8, width - sum(wide.values()) - _SPACE * len(wide))
    name = min(room, max(map(len, (*places, "part"))))

    def line(place: str, texts: Iterable[str]) -> str:
        figures = (text.rjust(w + _SPACE) for text, w in zip(texts, wide.values(), strict=True))
        return place.ljust(name) + "".join(figures)

    for place, words in (
        ("part", (first for first, _ in shown)),
        ("", (unit for _, unit in shown)),
    ):
        yield Text(line(place, words).rstrip(), style="bold")
    for at, (part, place) in enumerate(zip(parts, places, strict=True)):
        is_wide = len(place) > name
        if is_wide:
            yield Text(place, overflow="fold")
        figures = (texts[at] for texts in shown.values())
        yield Text(line("" if is_wide else place, figures).rstrip())
        for reason in wrap(printable(part.why), max(20, width - _INDENT)):
            yield Text(" " * _INDENT + reason, style="dim")


def _counts(part: Part) -> bool:
    """Whether anything of a part is held or made again."""
    held = part.kept_bytes or part.recomputed_bytes or part.peak_bytes
    return bool(held or part.recomputations or part.other_ways)


def _figure(number: float) -> str:
    return f"{number:,.2f}" if number else ""
