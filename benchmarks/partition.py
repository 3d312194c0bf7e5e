"""How partitioning grows: seconds and memory from a hundred to a hundred thousand ops.

Five shapes: random layers, a transformer whose layers all read one mask, a U-Net as deep as it
takes, and chains of ops that all read the same two or eight values. Each figure is from a fresh
process that does nothing else: the least wall-clock time of several runs, the CPU time of the same
run, and the high-water mark before and after partitioning. The growth exponent is the slope of a
line through the logarithms of CPU times, which what else runs does not lengthen as much, and sizes;
beside it stands the slope between the last two sizes alone, where caches no longer hold the graph.
Exit code 1 if 10^4 ops take more than 3 s, 10^5 more than 60 s, or the exponent of a shape is above
1.2.

    python benchmarks/partition.py [--quick] [--json FILE] [--partitioner NAME]
                                   [--max-top-ops N] [--max-block-ops N] [--alpha F]
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from provenance import write_results
from remat_graph import Block, Graph, Op, Value
from remat_partition import partition

SIZES = (100, 1_000, 10_000, 100_000)
QUICK_SIZES = SIZES[:2]
MOST_SECONDS = {10_000: 3.0, 100_000: 60.0}
MOST_GROWTH = 1.2

# Runs are repeated for this long, but no more than so often.
REPEAT_SECONDS = 5.0
MOST_RUNS = 20


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--partitioner", default="h-partition")
    parser.add_argument("--max-top-ops", type=int)
    parser.add_argument("--max-block-ops", type=int)
    parser.add_argument("--alpha", type=float)
    given = parser.parse_args()
    options = {
        name: getattr(given, name)
        for name in ("partitioner", "max_top_ops", "max_block_ops", "alpha")
        if getattr(given, name) is not None
    }
    print(f"{'shape':13}{'ops':>8}{'seconds':>10}{'cpu s':>9}{'graph MiB':>11}{'peak MiB':>10}"
          f"{'levels':>8}{'blocks':>8}{'largest':>9}{'growth':>8}{'last':>7}")  # fmt: skip
    rows: list[Row] = []
    growths: dict[str, dict[str, float]] = {}
    for shape in SHAPES:
        own = []
        for size in QUICK_SIZES if given.quick else SIZES:
            own.append(measure_apart(shape, size, options))
            print(line(own), flush=True)
        growths[shape] = {"fitted": growth(own), "last": growth(own[-2:])}
        rows += own
    if given.json:
        write(given.json, options, rows, growths)
    failed = [f"{r.shape} {r.ops}" for r in rows if r.seconds > MOST_SECONDS.get(r.size, math.inf)]
    failed += [
        f"{shape} growth" for shape, slope in growths.items() if slope["fitted"] > MOST_GROWTH
    ]
    print(f"\nmissed: {', '.join(failed) or 'none'} "
          f"(3 s for 10^4 ops, 60 s for 10^5, growth {MOST_GROWTH})")  # fmt: skip
    return int(bool(failed))


@dataclass(frozen=True, slots=True)
class Row:
    """One size of one shape; memory is the high-water mark of the process."""

    shape: str
    size: int
    ops: int
    seconds: float
    cpu_seconds: float
    runs: int
    graph_bytes: int
    peak_bytes: int
    levels: int
    blocks: int
    largest: int


def measure_apart(shape: str, size: int, options: dict[str, Any]) -> Row:
    """Measure in a process of its own, so that its memory is that of one size alone."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (shape, size, options))


def measure(shape: str, size: int, options: dict[str, Any]) -> Row:
    """Partition a graph until enough time is spent; keep the least."""
    graph = SHAPES[shape](size)
    before = high_water_bytes()
    times: list[tuple[float, float]] = []
    while not times or (sum(wall for wall, _ in times) < REPEAT_SECONDS and len(times) < MOST_RUNS):
        start, cpu = time.perf_counter(), time.process_time()
        root = partition(graph, **options).root
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    seconds, cpu_seconds = min(times)
    blocks = list(root.blocks())
    return Row(
        shape=shape,
        size=size,
        ops=len(graph.ops),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        runs=len(times),
        graph_bytes=before,
        peak_bytes=high_water_bytes(),
        levels=levels(root),
        blocks=len(blocks),
        largest=max(len(block.members) for block in blocks),
    )


def high_water_bytes() -> int:
    """Give the most memory that this process had; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def levels(block: Block) -> int:
    """Count the levels of a tree of blocks."""
    return 1 + max((levels(m) for m in block.members if isinstance(m, Block)), default=0)


class Timed(Protocol):
    """What a growth is fitted to."""

    @property
    def ops(self) -> int:
        """Number of ops."""

    @property
    def cpu_seconds(self) -> float:
        """What they took."""


def growth(rows: Sequence[Timed]) -> float:
    """Fit CPU seconds = c * ops ** growth to the rows."""
    return statistics.linear_regression(
        [math.log(row.ops) for row in rows], [math.log(row.cpu_seconds) for row in rows]
    ).slope


def line(rows: Sequence[Row]) -> str:
    """Format the last row, with the growth so far."""
    row = rows[-1]
    slope = f"{growth(rows):>8.2f}{growth(rows[-2:]):>7.2f}" if len(rows) > 1 else ""
    return (
        f"{row.shape:13}{row.ops:>8}{row.seconds:>10.3f}{row.cpu_seconds:>9.3f}"
        f"{row.graph_bytes / 2**20:>11.0f}{row.peak_bytes / 2**20:>10.0f}"
        f"{row.levels:>8}{row.blocks:>8}{row.largest:>9}{slope}"
    )


class _Builder:
    """A forward graph, op by op; every op makes one value."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []

    def add(self, kind: str, size: int, *sources: int) -> int:
        """Add an op that reads what these ops make; return its number."""
        number = len(self.ops)
        inputs = tuple(f"v{source}" for source in dict.fromkeys(sources))
        self.values.append(Value(f"v{number}", size))
        self.ops.append(Op(f"op{number}", inputs, (f"v{number}",), 1.0, equivalence=kind))
        return number

    def graph(self) -> Graph:
        """Make the graph; its last value is the result."""
        results = frozenset({self.values[-1].name})
        return Graph(tuple(self.values), tuple(self.ops), results=results)


def random_layers(size: int) -> Graph:
    """Make layers of eight ops, each of which reads up to three of the two layers before."""
    draw = random.Random(0)
    built = _Builder()
    for number in range(size):
        near = range(max(0, number // 8 * 8 - 16), number // 8 * 8)
        sources = draw.sample(near, min(len(near), draw.choice((1, 1, 2, 2, 3))))
        built.add(f"kind{draw.randrange(9)}", draw.randint(1, 100), *sources)
    return built.graph()


def transformer(size: int) -> Graph:
    """Make layers of attention and feed-forward, all of which read one mask."""
    built = _Builder()
    mask = built.add("mask", 4)
    x = built.add("embedding", 8)
    while len(built.ops) < size:
        norm = built.add("norm", 8, x)
        query, key, value = (built.add("linear", 8, norm) for _ in range(3))
        scores = built.add("masked", 32, built.add("matmul", 32, query, key), mask)
        mixed = built.add("weigh", 8, built.add("softmax", 32, scores), value)
        x = built.add("add", 8, built.add("linear", 8, mixed), x)
        wide = built.add("gelu", 32, built.add("widen", 32, built.add("norm", 8, x)))
        x = built.add("add", 8, built.add("narrow", 8, wide), x)
    built.add("loss", 1, x)
    return built.graph()


def u_net(size: int) -> Graph:
    """Make an encoder and a decoder with a skip at every depth, two convolutions each."""
    built = _Builder()
    x = built.add("input", 64)
    skips = []

    def convolutions(x: int) -> int:
        for _ in range(2):
            x = built.add("relu", 64, built.add("norm", 64, built.add("convolution", 64, x)))
        return x

    for _ in range(max(1, (size - 2) // 13)):
        x = convolutions(x)
        skips.append(x)
    for skip in reversed(skips):
        x = convolutions(built.add("concatenate", 128, x, skip))
    built.add("loss", 1, x)
    return built.graph()


def read_all_along(size: int, hubs: int) -> Graph:
    """Make a chain whose ops all read the same values too, as masks, sines and cosines are read."""
    built = _Builder()
    shared = [built.add("shared", 4) for _ in range(hubs)]
    last: tuple[int, ...] = ()
    for _ in range(size - hubs):
        last = (built.add("op", 8, *shared, *last),)
    return built.graph()


SHAPES: dict[str, Callable[[int], Graph]] = {
    "layers": random_layers,
    "transformer": transformer,
    "u-net": u_net,
    "2 hubs": functools.partial(read_all_along, hubs=2),
    "8 hubs": functools.partial(read_all_along, hubs=8),
}


def write(
    path: Path, options: dict[str, Any], rows: Sequence[Row], growths: dict[str, dict[str, float]]
) -> None:
    """Write the rows."""
    found = {"options": options, "growth": growths, "rows": [asdict(row) for row in rows]}
    write_results(path, found)


if __name__ == "__main__":
    sys.exit(main())
