"""What the models of HiRemate's table 3 look like once captured and cut, beside the published rows.

For each of the twelve: calls of operators in the forward half as traced, and ops once views are
merged; forward ops, and all; levels, blocks and unique blocks of H-Partition, and the members of
the largest block below the root. The published figures stand below ours: other operators are traced
there (torch.jit, and in-place ones merged), so depth and shape are to be compared, not counts; and
updates of buffers, as of batch norm, are no ops there (`writes` of ours, and the ops before them).
Nothing is run: costs are estimated. Each model is captured in a process of its own.

A second table has the bytes that cross between blocks, at the lowest level and between the members
of the root, for H-Partition, `sequence`, `repeats`, and as many balanced parts made by METIS.

Exit code 1 if the lowest blocks of GPT-2 with 96 layers fall into more classes than with 24. Those
are compared, as they are where operations are scheduled. Blocks that group a chain of layers are of
up to four classes on each level (the first, the last, and two sizes in between), and bounded blocks
need as many levels as the logarithm of the layers: their number can grow, slowly, and is printed.

`--svg` draws each hierarchy with one block of each class open, as the pictures in docs/ are.

    python benchmarks/structure.py [--json FILE] [--quick] [--models NAME ...] [--svg FOLDER]
    python benchmarks/structure.py --models gpt-24 unet mlp-mixer --svg docs
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import remat_partition
import zoo
from cuts import lowest_groups, measure_cut, metis_groups, top_groups
from hiremate import STRUCTURE
from provenance import write_results
from remat_graph import Block, Graph, Hierarchy, to_svg
from remat_graph.torch import capture

PARTITIONERS = ("h-partition", "sequence", "repeats")
SLOW = ("gpt-96", "transformer-36-36")
COLUMNS = ("calls", "forward", "all", "levels", "blocks", "unique", "largest")


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, the forward calls it was traced from, and what that took."""

    graph: Graph
    calls: int
    seconds: float
    peak_rss_bytes: int


def main() -> int:
    """Capture, cut, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--quick", action="store_true", help=f"without {' and '.join(SLOW)}")
    parser.add_argument("--models", nargs="+", choices=zoo.PUBLISHED, metavar="NAME")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="draw the hierarchies here")
    parser.add_argument("--max-top-ops", type=int, help="members of the root")
    parser.add_argument("--max-block-ops", type=int, help="members of any other block")
    options = parser.parse_args()
    names = options.models or [n for n in zoo.PUBLISHED if not (options.quick and n in SLOW)]
    bounds = {"max_top_ops": options.max_top_ops, "max_block_ops": options.max_block_ops}
    rows = []
    print(f"{'model':18}" + "".join(f"{column:>9}" for column in COLUMNS)
          + f"{'writes':>9}{'capture s':>11}{'GiB':>6}{'cut s':>7}")  # fmt: skip
    for name in names:
        row = examine(name, bounds, options.svg)
        rows.append(row)
        ours = "".join(f"{row[column]:>9}" for column in COLUMNS)
        theirs = "".join(f"{count:>9}" for count in STRUCTURE[name])
        print(f"{name:18}{ours}{row['writes']:>9}{row['capture_seconds']:>11.1f}"
              f"{row['peak_rss_bytes'] / 2**30:>6.2f}{row['cut_seconds']:>7.2f}\n"
              f"{'  published':18}{theirs}", flush=True)  # fmt: skip
    for level in ("lowest", "top"):
        print_cuts(level, rows)
    if options.json:
        write(options.json, rows)
    return int(grows(rows))


def examine(name: str, bounds: dict[str, int | None], pictures: Path | None) -> dict[str, Any]:
    """Capture, cut and draw a model; sizes in bytes, times in seconds."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        captured = executor.submit(capture_model, name).result()
    graph = captured.graph
    start = time.perf_counter()
    hierarchies = {"h-partition": cut(graph, "h-partition", bounds)}
    hierarchy = hierarchies["h-partition"]
    unique = hierarchy.unique_blocks
    seconds = time.perf_counter() - start
    if pictures is not None:
        (pictures / f"{name}.svg").write_text(to_svg(hierarchy, fold=True), encoding="utf-8")
    hierarchies |= {other: cut(graph, other, bounds) for other in PARTITIONERS[1:]}
    blocks = list(hierarchy.root.blocks())
    lowest = [block for block in blocks if not inner_blocks(block)]
    names_of_lowest = {block.name for block in lowest}
    return {
        "model": name,
        "calls": captured.calls,
        "forward": graph.boundary_index,
        "writes": sum(not op.outputs for op in graph.ops[: graph.boundary_index]),
        "all": len(graph.ops),
        "levels": levels(hierarchy.root),
        "blocks": len(blocks),
        "unique": len(unique),
        "unique_by_level": kinds_by_level(hierarchy),
        "unique_of_repeats": len(hierarchies["repeats"].unique_blocks),
        "largest": max((len(block.members) for block in blocks[1:]), default=0),
        "lowest": len(lowest),
        "lowest_unique": sum(
            any(member.name in names_of_lowest for member in found.members) for found in unique
        ),
        "forward_bytes": forward_bytes(graph),
        "capture_seconds": captured.seconds,
        "peak_rss_bytes": captured.peak_rss_bytes,
        "cut_seconds": seconds,
        "cuts": cuts(hierarchies),
        "published": dict(zip(COLUMNS, STRUCTURE[name], strict=True)),
    }


def capture_model(name: str) -> Captured:
    """Capture one of the twelve, without running it."""
    torch.set_num_threads(1)
    example = zoo.published(name)
    start = time.perf_counter()
    captured = capture(example.model, example.args, example.kwargs, costs="estimate")
    seconds = time.perf_counter() - start
    traced = captured._joint.graph.nodes  # as AOTAutograd hands it over: no public view of it
    calls = sum(
        isinstance(node.target, torch._ops.OpOverload)
        and node.meta.get("partitioner_tag") != "is_backward"
        for node in traced
    )
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Captured(captured.graph, calls, seconds, peak_rss_bytes)


def cut(graph: Graph, partitioner: str, bounds: dict[str, int | None]) -> Hierarchy:
    """Cut a graph; a partitioner without bounds is asked without."""
    given = {key: bound for key, bound in bounds.items() if bound is not None}
    return remat_partition.partition(graph, partitioner=partitioner, **given)


def inner_blocks(block: Block) -> list[Block]:
    """List the members that are blocks."""
    return [member for member in block.members if isinstance(member, Block)]


def levels(block: Block) -> int:
    """Count the blocks around the deepest op."""
    return 1 + max((levels(inner) for inner in inner_blocks(block)), default=0)


def kinds_by_level(hierarchy: Hierarchy) -> list[int]:
    """Count the classes of blocks by levels below them, those of the lowest blocks first."""
    kinds = Counter(levels(found.representative) for found in hierarchy.unique_blocks)
    return [kinds[level] for level in sorted(kinds)]


def forward_bytes(graph: Graph) -> int:
    """Add up what the forward half makes."""
    made = (v for op in graph.ops[: graph.boundary_index] for v in op.outputs)
    return sum(graph.value_by_name[v].size_bytes for v in made)


def cuts(hierarchies: dict[str, Hierarchy]) -> dict[str, dict[str, dict[str, int]]]:
    """Measure what crosses at both levels, and beside it the parts of METIS, as many as ours."""
    graph = hierarchies["h-partition"].graph
    found: dict[str, dict[str, dict[str, int]]] = {}
    for level, groups_of in (("lowest", lowest_groups), ("top", top_groups)):
        groups = {name: groups_of(hierarchy) for name, hierarchy in hierarchies.items()}
        groups["metis"] = metis_groups(graph, len(set(groups["h-partition"])))
        found[level] = {name: asdict(measure_cut(graph, given)) for name, given in groups.items()}
    return found


def print_cuts(level: str, rows: list[dict[str, Any]]) -> None:
    """Print how many groups there are, the ops of the largest, and the MiB that cross."""
    where = "between the lowest blocks" if level == "lowest" else "between the members of the root"
    columns = (*PARTITIONERS, "metis")
    print(f"\n{where}: groups, ops in the largest, MiB that cross; of METIS, groups in circles too")
    print(f"{'model':18}{'made MiB':>9}" + "".join(f"{column:>24}" for column in columns))
    for row in rows:
        line = f"{row['model']:18}{row['forward_bytes'] / 2**20:>9.1f}"
        for column in columns:
            found = row["cuts"][level][column]
            circles = f" ({found['circular']})" if column == "metis" else ""
            text = f"{found['groups']}{circles}{found['largest']:>6}"
            line += f"{text:>16}{found['size_bytes'] / 2**20:>8.1f}"
        print(line)


def grows(rows: list[dict[str, Any]]) -> bool:
    """Compare the two depths of GPT-2, if both are there."""
    by_name = {row["model"]: row for row in rows}
    if not {"gpt-24", "gpt-96"} <= by_name.keys():
        return False
    shallow, deep = by_name["gpt-24"], by_name["gpt-96"]
    print(f"\nGPT-2 with 24 and 96 layers: {shallow['lowest_unique']} and {deep['lowest_unique']} "
          f"classes of lowest blocks; {shallow['unique']} and {deep['unique']} with those that "
          f"group them, by level {shallow['unique_by_level']} and {deep['unique_by_level']}; of "
          f"`repeats` {shallow['unique_of_repeats']} and {deep['unique_of_repeats']}")  # fmt: skip
    return bool(deep["lowest_unique"] > shallow["lowest_unique"])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows."""
    write_results(path, {"models": rows})


if __name__ == "__main__":
    sys.exit(main())
