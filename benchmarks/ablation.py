"""What each part of `refine` gives: its plans and bounds with one part taken out at a time.

Each variant plans the same captured graphs (costs estimated, `graphs.DEVICE`) at shares of
store-all's peak within the same limit. `greedy` runs no program at all: eviction, one pass, pruning
and the local search alone, which is what a program must beat; `first program` adds no checkpoint to
the first; the others leave one part out:

    running rows      rows of running memory inside segments
    reserves          programs with less room than the budget
    perturbations     repairing a program's schedule in more ways than one
    local search      `search.local_search`, and integer programs over parts
    neighbourhoods    integer programs over parts of a program of many checkpoints
    warm start        the best schedule as the start point of each program
    relaxation first  linear relaxations to choose checkpoints, and before large programs
    pairs             rows for pairs of segments in linear relaxations

Overheads and bounds are in points, percent of the time of computing everything once; the table
shows the overhead, and in brackets the gap to the highest bound that any variant proved.

    python benchmarks/ablation.py [--models NAME ...] [--shares SHARE ...] [--limit SECONDS]
                                  [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from graphs import captured
from provenance import write_results
from remat_graph import Graph, simulate
from remat_solvers import BudgetTooSmall, solve, store_all
from remat_solvers.core.wiring import Floats
from remat_solvers.refine.programs import Programs
from remat_solvers.refine.refinements import Refinement, refinements
from remat_solvers.refine.relaxation import Relaxation, relax

MODELS = ("unet", "fno-3d", "regnet-32", "transformer-6-6", "gpt-24")
SHARES = (0.5, 0.4)
RESULTS = Path(__file__).parent / "results" / "ablation.json"

Patches = dict[str, Any]


def nothing(*_: Any, **__: Any) -> None:
    """Stand in for a part that is taken out."""


def without_running_rows(*given: Any) -> list[Refinement]:
    """Look for refinements, but for those by rows of running memory."""
    return [r for r in refinements(*given) if not r.running]


def without_pairs(*given: Any, **named: Any) -> Relaxation:
    """Write the program without rows for pairs of segments."""
    return relax(*given, **{**named, "paired": False})


def without_sketch(_: Programs, tried: Refinement) -> Refinement:
    """Begin with the first checkpoint alone."""
    return tried


def without_warm_start(_: Programs, __: Relaxation, begun: Floats | None) -> Floats | None:
    """Start a program at most from an earlier point of its own."""
    return begun


# What to put in place of names in the modules of `refine`.
VARIANTS: dict[str, Patches] = {
    "refine": {},
    "greedy": {"rounds.Rounds._refine": nothing},
    "first program": {
        "programs.refinements": lambda *_: [],
        "programs.Programs.sketch": without_sketch,
        "programs.Programs.start_anew": without_sketch,
    },
    "no tightest ops": {"programs.tightest": lambda *_: []},
    "no running rows": {"programs.refinements": without_running_rows},
    "no reserves": {"programs.Programs.reserve": nothing},
    "no perturbations": {"heuristics._GAP_TO_TRY_MORE": np.inf},
    "no local search": {"heuristics.Heuristics.polish": nothing},
    "no neighbourhoods": {"heuristics._PATIENCE": 0},
    "no warm start": {"programs.Programs._start": without_warm_start},
    "no relaxation first": {
        "programs._LARGE_COLUMNS": np.inf,
        "programs.Programs.sketch": without_sketch,
    },
    "no pairs": {"programs.relax": without_pairs},
    "one core": {"programs.Programs._polish": nothing},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One variant on one graph at one budget."""

    model: str
    share: float
    variant: str
    status: str
    overhead: float | None
    bound: float | None
    seconds: float


def main() -> int:
    """Plan with every variant, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, metavar="SHARE")
    parser.add_argument("--limit", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    given = parser.parse_args()
    rows: list[Row] = []
    print(f"{'':25}" + "".join(f"{name:>21}" for name in given.models), flush=True)
    for share in given.shares:
        for variant in VARIANTS:
            for model in given.models:
                rows.append(plan(model, captured(model), share, variant, given.limit))
                report = {"limit": given.limit, "rows": [asdict(row) for row in rows]}
                write_results(given.json, report)
        for variant in VARIANTS:
            own = [row for row in rows if row.share == share]
            cells = [cell(own, model, variant) for model in given.models]
            print(f"{share:<5}{variant:20}" + "".join(f"{text:>21}" for text in cells), flush=True)
    return 0


def plan(model: str, graph: Graph, share: float, variant: str, limit: float) -> Row:
    """Plan with a variant."""
    budget_bytes = int(share * simulate(graph, store_all(graph)).peak_bytes)
    with patched(VARIANTS[variant]):
        try:
            found = solve(graph, budget_bytes, solver="refine", limit_seconds=limit)
        except BudgetTooSmall as error:
            return Row(model, share, variant, error.status.value, None, None, limit)
    bound = None if found.lower_bound is None else 100 * (found.lower_bound / graph.time - 1)
    overhead = 100 * (found.time / graph.time - 1)
    seconds = found.solve_seconds
    return Row(model, share, variant, found.status.value, overhead, bound, seconds)


@contextlib.contextmanager
def patched(patches: Patches) -> Iterator[None]:
    """Put other things in place of parts of `refine`."""
    with contextlib.ExitStack() as stack:
        for name, other in patches.items():
            stack.enter_context(mock.patch(f"remat_solvers.refine.{name}", other))
        yield


def cell(rows: list[Row], model: str, variant: str) -> str:
    """Write the overhead, and the gap to the highest bound of all variants."""
    bound = max((row.bound or 0.0 for row in rows if row.model == model), default=math.nan)
    row = next(row for row in rows if (row.model, row.variant) == (model, variant))
    if row.overhead is None:
        return row.status
    own = "" if row.bound is None else f" {row.overhead - row.bound:.2f}"
    return f"{row.overhead:.2f} ({row.overhead - bound:.2f},{own})"


if __name__ == "__main__":
    sys.exit(main())
