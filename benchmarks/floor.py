"""Below what any schedule of whole values reaches: remat with slices beside slices by hand.

The models are those whose logits, feed-forward parts or images are most of a step. Peers are what
a user would write: checkpoint per block, with the loss in slices, with feed-forward parts in
slices, too, torch's `linear_cross_entropy`, and Inductor, also with its chunking of a loss. Each
row is measured in a process of its own:

- beside plain: every peer; remat at the least it finds, without and with slices; remat and a peer
  with an optimizer in the backward, whose gradients leave at once, beside plain whose stay;
- beside a peer, whose measured peak is the budget: remat with slices; beside one that compiles also
  with compiled groups of operators.

`beyond` is what is held beyond the gradients of parameters, beside the same of plain, or of the
peer. What must hold: remat not slower than a peer at its peak; at its least, `beyond` at most 0.6
of the lowest peer's; and of "32,000 words" a peak of 0.20 of plain in at most 1.3 of its time, with
an optimizer in the backward 0.10. That optimizer, an SGD, is part of the time then. Its rate is
zero: the weights stay those of plain.

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
from torch import Tensor, nn

import remat
from comparison import PLAIN, Runner, Variant, compare
from floor_models import MODELS, UNET, ByHand, build
from isolation import Ended, run_alone
from peer_table import Record, Records, outcome, print_records, shown
from peers import GROUPS, checkpoint_blocks
from zoo import Example

RESULTS = Path(__file__).parent / "results" / "floor.json"
TIMEOUT_SECONDS = 1500.0
REMAT = "remat"
LEAST, LEAST_WHOLE = "remat, the least", "remat, the least without slices"
BY_HAND = {
    "checkpoint per block": ByHand(blocks=True),
    "checkpoint, loss in slices": ByHand(blocks=True, loss="slices"),
    "checkpoint, loss and MLP in slices": ByHand(blocks=True, loss="slices", mlp_in_slices=True),
    "checkpoint, linear_cross_entropy": ByHand(blocks=True, loss="linear_cross_entropy"),
    "linear_cross_entropy": ByHand(loss="linear_cross_entropy"),
}
IN_BACKWARD = "an optimizer in the backward"
LEAST_LEAVING = f"{LEAST}, {IN_BACKWARD}"
BY_HAND_LEAVING = f"checkpoint, loss in slices, {IN_BACKWARD}"
COMPILED = {"inductor": False, "inductor, auto chunker": True}
GOAL_PEAK, GOAL_TIME, GOAL_BEYOND, GOAL_LEAVING = 0.20, 1.3, 0.6, 0.10
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
    if model == UNET:
        return "checkpoint per block", "inductor"
    return *BY_HAND, *COMPILED, BY_HAND_LEAVING


def cells(models: list[str]) -> list[Cell]:
    """List all rows."""
    return [
        cell
        for model in models
        for cell in (
            *(Cell(model, name) for name in (*peers(model), LEAST_WHOLE, LEAST, LEAST_LEAVING)),
            *(Cell(model, REMAT, name) for name in peers(model)),
            *(Cell(model, GROUPS, name) for name in peers(model) if name in COMPILED),
        )
    ]


def compiled(chunker: bool) -> Callable[[nn.Module], nn.Module]:
    """Compile with Inductor, which may chunk a loss of the last dimension's many values."""

    def make(model: nn.Module) -> nn.Module:
        torch._inductor.config.auto_chunker.enable = chunker
        compiled_model: nn.Module = torch.compile(model)  # type: ignore[assignment]
        return compiled_model

    return make


class InBackward:
    """An optimizer for each parameter of a model, which steps once its gradient is there."""

    def __init__(self, model: nn.Module) -> None:
        self._optimizers = {p: torch.optim.SGD([p], lr=0.0) for p in model.parameters()}
        self._noted: dict[Tensor, Tensor] | None = None
        for parameter in self._optimizers:
            parameter.register_post_accumulate_grad_hook(self._step)  # type: ignore[no-untyped-call]

    def _step(self, parameter: nn.Parameter) -> None:
        self._optimizers[parameter].step()
        if self._noted is not None and parameter.grad is not None:
            self._noted[parameter] = parameter.grad.clone()
        parameter.grad = None

    def gradients_of(self, runner: Runner) -> list[Tensor]:
        """Run a step, and give the gradients that came."""
        self._noted = {}
        runner.step()
        noted, self._noted = self._noted, None
        return [noted.get(p, torch.zeros_like(p)) for p in self._optimizers]


def set_up(
    name: str, make: Callable[[nn.Module], nn.Module], example: Example, *, in_backward: bool
) -> Runner:
    """Set up a variant, with an optimizer in its backward or without."""
    if not in_backward:
        return Runner(Variant(name, make), example)
    stepping: list[InBackward] = []

    def make_stepping(model: nn.Module) -> nn.Module:
        stepping.append(InBackward(model))
        return make(model)

    runner = Runner(Variant(name, make_stepping), example)
    runner.gradients = stepping[0].gradients_of(runner)
    return runner


def peer(name: str, model: str, tiny: bool) -> Runner:
    """Set up plain or a peer."""
    in_backward = name == BY_HAND_LEAVING
    by_hand = BY_HAND.get(name.removesuffix(f", {IN_BACKWARD}"), ByHand())
    make = compiled(COMPILED[name]) if name in COMPILED else PLAIN.make
    if model == UNET and by_hand.blocks:
        make, by_hand = checkpoint_blocks, ByHand()
    return set_up(name, make, build(model, by_hand, tiny=tiny), in_backward=in_backward)


def within(
    example: Example,
    budget: int,
    *,
    slices: bool = True,
    groups: bool = False,
    in_backward: bool = False,
) -> Runner:
    """Set up remat within a budget in bytes."""
    numerics = "rounding" if slices else None

    def make(model: nn.Module) -> nn.Module:
        return remat.rematerialize(
            model, example.args, example.kwargs,
            budget=budget, loss=example.loss, numerics=numerics,
            kernels="inductor" if groups else "eager", wait=groups,
        )  # fmt: skip

    return set_up(f"remat within {budget}", make, example, in_backward=in_backward)


def at_the_least(example: Example, *, slices: bool, in_backward: bool = False) -> Runner:
    """Set up remat within the least budget that it says is enough, or as little above as works."""
    budget = 1
    for _ in range(RAISES):
        try:
            return within(example, budget, slices=slices, in_backward=in_backward)
        except remat.BudgetTooSmall as error:
            budget = error.smallest_bytes
        except remat.BudgetExceeded as error:
            budget = max(error.peak_bytes, budget + budget // 100)
    return within(example, budget, slices=slices, in_backward=in_backward)


def measure(cell: Cell, rounds: int, tiny: bool) -> Record:
    """Measure a cell in this process."""
    torch.set_num_threads(cell.threads)
    other = peer(cell.against, cell.model, tiny)
    example = build(cell.model, ByHand(), tiny=tiny)
    held = sum(p.numel() * p.element_size() for p in example.model.parameters())
    leaving = IN_BACKWARD in cell.variant + cell.against
    try:
        if cell.variant in (LEAST, LEAST_WHOLE, LEAST_LEAVING):
            slices = cell.variant != LEAST_WHOLE
            one = at_the_least(example, slices=slices, in_backward=leaving)
        elif cell.variant in (REMAT, GROUPS):
            groups = cell.variant == GROUPS
            one = within(example, other.peak_bytes, groups=groups, in_backward=leaving)
        else:
            one = peer(cell.variant, cell.model, tiny)
    except (remat.BudgetTooSmall, remat.BudgetExceeded) as error:
        return {"out_of_reach": str(error).partition("\n")[0], "peak_bytes": other.peak_bytes}
    pair = compare(one, other, rounds)
    if leaving:  # no gradients are left behind
        return {**asdict(pair), "peak_ratio": pair.peak_ratio}
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
        for row in (row for row in of_model if row["variant"] in (REMAT, GROUPS)):
            if outcome(row) in ("slower", "out of reach"):
                name = f"{row['variant']} {outcome(row)} at the peak of {row['against']}"
                missed.append(f"{model}: {name}")
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
        leaving = next((row for row in of_model if row["variant"] == LEAST_LEAVING), None)
        if model == MODELS[0] and leaving and leaving.get("peak_ratio", 1.0) > GOAL_LEAVING:
            missed.append(f"{model}: over {GOAL_LEAVING} of plain with {IN_BACKWARD}")
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
