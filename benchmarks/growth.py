"""How planning grows: seconds, memory and certified gap from a hundred to a hundred thousand ops.

Training graphs of four shapes, made from the forward graphs of `partition.py` and a GPT-2 of the
tests: every forward op has a backward op that reads its inputs and the gradients of its output, and
gradients that meet are added. `refine` plans each at shares of store-all's peak. Each figure is
from a fresh process that does nothing else: the seconds of `solve` and its CPU seconds, and the
most memory the process had, the graph included. Gaps are in points, percent of the time of
computing everything once. The growth exponent is the slope of a line through the logarithms of CPU
seconds and ops; beside it stands the slope between the last two sizes alone.

Bars: 10^4 ops within a minute, 10^5 within ten. Exit code 1 if one is missed.

    python benchmarks/growth.py [--quick] [--shapes NAME ...] [--shares SHARE ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from partition import growth, high_water_bytes, random_layers, transformer, u_net
from provenance import write_results
from remat_graph import Graph, Op, Stage, Value, simulate
from remat_solvers import BudgetTooSmall, solve, store_all

SIZES = (100, 1_000, 10_000, 100_000)
QUICK_SIZES = SIZES[:-1]
SHARES = (0.5, 0.3)
MOST_SECONDS = {10_000: 60.0, 100_000: 600.0}


@dataclass(frozen=True, slots=True)
class Row:
    """One size of one shape at one budget; `overhead` and `bound` are in points."""

    shape: str
    share: float
    size: int
    ops: int
    status: str
    overhead: float | None
    bound: float | None
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave the largest size out")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, metavar="SHARE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    given = parser.parse_args()
    print(f"{'shape':14}{'share':>6}{'ops':>8}{'seconds':>9}{'cpu s':>9}{'MiB':>7}"
          f"{'overhead':>10}{'gap':>8}{'growth':>8}{'last':>7}")  # fmt: skip
    rows: list[Row] = []
    growths: dict[str, dict[str, float]] = {}
    for shape in given.shapes:
        for share in given.shares:
            own: list[Row] = []
            for size in QUICK_SIZES if given.quick else SIZES:
                own.append(measure_apart(shape, size, share))
                print(line(own), flush=True)
            growths[f"{shape} {share}"] = {"fitted": growth(own), "last": growth(own[-2:])}
            rows += own
            if given.json:
                report = {"rows": [asdict(row) for row in rows], "growth": growths}
                write_results(given.json, report)
    late = [
        f"{row.shape} {row.ops} at {row.share}"
        for row in rows
        if row.seconds > MOST_SECONDS.get(row.size, math.inf)
    ]
    print(f"\nmissed: {', '.join(late) or 'none'} (60 s for 10^4 ops, 600 s for 10^5)")
    return int(bool(late))


def measure_apart(shape: str, size: int, share: float) -> Row:
    """Measure in a process of its own, so that its memory is that of one size alone."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (shape, size, share))


def measure(shape: str, size: int, share: float) -> Row:
    """Plan a graph once, within the bar for its size, a minute below the first."""
    graph = SHAPES[shape](size)
    budget_bytes = int(share * simulate(graph, store_all(graph)).peak_bytes)
    limit = MOST_SECONDS.get(size, 60.0)
    start, cpu = time.perf_counter(), time.process_time()
    overhead: float | None = None
    bound: float | None = None
    try:
        found = solve(graph, budget_bytes, solver="refine", limit_seconds=limit)
    except BudgetTooSmall as error:
        status = error.status.value
    else:
        status = found.status.value
        overhead = 100 * (found.time / graph.time - 1)
        if found.lower_bound is not None:
            bound = 100 * (found.lower_bound / graph.time - 1)
    return Row(
        shape=shape,
        share=share,
        size=size,
        ops=len(graph.ops),
        status=status,
        overhead=overhead,
        bound=bound,
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu,
        peak_bytes=high_water_bytes(),
    )


def line(rows: Sequence[Row]) -> str:
    """Format the last row, with the growth so far."""
    row = rows[-1]
    if row.overhead is None or row.bound is None:
        found = f"{row.status:>18}"
    else:
        found = f"{row.overhead:>10.3f}{row.overhead - row.bound:>8.3f}"
    slope = f"{growth(rows):>8.2f}{growth(rows[-2:]):>7.2f}" if len(rows) > 1 else ""
    return (
        f"{row.shape:14}{row.share:>6.2f}{row.ops:>8}{row.seconds:>9.2f}{row.cpu_seconds:>9.2f}"
        f"{row.peak_bytes / 2**20:>7.0f}{found}{slope}"
    )


def with_backward(forward: Graph) -> Graph:
    """Append the backward of a forward graph, from its last op, which is taken for the loss.

    An op that reads nothing makes no gradient, as a mask. The gradients of values that such ops
    make are results, as those of parameters are.
    """
    size = {value.name: value.size_bytes for value in forward.values}
    source = {value: op for op in forward.ops for value in op.outputs}
    values = list(forward.values)
    ops = list(forward.ops)
    parts: dict[str, list[str]] = {}

    def add(name: str, inputs: Sequence[str], outputs: dict[str, int], twin: str | None) -> None:
        values.extend(Value(output, bytes_) for output, bytes_ in outputs.items())
        ops.append(Op(name, tuple(inputs), tuple(outputs), 1.0, stage=Stage.BACKWARD, twin=twin))

    loss = forward.ops[-1].outputs[0]
    add("seed", (loss,), {f"d.{loss}": size[loss]}, None)
    parts[loss] = [f"d.{loss}"]
    for op in reversed(forward.ops):
        gradients = parts.get(op.outputs[0], [])
        wanted = [value for value in op.inputs if source[value].inputs]
        if not gradients or not wanted:
            continue
        if len(gradients) > 1:
            add(f"sum.{op.name}", gradients, {f"s.{op.name}": size[op.outputs[0]]}, None)
            gradients = [f"s.{op.name}"]
        made = {f"{op.name}.d.{value}": size[value] for value in wanted}
        add(f"{op.name}.backward", (*op.inputs, *gradients), made, op.name)
        for value, gradient in zip(wanted, made, strict=True):
            parts.setdefault(value, []).append(gradient)
    read = {value for op in ops for value in op.inputs}
    ends = {value for op in ops[len(forward.ops) :] for value in op.outputs} - read
    return Graph(tuple(values), tuple(ops), results=frozenset(ends | {loss}), boundary="seed")


def gpt2_like(size: int) -> Graph:
    """Make the training graph of a GPT-2 of as many layers as it takes."""
    tests = Path(__file__).parents[1] / "packages" / "remat-solvers" / "tests"
    sys.path.insert(0, str(tests))
    made: Graph = importlib.import_module("solver_cases.synthetic").gpt2(
        layers=max(1, round((size - 15) / 48))
    )
    return made


SHAPES: dict[str, Callable[[int], Graph]] = {
    "gpt-2": gpt2_like,
    "transformer": lambda size: with_backward(transformer(size * 13 // 27)),
    "u-net": lambda size: with_backward(u_net(size * 4 // 9)),
    "random layers": lambda size: with_backward(random_layers(size * 2 // 5)),
}


if __name__ == "__main__":
    sys.exit(main())
