"""The `remat` command: plans for graphs saved as JSON, without a model at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from remat.__about__ import __version__
from remat.budget import parse_budget
from remat.cutting import hierarchy_for
from remat.errors import BudgetError, RematError
from remat.tradeoff import check_picture, plot_tradeoff, read_budgets, save_tradeoff
from remat.tradeoff import tradeoff as find_tradeoff
from remat_graph import Graph, GraphError, Schedule, Solution, load, save, simulate
from remat_solvers import Progress, Tradeoff, list_solvers, solve
from remat_solvers.queries.tradeoff import check_arguments

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Plan the re-materialization of training graphs saved with remat_graph.save().",
)
_out = Console()
_err = Console(stderr=True)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        _out.print(f"remat {__version__}")
        raise typer.Exit


@app.command()
def solvers() -> None:
    """List the installed solvers and the distributions they come from."""
    table = Table("solver", "distribution")
    for name, info in list_solvers().items():
        table.add_row(name, str(info.distribution))
    _out.print(table)


@app.command()
def plan(
    graph: Annotated[Path, typer.Argument(help="A graph, as JSON.")],
    budget: Annotated[
        str,
        typer.Option(help="Bytes with a unit ('8GiB'), or a share of store-all's peak ('50%')."),
    ],
    solver: Annotated[str, typer.Option(help="A name from `remat solvers`.")] = "auto",
    limit_seconds: Annotated[
        float | None, typer.Option(help="Stop the solver after this long.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the solution here, as JSON.")] = None,
) -> None:
    """Find a schedule within a budget, and say how far from the best it can be."""
    loaded = _load_graph(graph)
    wanted = parse_budget(budget)
    if output is not None:
        _check_output(output)
    if wanted.size_bytes is None and wanted.fraction is None:
        raise BudgetError("budget='auto' needs a device; give bytes or a share")
    everything = _store_all_peak(loaded)
    size = wanted.size_bytes or max(1, int((wanted.fraction or 0) * everything))
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=_err, transient=True) as bar:
        task = bar.add_task("planning")

        def report(progress: Progress) -> None:
            best = progress.incumbent_time
            found = "nothing yet" if best is None else f"{_overhead(loaded, best)}"
            bar.update(task, description=f"planning: {found}; {progress.message}")

        solution = solve(
            loaded,
            size,
            solver=solver,
            hierarchy=hierarchy_for(loaded, solver),
            limit_seconds=limit_seconds,
            progress=report,
        )
    _out.print(_summary(loaded, solution, size, everything))
    if output is not None:
        save(solution, output)
        _out.print(f"written to {output}")


@app.command()
def tradeoff(
    graph: Annotated[Path, typer.Argument(help="A graph, as JSON.")],
    points: Annotated[int, typer.Option(help="How many budgets, evenly spread.")] = 8,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Instead: bytes with a unit, or a share ('50%'); may be repeated."),
    ] = None,
    solver: Annotated[str, typer.Option(help="A name from `remat solvers`.")] = "auto",
    limit_seconds: Annotated[
        float | None,
        typer.Option(help="Stop after this long, all budgets together; else 15 s each."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the curve here, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the curve here (.png, .svg); needs remat[plot].")
    ] = None,
) -> None:
    """Find the fastest schedules for several budgets, and what no schedule can beat at each."""
    check_arguments(points, budget or None, solver, limit_seconds, None, None)
    read_budgets(budget or None)
    if json is not None:
        _check_output(json)
    if plot is not None:
        check_picture(plot)
    loaded = _load_graph(graph)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=_err, transient=True) as bar:
        task = bar.add_task("looking for the smallest budget")

        def report(progress: Progress) -> None:
            bar.update(task, description=progress.message)

        curve = find_tradeoff(
            loaded,
            points=points,
            budgets=budget or None,
            solver=solver,
            limit_seconds=limit_seconds,
            progress=report,
        )
    _out.print(_curve(curve))
    _out.print(
        f"smallest peak found {curve.smallest_bytes:,} bytes, nothing is below "
        f"{curve.least_bytes:,}; {curve.seconds:.1f} s in all"
    )
    for path, write in ((json, save_tradeoff), (plot, plot_tradeoff)):
        if path is not None:
            write(curve, path)
            _out.print(f"written to {path}", markup=False)


@app.command()
def check(
    graph: Annotated[Path, typer.Argument(help="A graph, as JSON.")],
    schedule: Annotated[Path, typer.Argument(help="A schedule or a solution, as JSON.")],
) -> None:
    """Simulate a schedule on a graph: whether it is legal, its peak and its time."""
    loaded = _load_graph(graph)
    document = load(schedule)
    found = document.schedule if isinstance(document, Solution) else document
    if not isinstance(found, Schedule):
        raise GraphError(f"{schedule} holds no schedule")
    timeline = simulate(loaded, found)
    _out.print(
        f"legal: peak {timeline.peak_bytes:,} bytes at step {timeline.peak_step} of {len(found)}, "
        f"time {timeline.time:.6g} s, {_overhead(loaded, timeline.time)}"
    )


def _load_graph(path: Path) -> Graph:
    found = load(path)
    if not isinstance(found, Graph):
        raise GraphError(f"{path} holds a {type(found).__name__.lower()}; a graph is needed")
    return found


def _check_output(path: Path) -> None:
    """Refuse, before any work, what could not be written."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(path)!r} does not exist")
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; name a file")


def _store_all_peak(graph: Graph) -> int:
    most = sum(v.size_bytes for v in graph.values)
    most += max((op.workspace_bytes for op in graph.ops), default=0)
    return solve(graph, max(1, most), solver="store-all").peak_bytes


def _overhead(graph: Graph, time: float) -> str:
    return f"overhead {100 * (time / graph.time - 1 if graph.time else 0):.2f}%"


def _summary(graph: Graph, solution: Solution, budget: int, everything: int) -> Table:
    table = Table(show_header=False)
    table.add_row("operations", f"{len(graph.ops):,}")
    table.add_row("budget", f"{budget:,} bytes")
    table.add_row("peak", f"{solution.peak_bytes:,} bytes of {everything:,} storing everything")
    table.add_row("time", f"{solution.time:.6g} s, {_overhead(graph, solution.time)}")
    bound = solution.lower_bound
    table.add_row("no plan is below", "unknown" if bound is None else _overhead(graph, bound))
    table.add_row("status", f"{solution.status.value}, by {solution.solver}")
    table.add_row("solved in", f"{solution.solve_seconds:.1f} s")
    for trial in solution.trials:
        gave = "nothing" if trial.time is None else _overhead(graph, trial.time)
        text = f"{trial.solver}: {trial.status.value}, {gave}, {trial.seconds:.1f} s"
        table.add_row("tried", text)
    return table


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


def main() -> None:
    """Run the command; errors are one line on stderr and exit code 1."""
    try:
        app()
    except (RematError, OSError) as error:
        _err.print(f"remat: {error}", style="red", highlight=False, markup=False)
        raise SystemExit(1) from None
