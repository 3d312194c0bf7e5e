"""Commands over models and saved graphs: `tradeoff` and `compare`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from remat.command.graphs import load_graph, percent, solution_document
from remat.command.main import INTERRUPTED, NOTHING_FITS, app, noticing_ctrl_c
from remat.command.options import (
    ModelOptions,
    ModelOrGraph,
    dry_plan,
    most_seconds,
    names_of_outputs,
    refuse_auto,
    taking,
)
from remat.command.targets import Target
from remat.command.terminal import (
    BudgetOption,
    JsonOption,
    KernelsOption,
    LeavingOption,
    NumericsOption,
    OutputsOption,
    SolverOption,
    check_output,
    out,
    print_figures,
    print_json,
    waiting,
)
from remat.errors import RematError
from remat_graph import Graph, Solution, simulate

if TYPE_CHECKING:
    from remat_solvers import Progress, Tradeoff

__all__ = ["compare", "tradeoff"]

_UNBOUNDED = 1 << 61


@app.command()
@taking(ModelOptions)
def tradeoff(
    model: ModelOrGraph,
    options: ModelOptions,
    points: Annotated[int, typer.Option(max=1000, help="How many budgets, evenly spread.")] = 8,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Instead: bytes with a unit, or a share ('50%'); may be repeated."),
    ] = None,
    solver: SolverOption = "auto",
    numerics: NumericsOption = None,
    outputs: OutputsOption = None,
    optimizer_in_backward: LeavingOption = False,
    kernels: KernelsOption = "eager",
    limit_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after this long, all budgets together; else 15 s each."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the curve here, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the curve here (.png, .svg); needs matplotlib.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find the fastest schedules for several budgets, and what no schedule can beat at each."""
    for each in budget or ():
        refuse_auto(each)
    check_output(save, plot)
    from remat_solvers import check_tradeoff

    check_tradeoff(points, budget or None, solver, limit_seconds, None, None)
    source = _source(model, options)
    from remat.planning.tradeoff_files import (
        check_picture,
        plot_tradeoff,
        save_tradeoff,
        tradeoff_document,
    )
    from remat.planning.tradeoffs import tradeoff as find_tradeoff

    if plot is not None:
        check_picture(plot)
    with waiting("making the model", None):
        source_arguments = _graph_or_call(source, options)
    most = most_seconds(solver, limit_seconds, len(budget or ()) or points)
    with waiting("looking for the smallest budget", most) as report:
        curve = find_tradeoff(
            **source_arguments,
            points=points,
            budgets=budget or None,
            solver=solver,
            numerics=numerics,
            outputs=names_of_outputs(outputs),
            optimizer_in_backward=optimizer_in_backward,
            kernels=kernels,
            limit_seconds=limit_seconds,
            progress=report,
            keep_best=True,
        )
    for path, write in ((save, save_tradeoff), (plot, plot_tradeoff)):
        if path is not None:
            write(curve, path)
    if json:
        print_json(tradeoff_document(curve))
        return
    print_figures(_curve(curve))
    for point in curve.points:
        if point.error is not None:
            said = f"failed at {point.budget_bytes:,} bytes: {point.error}"
            out.print(said, markup=False, highlight=False)
    if curve.doubt is not None:
        out.print(f"not certified: {curve.doubt}", markup=False, highlight=False)
    out.print(
        f"smallest peak found {curve.smallest_bytes:,} bytes, nothing is below "
        f"{curve.least_bytes:,}; {curve.seconds:.1f} s in all"
    )
    for path in filter(None, (save, plot)):
        out.print(f"written to {path}", markup=False)


@app.command()
@taking(ModelOptions)
def compare(
    model: ModelOrGraph,
    options: ModelOptions,
    budget: BudgetOption,
    solver: Annotated[
        list[str] | None, typer.Option(help="A name; may be repeated. All of them, else.")
    ] = None,
    limit_seconds: Annotated[float, typer.Option(min=0, help="For each solver.")] = 10.0,
    json: JsonOption = False,
) -> None:
    """Solve one graph by several solvers, side by side, the fastest schedule first."""
    wanted = refuse_auto(budget)
    source = _source(model, options)
    from remat_solvers import get_solver, list_solvers

    names = solver or list(list_solvers())
    for name in names:
        get_solver(name)
    with waiting("capturing", None):
        graph, everything, aside = _graph(source, options)
    size = wanted.resolve(lambda: everything)
    answers: dict[str, Solution | RematError] = {}
    code = NOTHING_FITS
    with waiting("comparing", limit_seconds * len(names)) as report, noticing_ctrl_c() as pressed:
        for name in names:
            with suppress(KeyboardInterrupt):  # what is there is shown; a solver may keep its best
                answers[name] = _asked(graph, size - aside, name, limit_seconds, report)
            if pressed():
                code = INTERRUPTED
                break
    _hold_together(graph, max(1, size - aside), answers)
    _print_answers(graph, size, answers, json)
    if not any(isinstance(answer, Solution) for answer in answers.values()):
        raise typer.Exit(code)


def _source(name: str, options: ModelOptions) -> Graph | Target:
    return load_graph(Path(name)) if name.endswith(".json") else options.target(name)


def _graph_or_call(source: Graph | Target, options: ModelOptions) -> dict[str, Any]:
    """Give the arguments of `remat.tradeoff` for a graph, or for a model and its call."""
    if isinstance(source, Graph):
        return {"model": source}
    costs = options.costs
    example = source.build(costs)
    return {
        "model": example.model,
        "args": example.args,
        "kwargs": example.kwargs,
        "costs": costs,
    }


def _graph(source: Graph | Target, options: ModelOptions) -> tuple[Graph, int, int]:
    """Give a graph, the peak of storing everything, and what of it is set aside for a loss."""
    if isinstance(source, Graph):
        from remat_solvers import store_all

        return source, simulate(source, store_all(source)).peak_bytes, 0
    from remat.planning.planner import scalar_bytes

    costs = options.costs
    plan = dry_plan(source.build(costs), costs, _UNBOUNDED, "store-all", None, None)
    device = "cpu" if plan.origin.device == "cpu" else "cuda"
    aside = scalar_bytes(device)
    return plan.graph, plan.solution.peak_bytes + aside, aside


def _asked(
    graph: Graph, size: int, solver: str, limit_seconds: float, report: Callable[[Progress], None]
) -> Solution | RematError:
    """Ask one solver; give its answer, or why there is none."""
    from remat.planning.cutting import hierarchy_for
    from remat_solvers import solve as find_schedule

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
        return error


def _hold_together(graph: Graph, size: int, answers: dict[str, Solution | RematError]) -> None:
    """Hold what each solver claims against what the others found, and tell of it as its answer."""
    from remat_solvers import BudgetTooSmall, SolverError, resolve_solver
    from remat_solvers.toolkit import Wiring
    from remat_solvers.verdicts import (
        Verdicts,
        claim_of,
        doubt_or_raise,
        minimal_peak_claim,
        uncertified,
        unproved,
    )

    wiring = Wiring.of(graph)
    verdicts, names = Verdicts(wiring), {}
    for name, answer in answers.items():
        if isinstance(answer, Solution) and answer.schedule is not None:
            verdicts.show(name, answer.schedule, answer.time, answer.peak_bytes)
            claim = claim_of(resolve_solver(name), size, answer)
        elif isinstance(answer, BudgetTooSmall):
            claim = minimal_peak_claim(answer.least_bytes, resolve_solver(name))
        else:
            continue
        verdicts.claim(claim)
        names[id(claim)] = name, answer
    for claim, cause in verdicts.refuted():
        name, answer = names[id(claim)]
        try:
            doubt = doubt_or_raise(claim, cause)
            answers[name] = (
                uncertified(answer, doubt) if isinstance(answer, Solution)
                else unproved(answer, wiring)
            )  # fmt: skip
        except SolverError as error:
            answers[name] = error


def _print_answers(
    graph: Graph, size: int, answers: dict[str, Solution | RematError], json: bool
) -> None:
    solutions = {name: a for name, a in answers.items() if isinstance(a, Solution)}
    order = sorted(solutions, key=lambda name: solutions[name].time)
    refusals = {name: a for name, a in answers.items() if isinstance(a, RematError)}
    if json:
        rows = [{**solution_document(graph, solutions[name]), "solver": name} for name in order]
        rows += [{"error": str(e).split(";")[0], "solver": name} for name, e in refusals.items()]
        print_json({"budget_bytes": size, "answers": rows})
        return
    if solutions:
        table = Table("solver", box=SIMPLE_HEAD, pad_edge=False)
        for head in ("overhead %", "at least %", "status", "seconds"):
            table.add_column(head, justify="left" if head == "status" else "right")
        for name in order:
            answer = solutions[name]
            bound = "-" if answer.lower_bound is None else percent(graph, answer.lower_bound)
            seconds = f"{answer.solve_seconds:.1f}"
            table.add_row(name, percent(graph, answer.time), bound, answer.status.value, seconds)
        print_figures(table)
    reasons: dict[str, list[str]] = {}
    for name, error in refusals.items():
        reasons.setdefault(_reason(error), []).append(name)
    for reason, names in reasons.items():
        out.print(f"{', '.join(names)}: {reason}", markup=False, highlight=False)


def _reason(error: RematError) -> str:
    """Say without its name why a solver has no answer."""
    from remat_solvers import BudgetTooSmall, UnsuitableSolver

    if isinstance(error, BudgetTooSmall):
        return "nothing found within the budget"
    return error.reason if isinstance(error, UnsuitableSolver) else str(error).split(";")[0]


def _curve(curve: Tradeoff) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("budget", "share", "overhead %", "at least %", "gap %", "status", "seconds"):
        table.add_column(name, justify="left" if name == "status" else "right")

    def percent(time: float | None) -> str:
        return "-" if time is None else f"{100 * curve.overhead(time):.2f}"

    for point in curve.points:
        solution = point.solution
        gap = None if solution is None else solution.gap
        table.add_row(
            f"{point.budget_bytes:,}",
            f"{point.budget_bytes / max(1, curve.store_all_peak_bytes):.3f}",
            percent(None if solution is None else solution.time),
            percent(point.lower_bound),
            "-" if gap is None else f"{100 * gap:.2f}",
            point.status.value,
            f"{point.seconds:.1f}",
        )
    return table
