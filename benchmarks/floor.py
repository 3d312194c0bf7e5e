"""Below what any schedule of whole values reaches: remat with slices beside slices by hand.

The models are those whose logits, feed-forward parts or images are most of a step. Peers are what
a user would write: checkpoint per block, with the loss in slices, with feed-forward parts in
slices, too, torch's `linear_cross_entropy`, and Inductor, also with its chunking of a loss. Each
row is measured in a process of its own:

- beside plain: every peer; remat at the least it finds, without and with slices;
- beside a peer, whose measured peak is the budget: remat with slices.

`beyond` is what is held beyond the gradients of parameters, beside the same of plain, or of the
peer. What must hold: remat not slower than a peer at its peak; at its least, `beyond` at most 0.6
of the lowest peer's; and of "32,000 words" a peak of 0.20 of plain in at most 1.3 of its time.

    python benchmarks/floor.py [--models NAME ...] [--only PATTERN] [--rounds N] [--quick]
        [--resume] [--fresh] [--json FILE]
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch._inductor.config
from torch import nn

import remat
from comparison import PLAIN, Runner, Variant, compare
from floor_models import MODELS, UNET, ByHand, build
from isolation import Ended, run_alone
from peer_table import Record, Records, outcome, print_records, shown
from peers import checkpoint_blocks
from zoo import Example

RESULTS = Path(__file__).parent / "results" / "floor.json"
TIMEOUT_SECONDS = 1500.0
LEAST, LEAST_WHOLE = "remat, the least", "remat, the least without slices"
BY_HAND = {
    "checkpoint per block": ByHand(blocks=True),
    "checkpoint, loss in slices": ByHand(blocks=True, loss="slices"),
    "checkpoint, loss and MLP in slices": ByHand(blocks=True, loss="slices", mlp_in_slices=True),
    "checkpoint, linear_cross_entropy": ByHand(blocks=True, loss="linear_cross_entropy"),
    "linear_cross_entropy": ByHand(loss="linear_cross_entropy"),
}
COMPILED = {"inductor": False, "inductor, auto chunker": True}
GOAL_PEAK, GOAL_TIME, GOAL_BEYOND = 0.20, 1.3, 0.6
RAISES = 4  # of a least budget, by what a plan was measured to take, or by a hundredth


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured in one process: a variant beside plain, or remat beside a peer."""

    model: str
    variant: str
    against: str = PLAIN.name
    threads: int = 1


def peers(model: str) -> tuple[str, ...]:
    """Name what remat is held against; of a U-Net nobody slices anything by hand."""
    return ("checkpoint per block", "inductor") if model == UNET else (*BY_HAND, *COMPILED)


def cells(models: list[str]) -> list[Cell]:
    """List all rows."""
    return [
        cell
        for model in models
        for cell in (
            *(Cell(model, name) for name in (*peers(model), LEAST_WHOLE, LEAST)),
            *(Cell(model, "remat", name) for name in peers(model)),
        )
    ]


def compiled(chunker: bool) -> Callable[[nn.Module], nn.Module]:
    """Compile with Inductor, which may chunk a loss of the last dimension's many values."""

    def make(model: nn.Module) -> nn.Module:
        torch._inductor.config.auto_chunker.enable = chunker
        compiled_model: nn.Module = torch.compile(model)  # type: ignore[assignment]
        return compiled_model

    return make


def peer(name: str, model: str, tiny: bool) -> Runner:
    """Set up plain or a peer."""
    if name in COMPILED:
        return Runner(Variant(name, compiled(COMPILED[name])), build(model, ByHand(), tiny=tiny))
    by_hand = BY_HAND.get(name, ByHand())
    if model == UNET and by_hand.blocks:
        return Runner(Variant(name, checkpoint_blocks), build(model, ByHand(), tiny=tiny))
    return Runner(Variant(name, PLAIN.make), build(model, by_hand, tiny=tiny))


def within(example: Example, budget: int, *, slices: bool) -> Runner:
    """Set up remat within a budget in bytes."""
    numerics = "rounding" if slices else None
    return Runner(
        Variant(
            f"remat within {budget}",
            lambda model: remat.rematerialize(
                model, example.args, example.kwargs,
                budget=budget, loss=example.loss, numerics=numerics,
            ),
        ),
        example,
    )  # fmt: skip


def at_the_least(example: Example, *, slices: bool) -> Runner:
    """Set up remat within the least budget that it says is enough, or as little above as works."""
    budget = 1
    for _ in range(RAISES):
        try:
            return within(example, budget, slices=slices)
        except remat.BudgetTooSmall as error:
            budget = error.smallest_bytes
        except remat.BudgetExceeded as error:
            budget = max(error.peak_bytes, budget + budget // 100)
    return within(example, budget, slices=slices)


def measure(cell: Cell, rounds: int, tiny: bool) -> Record:
    """Measure a cell in this process."""
    torch.set_num_threads(cell.threads)
    other = peer(cell.against, cell.model, tiny)
    example = build(cell.model, ByHand(), tiny=tiny)
    held = sum(p.numel() * p.element_size() for p in example.model.parameters())
    try:
        if cell.variant in (LEAST, LEAST_WHOLE):
            one = at_the_least(example, slices=cell.variant == LEAST)
        elif cell.variant == "remat":
            one = within(example, other.peak_bytes, slices=True)
        else:
            one = peer(cell.variant, cell.model, tiny)
    except (remat.BudgetTooSmall, remat.BudgetExceeded) as error:
        return {"out_of_reach": str(error).partition("\n")[0], "peak_bytes": other.peak_bytes}
    pair = compare(one, other, rounds)
    beyond = (pair.one.peak_bytes - held) / (pair.other.peak_bytes - held)
    return {**asdict(pair), "peak_ratio": pair.peak_ratio, "gradients": held, "beyond": beyond}


def run(cell: Cell, rounds: int, tiny: bool) -> Record:
    """Measure a cell in a process of its own; what it fails with is its result."""
    start = time.perf_counter()
    try:
        result = run_alone(measure, cell, rounds, tiny, timeout_seconds=TIMEOUT_SECONDS)
    except Ended as error:
        result = {"error": str(error)}
    return {**asdict(cell), **result, "rounds": rounds, "wall_seconds": time.perf_counter() - start}


def misses(rows: list[Record]) -> list[str]:
    """Say what does not hold of what must."""
    missed: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model and "error" not in row]
        for row in (row for row in of_model if row["variant"] == "remat"):
            if outcome(row) in ("slower", "out of reach"):
                missed.append(f"{model}: {outcome(row)} at the peak of {row['against']}")
        beside_plain = {
            row["variant"]: row
            for row in of_model
            if row["against"] == PLAIN.name and "beyond" in row
        }
        least = beside_plain.pop(LEAST, None)
        beside_plain.pop(LEAST_WHOLE, None)
        if least is None:
            continue
        lowest = min((row["beyond"] for row in beside_plain.values()), default=1.0)
        if least["beyond"] > GOAL_BEYOND * lowest:
            missed.append(f"{model}: {least['beyond']:.3f} beyond gradients, a peer's {lowest:.3f}")
        reached = least["peak_ratio"] <= GOAL_PEAK and least["time_ratio"] <= GOAL_TIME
        if model == MODELS[0] and not reached:
            missed.append(
                f"{model}: {least['peak_ratio']:.3f} / {least['time_ratio']:.2f} of plain"
            )
    return missed


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are kept")
    parser.add_argument("--quick", action="store_true", help="tiny models: a smoke test, not kept")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--only", default="*", help="such as 'remat*' or 'inductor*'")
    parser.add_argument("--rounds", type=int, metavar="N", help="7; 1 with --quick")
    parser.add_argument("--resume", action="store_true", help="keep rows of other commits")
    parser.add_argument("--fresh", action="store_true", help="keep no rows")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 7)
    if options.rounds < 1:
        parser.error("--rounds is 1 or more")
    return options


def main() -> int:
    """Measure what is not known yet, print and write; 1 if a row failed or a goal is missed."""
    options = read_options()
    path = options.json or (None if options.quick else RESULTS)
    keep = "none" if options.fresh else "all" if options.resume else "of this commit"
    records = Records(path, keep=keep)
    chosen = [
        cell
        for cell in cells(list(options.models))
        if any(fnmatch.fnmatch(name, options.only) for name in (cell.variant, cell.against))
    ]
    pending = [cell for cell in chosen if not records.has(asdict(cell))]
    for left, cell in zip(range(len(pending) - 1, -1, -1), pending, strict=True):
        record = run(cell, options.rounds, options.quick)
        records.add(record)
        beyond = f"; beyond gradients {record['beyond']:.3f}" if "beyond" in record else ""
        print(f"{cell.model}, {shown(record)}{beyond}; {left} left", flush=True)
    rows = [records.get(asdict(cell)) for cell in chosen]
    print_records(rows)
    missed = misses(rows)
    print("missed: " + ("; ".join(missed) or "nothing"))
    return int(bool(missed and not options.quick) or any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
