"""Commands over models and saved graphs: `tradeoff` and `compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from remat.budget import parse_budget
from remat.command.graphs import load_graph, overhead, solution_document
from remat.command.main import NOTHING_FITS, app
from remat.command.options import (
    Batch,
    Device,
    Measure,
    ModelOrGraph,
    Seq,
    Sets,
    Type,
    check_budget,
    dry_plan,
    read_target,
)
from remat.command.targets import Target, costs_of
from remat.command.terminal import (
    BudgetOption,
    JsonOption,
    SolverOption,
    check_output,
    out,
    print_json,
    waiting,
)
from remat.cutting import hierarchy_for
from remat.errors import RematError
from remat.planning import SCALAR_BYTES
from remat.tradeoff import (
    check_picture,
    plot_tradeoff,
    read_budgets,
    save_tradeoff,
    tradeoff_document,
)
from remat.tradeoff import tradeoff as find_tradeoff
from remat_graph import Graph, Solution, simulate
from remat_graph.torch import Costs
from remat_solvers import Progress, Tradeoff, get_solver, list_solvers
from remat_solvers import solve as find_schedule
from remat_solvers.baselines.store_all import store_all
from remat_solvers.queries.tradeoff import check_arguments

__all__ = ["compare", "tradeoff"]

_UNBOUNDED = 1 << 61


@app.command()
def tradeoff(
    model: ModelOrGraph,
    points: Annotated[int, typer.Option(help="How many budgets, evenly spread.")] = 8,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Instead: bytes with a unit, or a share ('50%'); may be repeated."),
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    set_: Sets = None,
    dtype: Type = "float32",
    device: Device = None,
    measure: Measure = False,
    solver: SolverOption = "auto",
    limit_seconds: Annotated[
        float | None,
        typer.Option(help="Stop after this long, all budgets together; else 15 s each."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the curve here, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the curve here (.png, .svg); needs remat[plot].")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find the fastest schedules for several budgets, and what no schedule can beat at each."""
    check_arguments(points, budget or None, solver, limit_seconds, None, None)
    read_budgets(budget or None)
    check_output(save)
    if plot is not None:
        check_picture(plot)
    target = read_target(model, batch, seq, set_, dtype)
    with waiting("making the model", None):
        given = _graph_or_call(target, device, measure)
    with waiting("looking for the smallest budget", limit_seconds) as report:
        curve = find_tradeoff(
            **given,
            points=points,
            budgets=budget or None,
            solver=solver,
            limit_seconds=limit_seconds,
            progress=report,
        )
    for path, write in ((save, save_tradeoff), (plot, plot_tradeoff)):
        if path is not None:
            write(curve, path)
    if json:
        print_json(tradeoff_document(curve))
        return
    out.print(_curve(curve))
    out.print(
        f"smallest peak found {curve.smallest_bytes:,} bytes, nothing is below "
        f"{curve.least_bytes:,}; {curve.seconds:.1f} s in all"
    )
    for path in filter(None, (save, plot)):
        out.print(f"written to {path}", markup=False)


@app.command()
def compare(
    model: ModelOrGraph,
    budget: BudgetOption,
    solver: Annotated[
        list[str] | None, typer.Option(help="A name; may be repeated. All of them, else.")
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    set_: Sets = None,
    dtype: Type = "float32",
    device: Device = None,
    measure: Measure = False,
    limit_seconds: Annotated[float, typer.Option(help="For each solver.")] = 10.0,
    json: JsonOption = False,
) -> None:
    """Solve one graph by several solvers, side by side, the fastest schedule first."""
    names = solver or list(list_solvers())
    for name in names:
        get_solver(name)
    costs = costs_of(device, measure)
    check_budget(budget, costs)
    target = read_target(model, batch, seq, set_, dtype)
    with waiting("capturing", None):
        graph, everything, aside = _graph(target, costs)
    size = parse_budget(budget).resolve(lambda: everything)
    answers: dict[str, Solution | str] = {}
    with waiting("comparing", limit_seconds * len(names)) as report:
        for name in names:
            try:
                answers[name] = _asked(graph, size - aside, name, limit_seconds, report)
            except KeyboardInterrupt:
                break
    _print_answers(graph, size, answers, json)
    if not any(isinstance(answer, Solution) for answer in answers.values()):
        raise typer.Exit(NOTHING_FITS)


def _graph_or_call(target: Target, device: str | None, measure: bool) -> dict[str, Any]:
    """Give what `remat.tradeoff` is told of a graph, or of a model and its call."""
    costs = costs_of(device, measure)
    if _is_graph(target.name):
        return {"model": load_graph(Path(target.name))}
    example = target.build(costs)
    return {
        "model": example.model,
        "args": example.args,
        "kwargs": example.kwargs,
        "costs": costs,
    }


def _is_graph(name: str) -> bool:
    return name.endswith(".json")


def _graph(target: Target, costs: Costs) -> tuple[Graph, int, int]:
    """Give a graph, the peak of storing everything, and what of it is set aside for a loss."""
    if _is_graph(target.name):
        graph = load_graph(Path(target.name))
        return graph, simulate(graph, store_all(graph)).peak_bytes, 0
    made = dry_plan(target, costs, _UNBOUNDED, "store-all", None, None)
    device = "cpu" if made.origin.device == "cpu" else "cuda"
    aside = SCALAR_BYTES[device]
    return made.graph, made.solution.peak_bytes + aside, aside


def _asked(
    graph: Graph, size: int, solver: str, limit_seconds: float, report: Callable[[Progress], None]
) -> Solution | str:
    """Ask one solver; give its answer, or why there is none."""
    try:
        return find_schedule(
            graph,
            max(1, size),
            solver=solver,
            hierarchy=hierarchy_for(graph, solver),
            limit_seconds=limit_seconds,
            progress=report,
            keep_best=True,
        )
    except RematError as error:
        return str(error).split(";")[0]


def _print_answers(graph: Graph, size: int, answers: dict[str, Solution | str], json: bool) -> None:
    found = {name: a for name, a in answers.items() if isinstance(a, Solution)}
    order = sorted(found, key=lambda name: found[name].time)
    order += [name for name in answers if name not in found]
    if json:
        rows = []
        for name in order:
            answer = answers[name]
            told = (
                {"error": answer} if isinstance(answer, str) else solution_document(graph, answer)
            )
            rows.append({**told, "solver": name})
        print_json({"budget_bytes": size, "answers": rows})
        return
    table = Table("solver", "overhead", "no schedule is below", "status", "seconds")
    for name in order:
        answer = answers[name]
        if isinstance(answer, str):
            table.add_row(name, "-", "-", answer, "-")
            continue
        bound = "-" if answer.lower_bound is None else overhead(graph, answer.lower_bound)
        seconds = f"{answer.solve_seconds:.1f}"
        table.add_row(name, overhead(graph, answer.time), bound, answer.status.value, seconds)
    out.print(table)


def _curve(curve: Tradeoff) -> Table:
    table = Table()
    for name in ("budget", "share", "overhead %", "at least %", "gap %", "status", "seconds"):
        table.add_column(name, justify="left" if name == "status" else "right")

    def percent(time: float | None) -> str:
        return "-" if time is None else f"{100 * curve.overhead(time):.2f}"

    for point in curve.points:
        found = point.solution
        gap = None if found is None else found.gap
        table.add_row(
            f"{point.budget_bytes:,}",
            f"{point.budget_bytes / max(1, curve.store_all_peak_bytes):.3f}",
            percent(None if found is None else found.time),
            percent(point.lower_bound),
            "-" if gap is None else f"{100 * gap:.2f}",
            point.status.value,
            f"{point.seconds:.1f}",
        )
    return table
