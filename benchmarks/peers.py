"""remat beside what a user would pick instead, on five models without dropout.

The peers are `torch.utils.checkpoint` around every block, and `torch.compile` under an
`activation_memory_budget`, on aot_eager, which runs the same kernels as remat, and on Inductor,
which compiles its own. Both recompute by a minimum cut, at a budget of 1.0, too, where
`aot_eager_default_partitioner` would store everything. Two questions, each asked in a process of
its own for every row:

- What does a variant take beside plain autograd? Peer or remat, each stands with plain alone: ten
  models in one process slow plain down more than the others, and flatter every ratio.
- Is remat faster at a peer's peak, with eager kernels and with compiled groups of operators? The
  peer and remat stand together, without plain: the peer's peak, measured there, is remat's budget
  in bytes, and the two take turns. So the ratio is measured in one place, and has quartiles of its
  own; a ratio of two ratios would add the noise of two processes. Where remat stays over 1% below
  the peer's peak, it is tried once with as much more as it left, and kept if its measured peak is
  no higher than the peer's.

Time ratios are medians over rounds of the ratio within a round, with the quartiles as a measure of
the noise. Peaks are what torch allocates in a step, by the same recorder for all; scratch memory
of a library does not pass through it. Compiling is not timed, but told (`setup_seconds`), from
empty caches.

Rows are written one by one. A run goes on where the last one stopped, on the same commit; with
`--resume` rows of other commits are kept, too, with `--fresh` none are. The whole needs a quiet
machine. Exit code 1 if a row failed for another reason than that remat cannot reach a peak.

    python benchmarks/peers.py [--models NAME ...] [--threads N ...] [--only PATTERN] [--rounds N]
        [--quick] [--resume] [--fresh] [--json FILE]
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

import remat
import zoo
from comparison import PLAIN, Runner, Variant, compare
from isolation import Ended, run_alone
from peer_table import COMPILED_BLOCKS, Record, Records, print_records, shown
from zoo import Example

RESULTS = Path(__file__).parent / "results" / "peers.json"
BUDGETS = {"aot_eager": (1.0, 0.8, 0.5, 0.3, 0.1), "inductor": (1.0, 0.8, 0.5, 0.3, 0.1)}
FRACTIONS = (0.8, 0.6, 0.5, 0.4, 0.3)
BLOCKS = (
    "GPT2Block", "Convolutions", "TransformerEncoderLayer", "TransformerDecoderLayer",
    "LlamaDecoderLayer", "ViTLayer",
)  # fmt: skip
EAGER, GROUPS = "remat", "remat compiled"
CHECKPOINT = "checkpoint per block"
CLOSE = 0.01  # of a peer's peak: less room than this is not worth another plan
TIMEOUT_SECONDS = 900.0


def checkpoint_blocks(model: nn.Module, names: Sequence[str] = BLOCKS) -> nn.Module:
    """Checkpoint every block of the model, in place, as a user would."""
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    assert blocks
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def compiled(name: str, budget: float) -> Callable[[nn.Module], nn.Module]:
    """Compile with a back end, which reads its `activation_memory_budget` as it compiles."""
    back_end = lookup_backend(name)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        with (
            torch._functorch.config.patch(activation_memory_budget=budget),
            torch._inductor.config.patch(force_disable_caches=True),
        ):
            made: Callable[..., Any] = back_end(graph, inputs)
            return made

    def make(model: nn.Module) -> nn.Module:
        compiled_model: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]
        return compiled_model

    return make


def rematerialized(example: Example, budget: int | float, name: str) -> Variant:
    """Rematerialize under a fraction of plain's peak, or a number of bytes, loss included."""
    groups = name == GROUPS
    return Variant(
        f"{name} {budget}",
        lambda model: remat.rematerialize(
            model, example.args, example.kwargs, budget=budget, loss=example.loss,
            kernels="inductor" if groups else "eager", wait=groups,
        ),
    )  # fmt: skip


def peers() -> dict[str, Variant]:
    """List what remat is held against, by name."""
    found = [Variant(CHECKPOINT, checkpoint_blocks)]
    found += [
        Variant(f"{name} {budget}", compiled(name, budget))
        for name, budgets in BUDGETS.items()
        for budget in budgets
    ]
    whole = compiled("inductor", 1.0)
    found.append(Variant(COMPILED_BLOCKS, lambda model: whole(checkpoint_blocks(model))))
    return {variant.name: variant for variant in found}


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured in one process: a variant beside plain, or remat beside a peer."""

    model: str
    threads: int
    variant: str
    against: str = PLAIN.name


def cells(models: list[str], threads: list[int]) -> list[Cell]:
    """List all that the whole table needs."""
    fractions = [f"{name} {fraction}" for name in (EAGER, GROUPS) for fraction in FRACTIONS]
    return [
        cell
        for count in threads
        for model in models
        for cell in (
            *(Cell(model, count, name) for name in (*peers(), *fractions)),
            *(Cell(model, count, ours, name) for name in peers() for ours in (EAGER, GROUPS)),
        )
    ]


def reach(example: Example, peak_bytes: int, name: str) -> Runner:
    """Rematerialize with a measured peak no higher than a peer's, and close to it if that helps."""
    runner = Runner(rematerialized(example, peak_bytes, name), example)
    unused = peak_bytes - runner.peak_bytes
    if unused <= CLOSE * peak_bytes:
        return runner
    more = Runner(rematerialized(example, peak_bytes + unused, name), example)
    return more if more.peak_bytes <= peak_bytes else runner


def measure(cell: Cell, size: zoo.Size, rounds: int) -> Record:
    """Measure a cell in this process."""
    torch.set_num_threads(cell.threads)
    example = zoo.build(cell.model, size)
    known = {PLAIN.name: PLAIN, **peers()}
    ours = [rematerialized(example, share, name) for name in (EAGER, GROUPS) for share in FRACTIONS]
    known |= {variant.name: variant for variant in ours}
    other = Runner(known[cell.against], example)
    try:
        if cell.variant in (EAGER, GROUPS):
            one = reach(example, other.peak_bytes, cell.variant)
        else:
            one = Runner(known[cell.variant], example)
    except (remat.BudgetTooSmall, remat.BudgetExceeded) as error:
        return {"out_of_reach": str(error).partition("\n")[0], "peak_bytes": other.peak_bytes}
    pair = compare(one, other, rounds)
    return {**asdict(pair), "peak_ratio": pair.peak_ratio}


def run(cell: Cell, size: zoo.Size, rounds: int) -> Record:
    """Measure a cell in a process of its own; what it fails with is its result."""
    start = time.perf_counter()
    try:
        found = run_alone(measure, cell, size, rounds, timeout_seconds=TIMEOUT_SECONDS)
    except Ended as error:
        found = {"error": str(error)}
    return {**asdict(cell), **found, "rounds": rounds, "wall_seconds": time.perf_counter() - start}


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are kept")
    parser.add_argument("--quick", action="store_true", help="tiny models: a smoke test, not kept")
    parser.add_argument("--models", nargs="+", choices=zoo.PEERS, default=zoo.PEERS, metavar="NAME")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--only", default="*", help="such as 'inductor 0.5' or 'remat*'")
    parser.add_argument("--rounds", type=int, metavar="N", help="15; 3 with --quick")
    parser.add_argument("--resume", action="store_true", help="keep rows of other commits")
    parser.add_argument("--fresh", action="store_true", help="keep no rows")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 15)
    if min(options.rounds, *options.threads) < 1:
        parser.error("--rounds and --threads are 1 or more")
    return options


def estimate(records: Records, left: int) -> str:
    """Tell how long the rest takes, by the rows that are known."""
    known = [record["wall_seconds"] for record in records.all()]
    return f"about {left * statistics.mean(known) / 60:.0f} min" if known else "unknown yet"


def main() -> int:
    """Measure what is not known yet, print and write; return the exit code."""
    options = read_options()
    path = options.json or (None if options.quick else RESULTS)
    keep = "none" if options.fresh else "all" if options.resume else "of this commit"
    records = Records(path, keep=keep)
    chosen = [
        cell
        for cell in cells(options.models, options.threads)
        if any(fnmatch.fnmatch(name, options.only) for name in (cell.variant, cell.against))
    ]
    pending = [cell for cell in chosen if not records.has(asdict(cell))]
    print(f"{len(pending)} of {len(chosen)} rows to measure: {estimate(records, len(pending))}")
    size: zoo.Size = "tiny" if options.quick else "peers"
    for left, cell in zip(range(len(pending) - 1, -1, -1), pending, strict=True):
        record = run(cell, size, options.rounds)
        records.add(record)
        rest = f"{left} left: {estimate(records, left)}" if left else "done"
        print(f"{cell.model}, {cell.threads} threads, {shown(record)}; {rest}", flush=True)
    found = [record for cell in chosen for record in [records.get(asdict(cell))]]
    print_records(found)
    return int(any("error" in record for record in found))


if __name__ == "__main__":
    sys.exit(main())
