"""Every registered solver on nine models at five budgets: overhead, peak, bound and seconds.

The models are captured at the granularity of operators with costs estimated for one fixed device
(`graphs.DEVICE`), so that a graph is the same on every machine; nothing is run. A budget is a share
of the simulator's peak of storing everything. Overheads and bounds are in percent of the time of
one plain iteration. Solvers that need a hierarchy get the default one of `remat_partition`, made
once per model; its seconds are apart. Outcomes:

    optimal, feasible    a schedule, checked by the simulator
    infeasible, limit    `BudgetTooSmall`: with a proof, or nothing found within the limit
    unsuitable           the solver cannot take the problem; `message` says why
    overran              killed at one and a half times the limit (10 s over it, if that is later)
    broken, died         an error in place of an answer; the process ended, as for want of memory

`seconds` is the wall-clock time of `solve`, which after `infeasible` and `limit` has looked for the
smallest budget for up to 3 s as well; `solve_seconds` is the solver's own figure.

Each cell runs in a process of its own with one thread for linear algebra, and is written as soon as
it is there. A second run does what is missing: a cell holds as long as its graph, its limit and
the distribution and version of its solver are the same. Quick models come first.

The tables at the end are made of all that is in the JSON. They test three claims: `auto` and
`refine` are never worse than any other solver (by more than the 0.1 points where they stop);
`h-ilp` is within 0.6 points of `rk-checkmate` where that one finishes, that is, proves its optimum;
`checkmate-rounding` is within 1.06x of the optimum where any solver proves that. To find nothing
there is to miss the claim. Exit code 1 if one does not hold.

    python benchmarks/solvers.py [--models NAME ...] [--solvers NAME ...] [--budgets SHARE ...]
                                 [--limit SECONDS] [--jobs N] [--memory GIB] [--again]
                                 [--plot-only] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from provenance import provenance, write_results
from remat_graph import Hierarchy, encode, load, save, simulate
from remat_partition import partition
from remat_solvers import (
    BudgetTooSmall,
    Progress,
    UnsuitableSolver,
    get_solver,
    list_solvers,
    solve,
    store_all,
)
from remat_solvers.solve import AUTO
from solver_tables import (
    FOUND,
    MODELS,
    Key,
    Row,
    describe,
    in_order,
    plot,
    print_hierarchical,
    print_model,
    print_rounding,
    print_standing,
    print_troubles,
)

BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3)
RESULTS = Path(__file__).parent / "results" / "solvers.json"

START_SECONDS = 120.0
LEAST_GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Task:
    """A cell to be computed: a solver on the graph of a hierarchy that is kept in a file."""

    key: Key
    path: Path
    graph_time: float
    store_all_bytes: int
    limit: float
    memory_bytes: int

    @property
    def budget_bytes(self) -> int:
        """What the schedule may hold at most."""
        return int(self.key[1] * self.store_all_bytes)


def main() -> int:
    """Solve what is missing, print, plot; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = [AUTO, *list_solvers()]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--solvers", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, metavar="SHARE")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time")
    parser.add_argument("--memory", type=float, default=8.0, metavar="GIB", help="of each cell")
    parser.add_argument("--again", action="store_true", help="compute what is there as well")
    parser.add_argument("--plot-only", action="store_true", help="show what is there")
    parser.add_argument(
        "--json", type=Path, default=RESULTS, metavar="FILE", help="plots go beside"
    )
    options = parser.parse_args()
    models, cells = read(options.json)
    if not options.plot_only:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            fill(options, models, cells)
        except KeyboardInterrupt:
            print(f"\nstopped; what was done is in {options.json}", file=sys.stderr)
            return 130
    if not cells:
        print(f"nothing is in {options.json}")
        return 0
    models = {name: models[name] for name in in_order({key[0] for key in cells})}
    for name in models:
        print_model(name, models[name], [row for row in cells.values() if row["model"] == name])
    missed = print_standing(cells) + print_hierarchical(cells) + print_rounding(cells)
    print_troubles(cells)
    plot(options.json.with_suffix(".png"), models, cells)
    print(f"\nmissed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


def fill(options: argparse.Namespace, models: dict[str, Row], cells: dict[Key, Row]) -> None:
    """Compute the cells that are missing, or all of them, and write after each."""
    origins = {name: plugin.origin for name, plugin in list_solvers().items()}
    origins[AUTO] = f"remat-solvers {version('remat-solvers')}"
    memory_bytes = int(options.memory * 2**30)
    tasks = []
    for name in in_order(options.models):
        path, models[name] = prepare(name, models.get(name, {}))
        of_others = [
            key
            for key, row in cells.items()
            if key[0] == name and row["graph"] != models[name]["graph"]
        ]
        for key in of_others:
            del cells[key]
        if of_others:
            print(f"{name}: {len(of_others)} cells are of another graph and are left out")
        for budget, solver in itertools.product(options.budgets, options.solvers):
            key = name, budget, solver
            figures = models[name]["time_s"], models[name]["store_all_bytes"]
            task = Task(key, path, *figures, options.limit, memory_bytes)
            of = stamp(models[name], origins[solver], options.limit)
            if options.again or not of.items() <= cells.get(key, {}).items():
                tasks.append(task)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    about = provenance()
    ran = {"commit": about["commit"], "date": about["date"]}
    started = time.perf_counter()
    with contextlib.closing(run_apart(tasks, options.jobs)) as results:
        for done, (task, result) in enumerate(results, 1):
            name, budget, solver = task.key
            of = stamp(models[name], origins[solver], task.limit)
            row = {"model": name, "budget": budget, "solver": solver, **of, **result}
            cells[task.key] = {**row, "jobs": options.jobs, **ran}
            write(options.json, models, cells)
            minutes = (time.perf_counter() - started) / 60
            print(f"{done:>4}/{len(tasks)}{minutes:>7.1f} min  {name:16}{budget:<5}{solver:19}"
                  f"{describe(row)}", flush=True)  # fmt: skip


def prepare(name: str, known: Row) -> tuple[Path, Row]:
    """Capture a model, unless that is done, and cut it; the hierarchy is kept beside its graph."""
    from graphs import CACHE, DEVICE, captured  # noqa: PLC0415 - torch is not for every process

    fresh = not (CACHE / f"{name}.json").exists()
    start = time.perf_counter()
    graph = captured(name)
    capture_seconds = time.perf_counter() - start if fresh else known.get("capture_seconds")
    start = time.perf_counter()
    hierarchy = partition(graph)
    partition_seconds = time.perf_counter() - start
    path = CACHE / f"{name}.hierarchy.json"
    save(hierarchy, path)
    return path, {
        "graph": hashlib.sha256(encode(graph)).hexdigest()[:16],
        "ops": len(graph.ops),
        "forward_ops": graph.boundary_index,
        "time_s": graph.time,
        "store_all_bytes": simulate(graph, store_all(graph)).peak_bytes,
        "device": asdict(DEVICE),
        "torch": version("torch"),
        "capture_seconds": capture_seconds,
        "partition_seconds": partition_seconds,
        "blocks": sum(1 for _ in hierarchy.root.blocks()),
        "unique_blocks": len(hierarchy.unique_blocks),
    }


def stamp(model: Row, origin: str, limit: float) -> Row:
    """Say of what a cell is the result; one with another stamp is computed again."""
    return {"graph": model["graph"], "origin": origin, "limit": limit}


@dataclass(slots=True)
class Run:
    """A process at work on a task; after `deadline` it is killed."""

    task: Task
    process: BaseProcess
    started: float
    deadline: float

    def kill(self) -> None:
        """End the process and all that it started."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def run_apart(tasks: Iterable[Task], jobs: int) -> Generator[tuple[Task, Row]]:
    """Run each task in a process of its own, `jobs` at a time; yield results as they come.

    However this is left, no process stays behind.
    """
    context = multiprocessing.get_context("spawn")
    waiting, running = deque(tasks), dict[Connection, Run]()
    try:
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=attempt, args=(waiting[0], theirs))
                now = time.perf_counter()
                running[ours] = Run(waiting.popleft(), process, now, now + START_SECONDS)
                process.start()
                theirs.close()
            first = min(run.deadline for run in running.values())
            wait(list(running), timeout=max(0.0, first - time.perf_counter()))
            for pipe, run in list(running.items()):
                result = hear(pipe, run)
                if result is not None:
                    del running[pipe]
                    pipe.close()
                    run.kill()
                    yield run.task, result
    finally:
        for run in running.values():
            run.kill()


def hear(pipe: Connection, run: Run) -> Row | None:
    """Take what a process says: that it starts, its result, or nothing until it is too late."""
    now = time.perf_counter()
    if not pipe.poll():
        late = {"outcome": "overran", "seconds": now - run.started}
        return late if now > run.deadline else None
    try:
        said: Row | None = pipe.recv()
    except EOFError:
        run.process.join()
        message = f"exit code {run.process.exitcode}"
        return {"outcome": "died", "seconds": now - run.started, "message": message}
    if said is None:
        limit = run.task.limit
        run.started, run.deadline = now, now + max(1.5 * limit, limit + LEAST_GRACE_SECONDS)
    return said


def attempt(task: Task, pipe: Connection) -> None:
    """Solve one cell; send `None` when all is loaded, then the result."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (task.memory_bytes, task.memory_bytes))
    solver = task.key[2]
    hierarchy = load(task.path)
    assert isinstance(hierarchy, Hierarchy)
    result: Row
    bounds: list[float] = []

    def note(progress: Progress, /) -> None:
        if progress.lower_bound is not None:
            bounds.append(progress.lower_bound)

    start = time.perf_counter()
    try:
        cut = get_solver("refine" if solver == AUTO else solver).needs_hierarchy
        pipe.send(None)
        start = time.perf_counter()
        solution = solve(
            hierarchy.graph,
            task.budget_bytes,
            solver=solver,
            hierarchy=hierarchy if cut else None,
            limit_seconds=task.limit,
            progress=note,
        )
    except BudgetTooSmall as error:
        result = {"outcome": error.status.value, "message": str(error)}
    except UnsuitableSolver as error:
        result = {"outcome": "unsuitable", "message": error.reason}
    except Exception as error:
        result = {"outcome": "broken", "message": f"{type(error).__name__}: {error}"}
    else:
        bounds += [] if solution.lower_bound is None else [solution.lower_bound]
        result = {
            "outcome": solution.status.value,
            "overhead_percent": percent(solution.time, task),
            "peak_share": solution.peak_bytes / task.store_all_bytes,
            "solve_seconds": solution.solve_seconds,
        }
    if bounds and result["outcome"] in (*FOUND, "limit"):
        result["bound_percent"] = percent(bounds[-1], task)
    result["seconds"] = time.perf_counter() - start
    result["high_water_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send(result)


def percent(seconds: float, task: Task) -> float:
    """Give a time as the overhead over a plain iteration."""
    return 100 * (seconds / task.graph_time - 1)


def read(path: Path) -> tuple[dict[str, Row], dict[Key, Row]]:
    """Read the results of earlier runs, if there are any."""
    if not path.exists():
        return {}, {}
    content = json.loads(path.read_text(encoding="utf-8"))
    cells = {(row["model"], row["budget"], row["solver"]): row for row in content["cells"]}
    return content["models"], cells


def write(path: Path, models: dict[str, Row], cells: dict[Key, Row]) -> None:
    """Write the results; a reader sees the old file or the new."""
    order = sorted(cells, key=lambda key: (MODELS.index(key[0]), -key[1], key[2]))
    content = {
        "about": "costs estimated for `device` of each model: the same on every machine; but what "
        "is found within a limit, and seconds, depend on the machine",
        "models": {name: models[name] for name in in_order({key[0] for key in cells})},
        "cells": [cells[key] for key in order],
    }
    write_results(path, content, ("remat-solvers", "remat-partition", "highspy", "torch"))


if __name__ == "__main__":
    sys.exit(main())
