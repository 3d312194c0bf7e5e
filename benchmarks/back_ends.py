"""How often HiGHS is wrong about the integer programs of small random graphs; Gurobi is the judge.

Graphs of 4 to 9 ops with small whole sizes, where ties abound, at store-all's peak and one and two
bytes below. For the programs of `refine`, of `checkmate` (both forms) and of Checkmate's bound over
all schedules: how many of HiGHS's answers have a bound above Gurobi's optimum, as the package
declares the columns, and with those continuous that follow from others (but for the bound).
Gurobi's licence from pip is enough. Exit code 1 if an answer as the package declares is wrong.

    python benchmarks/back_ends.py [--graphs N] [--seeds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from provenance import write_results
from remat_graph import Graph, Op, Value
from remat_solvers.core.milp import Outcome, Program, solve_program
from remat_solvers.core.trace import trace
from remat_solvers.core.wiring import Wiring
from remat_solvers.published.checkmate.bound import bounding_program
from remat_solvers.published.checkmate.formulation import Form, formulate
from remat_solvers.published.checkmate.stages import Stages
from remat_solvers.refine.relaxation import relax

MOST = 1_900  # rows or columns; Gurobi's licence from pip takes 2,000
TOLERANCE = 1e-4


def random_graph(rng: random.Random) -> Graph:
    """Draw a graph of 4 to 9 ops with one or two outputs each, in an order of first runs."""
    values = [Value("x", rng.choice([0, 1, 2, 5]))]
    ops: list[Op] = []
    made: list[str] = []
    for k in range(rng.randint(4, 9)):
        outputs = [f"v{k}.{j}" for j in range(1 if rng.random() < 0.8 else 2)]
        values += [Value(name, rng.choice([0, 0, 1, 1, 2, 3, 4, 5])) for name in outputs]
        reads = rng.sample(made, min(len(made), rng.choice([1, 1, 2, 2, 3])))
        reads += ["x"] if rng.random() < 0.4 else []
        time, workspace = float(rng.choice([0, 0, 1, 1, 1, 2])), rng.choice([0, 0, 0, 1, 2])
        ops.append(Op(f"o{k}", tuple(reads), tuple(outputs), time, workspace))
        made += outputs
    results = frozenset(ops[-1].outputs[:1])
    return Graph(tuple(values), tuple(ops), resident=frozenset({"x"}), results=results)


def programs(graph: Graph, rng: random.Random) -> Iterator[tuple[str, Program, np.ndarray]]:
    """Yield programs by name, each with a mark on the columns that must be whole."""
    wiring = Wiring.of(graph)
    stages = Stages.of(wiring)
    everything = trace(wiring, np.arange(wiring.op_count)).peak_bytes
    for budget in range(max(everything - 2, 1), everything + 1):
        for form in Form:
            f = formulate(stages, form)
            right = f.program.right + budget * f.per_byte
            whole = np.arange(len(f.program.cost)) < f.used_start
            yield (
                f"checkmate, {form.value}",
                dataclasses.replace(f.program, right=right),
                whole,
            )
        bounding = bounding_program(wiring, budget)
        yield "checkmate, bound", bounding, bounding.integral
        points = sorted(rng.sample(range(wiring.op_count), 3))
        running = [(c, op) for c in points for op in range(c) if rng.random() < 0.3]
        relaxation = relax(wiring, budget, points, running=running)
        whole = np.zeros(len(relaxation.program.cost), dtype=np.bool_)
        for columns in (relaxation.kept_column, relaxation.redo_column):
            whole[columns[columns >= 0]] = True
        yield "refine", relaxation.program, whole


def optimum(program: Program) -> float | None:
    """Ask Gurobi; infinite if there is no point, `None` if it gives up."""
    answer = solve_program(program, seconds=5, back_end="GUROBI")
    if answer.outcome is Outcome.STOPPED:
        return None
    return answer.value


def is_wrong(program: Program, best: float, seed: int) -> bool:
    """Say whether HiGHS claims a bound above the optimum; the rows are shuffled by the seed."""
    order = np.random.default_rng(seed).permutation(len(program.right))
    shuffled = dataclasses.replace(
        program, matrix=program.matrix[order], right=program.right[order]
    )
    answer = solve_program(shuffled, seconds=5)
    return answer.bound > best + TOLERANCE * (1 + abs(best))


def main() -> int:
    """Count, print, write; 1 if the package's programs met a wrong answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=500, help="how many graphs (500)")
    parser.add_argument("--seeds", type=int, default=2, help="orders of rows for each (2)")
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "back_ends.json"
    )
    arguments = parser.parse_args()
    rng = random.Random(0)
    solves, wrong = Counter[str](), Counter[tuple[str, str]]()
    for number in range(arguments.graphs):
        for name, program, whole in programs(random_graph(rng), rng):
            if max(program.matrix.shape) > MOST:
                continue
            best = optimum(program)
            if best is None or not np.isfinite(best):
                continue
            loose = dataclasses.replace(program, integral=whole)
            for seed in range(arguments.seeds):
                solves[name] += 1
                wrong[name, "declared"] += is_wrong(program, best, seed)
                wrong[name, "continuous"] += is_wrong(loose, best, seed)
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {arguments.graphs} graphs", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{'program':20} {'solves':>8} {'wrong as declared':>18} {'wrong if continuous':>20}")
    rows = [
        {
            "program": name,
            "solves": count,
            "wrong_as_declared": wrong[name, "declared"],
            "wrong_if_continuous": wrong[name, "continuous"],
        }
        for name, count in sorted(solves.items())
    ]
    for row in rows:
        print(
            f"{row['program']:20} {row['solves']:8} {row['wrong_as_declared']:18} "
            f"{row['wrong_if_continuous']:20}"
        )
    packages = ("remat-solvers", "highspy", "gurobipy", "cvxpy")
    write_results(arguments.json, {"graphs": arguments.graphs, "rows": rows}, packages)
    return int(any(row["wrong_as_declared"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
