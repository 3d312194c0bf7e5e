"""Checkpointing alone, operators first, and both at once, on the networks of MONeT's paper.

Each cell plans one network within one budget, in a process of its own: by `refine` without
alternatives (checkpointing alone); by `refine` after the makers of least memory were fixed
(operators first); by `monet` over all alternatives that give the same bits; by `refine` over them
(ours); by `gist` with copies in 16 bits, whatever it takes. Printed: overhead over storing
everything without alternatives in percent, seconds of solving, and what is proved.

- `paper`: at the paper's batches and images, on fake tensors, for a `DeviceSpec` of its P100. The
  budgets are the paper's, in GB of 10^9, less the parameters, which ours do not count; published
  overheads are measured ones, over PyTorch, with cuDNN's algorithms to choose from.
- `here`: smaller, costs measured on this CPU; budgets are shares of storing everything.

Bars: ours nowhere above `monet`, in less time (the whole solve, and until ours has a plan that is
no higher than what `monet` ends with); nowhere above checkpointing alone, and below it where there
is something to choose; at the paper's sizes nowhere above the published overhead. They are printed
as they come out; exit code 1 if ours is above `monet` or above checkpointing alone.

    python benchmarks/monet.py [--tables paper here] [--models NAME ...] [--methods NAME ...]
        [--seconds S] [--json FILE] [--quick]

Cells that the file has are kept, and cells run again replace them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from isolation import Ended, run_alone
from provenance import write_results
from remat_graph import Graph, Numerics, Solution, simulate
from remat_graph.torch import Capture, DeviceSpec, capture
from remat_solvers import BudgetTooSmall, Progress, SolverError, solve, store_all
from remat_solvers.core.alternatives import Alternatives
from remat_solvers.core.wiring import Wiring
from remat_solvers.search.selection import arrange, first_choices
from remat_solvers.search.unfolding import Unfolded, unfold
from zoo import Example, googlenet, gpt2, mobilenet, resnet, unet, vgg

RESULTS = Path(__file__).parent / "results" / "monet.json"
P100 = DeviceSpec("P100", 9.3e12, 18.7e12, 732e9, 5e-6)
GB = 10**9
METHODS = ("checkpointing", "operators-first", "monet", "ours", "gist")
NOISE = 1e-4  # of the time of a step, within which two plans are level
RESNET_50 = (3, 4, 6, 3)

Make = Callable[[], Example]


@dataclass(frozen=True, slots=True)
class Network:
    """Builds a network at the paper's size, here, and tiny; the paper's budgets and overheads.

    Ours, GPT-2, is not in the paper: its budgets are shares of storing everything there, too.
    """

    paper: Make
    here: Make
    quick: Make
    published: tuple[tuple[float, float], ...] | None  # GB, overhead in percent


NETWORKS = {
    "resnet-50": Network(
        lambda: resnet.make("resnet-50", (RESNET_50, 64, 184, 224)),
        lambda: resnet.make("resnet-50", (RESNET_50, 24, 12, 128)),
        lambda: resnet.make("resnet-50", ((1, 2), 4, 2, 16)),
        ((10.0, 3.2), (5.0, 12.0)),
    ),
    "googlenet": Network(
        lambda: googlenet.make("googlenet", (64, 320, 224)),
        lambda: googlenet.make("googlenet", (16, 16, 96)),
        lambda: googlenet.make("googlenet", (4, 2, 32)),
        ((10.0, 7.1), (5.0, 15.8)),
    ),
    "unet": Network(
        lambda: unet.make("unet", (4, 64, 11, (416, 608))),
        lambda: unet.make("unet", (4, 16, 6, 128)),
        lambda: unet.make("unet", (2, 4, 2, 16)),
        ((10.0, -4.1), (5.0, 11.5)),
    ),
    "vgg-16": Network(
        lambda: vgg.make("vgg-16", (64, (4096, 4096), 176, 224)),
        lambda: vgg.make("vgg-16", (16, (64,), 8, 64)),
        lambda: vgg.make("vgg-16", (4, (16,), 2, 32)),
        ((9.7, -5.3), (5.5, 9.1)),
    ),
    "mobilenet-v2": Network(
        lambda: mobilenet.make("mobilenet-v2", (32, 256, 224)),
        lambda: mobilenet.make("mobilenet-v2", (16, 8, 96)),
        lambda: mobilenet.make("mobilenet-v2", (4, 2, 32)),
        ((10.0, 2.4), (5.0, 8.7)),
    ),
    "gpt-2": Network(
        lambda: gpt2.make("gpt-2", (6, 768, 12, 16384, 4, 1024)),
        lambda: gpt2.make("gpt-2", (6, 128, 4, 2000, 4, 128)),
        lambda: gpt2.make("gpt-2", (2, 16, 2, 32, 2, 8)),
        None,
    ),
}
SHARES = (0.7, 0.4)


@dataclass(frozen=True, slots=True)
class Found:
    """What one method gave; overheads relative to storing everything without alternatives.

    `course` are its gains, as they were reported: after how many seconds, which overhead.
    """

    overhead: float | None
    bound: float | None
    peak_bytes: int | None
    seconds: float
    said: str
    course: list[tuple[float, float]]


def main() -> int:
    """Plan, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", choices=("paper", "here"), default=("paper", "here"))
    parser.add_argument("--models", nargs="+", choices=NETWORKS, default=tuple(NETWORKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each solve")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, one budget; nothing is kept"
    )
    given = parser.parse_args()
    rows = {} if given.quick else read(given.json)
    seconds = min(given.seconds, 1.0) if given.quick else given.seconds
    failed = []
    for table in given.tables:
        print_head(table)
        for name in given.models:
            for budget in range(1 if given.quick else len(SHARES)):
                size = "quick" if given.quick else table
                try:
                    row = run_alone(
                        measure, name, table, size, budget, tuple(given.methods), seconds,
                        timeout_seconds=300 + 2 * seconds * len(given.methods),
                    )  # fmt: skip
                except Ended as error:
                    failed.append(f"{table} {name}: {error}")
                    print(failed[-1], flush=True)
                    continue
                key = (table, name, budget)
                row["methods"] = rows.get(key, row)["methods"] | row["methods"]
                rows[key] = row
                print_row(row)
                if not given.quick:
                    write(given.json, rows)
    missed = print_bars(list(rows.values()))
    return int(bool(missed or failed))


def read(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Read the cells that are there."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {(row["table"], row["model"], row["number"]): row for row in rows}


def write(path: Path, rows: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    """Write all cells, those of earlier runs among them; the machine is that of the last run."""
    found = {"device": asdict(P100), "rows": list(rows.values())}
    write_results(path, found, ("remat-graph", "remat-solvers", "torch"))


def measure(
    name: str, table: str, size: str, number: int, methods: tuple[str, ...], seconds: float
) -> dict[str, Any]:
    """Plan one network within one budget by all methods."""
    torch.set_num_threads(2)
    network = NETWORKS[name]
    fake = table == "paper"
    mode: AbstractContextManager[Any] = FakeTensorMode() if fake else nullcontext()
    torch.manual_seed(0)
    with mode:
        example: Example = getattr(network, size)()
    example.model.train()
    captured = capture(
        example.model, example.args, dict(example.kwargs), costs=P100 if fake else "measure"
    )
    plain = simulate(captured.graph, store_all(captured.graph))
    budget, published = int(SHARES[number] * plain.peak_bytes), None
    if size == "paper" and network.published is not None:
        gigabytes, published = network.published[number]
        held = sum(p.numel() * p.element_size() for p in example.model.parameters())
        budget = int(gigabytes * GB) - held
    exact = captured.with_alternatives(Numerics.BITWISE).graph
    found = {
        method: asdict(plan(method, captured, exact, budget, plain.time, seconds))
        for method in methods
    }
    return {
        "table": table,
        "model": name,
        "number": number,
        "ops": len(captured.graph.ops),
        "ops_with_alternatives": len(exact.ops),
        "plain_bytes": plain.peak_bytes,
        "plain_seconds": plain.time,
        "budget_bytes": budget,
        "limit_seconds": seconds,
        "published_overhead": published,
        "methods": found,
    }


def plan(
    method: str, captured: Capture, exact: Graph, budget: int, plain: float, seconds: float
) -> Found:
    """Plan by one method; a plan of other makers is translated back and checked."""
    told: list[tuple[float, Progress]] = []
    solver = {"monet": "monet", "gist": "gist"}.get(method, "refine")
    graph, operators = exact, None
    if method == "checkpointing":
        graph = captured.graph
    elif method == "operators-first":
        operators = least_operators(exact)
        graph = operators.wiring.graph
    elif method == "gist":
        graph = captured.with_alternatives(Numerics.LOSSY).graph
        budget = sum(value.size_bytes for value in graph.values) * 2
    started = time.perf_counter()
    try:
        solution: Solution = solve(
            graph, budget, solver=solver, limit_seconds=seconds,
            progress=lambda said: told.append((time.perf_counter() - started, said)),
        )  # fmt: skip
    except (BudgetTooSmall, SolverError) as error:
        spent = time.perf_counter() - started
        return Found(None, None, None, spent, str(error).partition(";")[0], [])
    spent = time.perf_counter() - started
    bound = None if solution.lower_bound is None else solution.lower_bound / plain - 1
    overhead = solution.time / plain - 1
    if operators is not None:
        bound = None  # of schedules with these makers alone
    message = told[-1][1].message if told else ""
    return Found(overhead, bound, solution.peak_bytes, spent, message, course(told, plain))


def course(told: list[tuple[float, Progress]], plain: float) -> list[tuple[float, float]]:
    """List when better schedules were reported, and their overheads."""
    found: list[tuple[float, float]] = []
    for seconds, progress in told:
        if progress.incumbent_time is not None:
            overhead = progress.incumbent_time / plain - 1
            if not found or overhead < found[-1][1]:
                found.append((round(seconds, 3), overhead))
    return found


def least_operators(graph: Graph) -> Unfolded:
    """Fix the makers under which storing everything takes least, before anything is scheduled."""
    wiring = Wiring.of(graph)
    makers = Alternatives.of(wiring)
    arranged = (arrange(wiring, makers, choice) for choice in first_choices(wiring, makers))
    able = [unfold(wiring, found) for found in arranged if found is not None]
    return min(able, key=lambda f: simulate(f.wiring.graph, store_all(f.wiring.graph)).peak_bytes)


def print_head(table: str) -> None:
    """Print the head of a table."""
    columns = "".join(f"{method:>22}" for method in METHODS)
    print(f"\n{table:14}{'plain':>9}{'share':>7}{columns}{'bound':>8}{'published':>11}")
    print(f"{'':30}{'overhead in percent, and seconds of solving':>44}", flush=True)


def print_row(row: dict[str, Any]) -> None:
    """Print one cell."""
    text = f"{row['model']:14}{row['plain_bytes'] / GB:>6.2f} GB"
    text += f"{row['budget_bytes'] / row['plain_bytes']:>7.2f}"
    for method in METHODS:
        found = row["methods"].get(method)
        if found is None:
            text += f"{'-':>22}"
        elif found["overhead"] is None:
            text += f"{'none':>14} {found['seconds']:>5.0f} s"
        else:
            peak = f"at {found['peak_bytes'] / row['plain_bytes']:.2f} " if method == "gist" else ""
            text += (
                f"{peak + format(100 * found['overhead'], '.2f'):>14} {found['seconds']:>5.0f} s"
            )
    ours = row["methods"].get("ours")
    bound = None if ours is None else ours["bound"]
    text += f"{'-' if bound is None else format(100 * bound, '.2f'):>8}"
    published = row["published_overhead"]
    print(text + f"{'-' if published is None else format(published, '.1f'):>11}", flush=True)


def print_bars(rows: list[dict[str, Any]]) -> list[str]:
    """Print which bars hold; return those cells that are above `monet` or checkpointing alone."""
    missed: list[str] = []

    def bar(title: str, holds: Callable[[dict[str, Any]], bool | None], *, must: bool) -> None:
        asked = [(row, holds(row)) for row in rows]
        told = [(row, held) for row, held in asked if held is not None]
        names = [f"{row['table']} {row['model']} {row['number']}" for row, held in told if not held]
        print(f"{title}: {len(told) - len(names)} of {len(told)}"
              + (f"; not {', '.join(names)}" if names else ""))  # fmt: skip
        missed.extend(names if must else [])

    print()
    bar("ours no higher than monet", lambda row: level(row, "ours", "monet"), must=True)
    bar("ours in less time than monet", faster, must=False)
    bar("ours sooner at what monet ends with", sooner, must=False)
    bar("ours no higher than checkpointing alone",
        lambda row: level(row, "ours", "checkpointing"), must=True)  # fmt: skip
    bar("ours lower than checkpointing alone",
        lambda row: level(row, "ours", "checkpointing", -2 * NOISE), must=False)  # fmt: skip
    bar("ours no higher than published", below_published, must=False)
    return missed


def level(row: dict[str, Any], one: str, other: str, slack: float = 0.0) -> bool | None:
    """Whether one method takes no more than another; `None` if they were not both run."""
    if one not in row["methods"] or other not in row["methods"]:
        return None
    mine, theirs = row["methods"][one]["overhead"], row["methods"][other]["overhead"]
    if theirs is None:
        return None if mine is None else True
    return mine is not None and bool(mine <= theirs + NOISE + slack)


def faster(row: dict[str, Any]) -> bool | None:
    """Whether ours was solved in less time than MONeT's program."""
    if level(row, "ours", "monet") is None or row["methods"]["monet"]["overhead"] is None:
        return None
    return bool(row["methods"]["ours"]["seconds"] <= row["methods"]["monet"]["seconds"])


def sooner(row: dict[str, Any]) -> bool | None:
    """Whether ours had a plan no higher than MONeT's program's before that ended."""
    if faster(row) is None or "course" not in row["methods"]["ours"]:
        return None
    monet, ours = row["methods"]["monet"], row["methods"]["ours"]
    there = (seconds for seconds, found in ours["course"] if found <= monet["overhead"] + NOISE)
    first = next(there, ours["seconds"])  # what was found last need not have been told
    return bool(level(row, "ours", "monet") and first <= monet["seconds"])


def below_published(row: dict[str, Any]) -> bool | None:
    """Whether ours takes no more than the paper's."""
    published, ours = row["published_overhead"], row["methods"].get("ours")
    if published is None or ours is None:
        return None
    return ours["overhead"] is not None and bool(100 * ours["overhead"] <= published)


if __name__ == "__main__":
    sys.exit(main())
