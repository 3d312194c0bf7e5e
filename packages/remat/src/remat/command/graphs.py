"""Commands over saved graphs: `solve` and `check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.command.main import app
from remat.command.options import check_solver, most_seconds, refuse_auto
from remat.command.terminal import (
    BudgetOption,
    JsonOption,
    LimitOption,
    SolverOption,
    check_output,
    out,
    print_json,
    print_rows,
    waiting,
)
from remat.plans.file import is_plan
from remat_graph import Graph, GraphError, Schedule, Solution, decode, save, simulate

if TYPE_CHECKING:
    from remat.plans.plan import Plan

__all__ = ["load_graph", "percent", "solution_document", "solution_rows"]

GraphFile = Annotated[
    Path, typer.Argument(readable=False, help="A graph, or a plan of it, as JSON.")
]


@app.command()
def solve(
    graph: GraphFile,
    budget: BudgetOption,
    solver: SolverOption = "auto",
    limit_seconds: LimitOption = None,
    output: Annotated[Path | None, typer.Option(help="Write the solution here, as JSON.")] = None,
    save_plan: Annotated[
        Path | None, typer.Option("--save", help="Write graph and solution here, as a plan.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find a schedule of a saved graph within a budget, and how far from the best it can be."""
    check_output(output, save_plan)
    wanted = refuse_auto(budget)
    loaded = load_graph(graph)
    from remat.planning.cutting import hierarchy_for
    from remat.plans.plan import Plan
    from remat_solvers import solve as find_schedule
    from remat_solvers import store_all

    check_solver(solver)
    everything = simulate(loaded, store_all(loaded)).peak_bytes
    size = wanted.resolve(lambda: everything)
    most = most_seconds(solver, limit_seconds)
    with waiting("solving", most, lambda time: _overhead(loaded, time)) as report:
        solution = find_schedule(
            loaded,
            size,
            solver=solver,
            hierarchy=hierarchy_for(loaded, solver),
            limit_seconds=limit_seconds,
            progress=report,
            keep_best=True,
        )
    if output is not None:
        save(solution, output)
    if save_plan is not None and solution.schedule is not None:
        Plan.of(loaded, solution.schedule, size).save(save_plan)
    if json:
        print_json(
            {"budget_bytes": size, "store_all_peak_bytes": everything}
            | solution_document(loaded, solution)
        )
        return
    print_rows(
        {
            "operations": f"{len(loaded.ops):,}",
            "budget": f"{size:,} bytes",
            "storing everything": f"{everything:,} bytes",
            **solution_rows(loaded, solution),
        }
    )
    for path in filter(None, (output, save_plan)):
        out.print(f"written to {path}", markup=False)


@app.command()
def check(
    graph: GraphFile,
    schedule: Annotated[
        Path, typer.Argument(readable=False, help="A schedule, a solution or a plan, as JSON.")
    ],
    json: JsonOption = False,
) -> None:
    """Simulate a schedule on a graph: whether it is legal, its peak and its time."""
    loaded = load_graph(graph)
    data = schedule.read_bytes()
    item = _plan(data, schedule) if is_plan(data) else decode(data, source=str(schedule))
    steps = getattr(item, "schedule", item)  # of a plan or a solution
    if not isinstance(steps, Schedule):
        raise GraphError(f"{schedule} holds no schedule")
    timeline = simulate(loaded, steps)
    if json:
        print_json(
            {
                "peak_bytes": timeline.peak_bytes,
                "peak_step": timeline.peak_step,
                "steps": len(steps),
                "time": timeline.time,
            }
        )
        return
    out.print(
        f"legal: peak {timeline.peak_bytes:,} bytes at step {timeline.peak_step} of {len(steps)}, "
        f"time {timeline.time:.6g} s, {_overhead(loaded, timeline.time)}"
    )


def load_graph(path: Path) -> Graph:
    """Read a graph, or that of a plan.

    Raises:
        GraphError: if the file holds something else.
        DocumentError: if it is damaged.
        OSError: if it cannot be read.
    """
    data = path.read_bytes()
    item = _plan(data, path).graph if is_plan(data) else decode(data, source=str(path))
    if not isinstance(item, Graph):
        raise GraphError(f"{path} holds a {type(item).__name__.lower()}; a graph is needed")
    return item


def _plan(data: bytes, path: Path) -> Plan:
    """Read a plan of one region.

    Raises:
        DocumentError: if it is damaged.
        GraphError: if it is of several regions.
    """
    from remat.plans.plan import Plan

    plan = Plan.decode(data, source=str(path))
    if not plan.is_one_region:
        raise GraphError(
            f"{path} is the plan of a step of several regions, each of a graph of its own; explain "
            f"and report show it"
        )
    return plan


def percent(graph: Graph, time: float) -> str:
    """Format the percent by which a time is above that of computing everything once."""
    return f"{100 * (time / graph.time - 1 if graph.time else 0):.2f}"


def _overhead(graph: Graph, time: float) -> str:
    return f"overhead {percent(graph, time)}%"


def solution_rows(graph: Graph, solution: Solution) -> dict[str, Any]:
    """Describe a solution in words."""
    bound = solution.lower_bound
    return {
        "peak": f"{solution.peak_bytes:,} bytes",
        "time": f"{solution.time:.6g} s, {_overhead(graph, solution.time)}",
        "no schedule is below": "unknown" if bound is None else _overhead(graph, bound),
        **({"not certified": solution.doubt} if solution.doubt else {}),
        "status": f"{solution.status.value}, by {solution.solver}",
        "solved in": f"{solution.solve_seconds:.1f} s",
        "tried": [
            f"{trial.solver}: {trial.status.value}, "
            f"{'nothing' if trial.time is None else _overhead(graph, trial.time)}, "
            f"{trial.seconds:.1f} s"
            for trial in solution.trials
        ],
    }


def solution_document(graph: Graph, solution: Solution) -> dict[str, Any]:
    """Give a solution as JSON; times in seconds, without its schedule."""
    return {
        "status": solution.status.value,
        "solver": solution.solver,
        "peak_bytes": solution.peak_bytes,
        "time": solution.time,
        "least_time": graph.time,
        "lower_bound": solution.lower_bound,
        "solve_seconds": solution.solve_seconds,
        "doubt": solution.doubt,
    }
