"""remat beside what a user would pick instead, on three models without dropout.

Peak and time relative to plain autograd: `torch.utils.checkpoint` around every block,
torch.compile's `activation_memory_budget` (backend aot_eager, so that both sides run the same
kernels), and `remat.rematerialize` at fractions of the plain peak.

Is remat faster than each peer at a measured peak no higher than the peer's? The peers are set up
first, for their peaks. For each, remat gets the peer's peak as its budget, 1.0 of the plain peak
if that is lower; less if the peak then measured is above the peer's, and, once, more if it is over
1% below (a budget covers outputs that the caller of a model may keep, even where this one drops
them). Then all variants take turns, one step each per round. The time ratio of a verdict is the
median over rounds of ours to theirs within a round, with the quartiles as a measure of the noise.
Exit code 1 if remat is behind anywhere, fails, or cannot reach a peer's peak; with `--quick`, where
times mean nothing, only if it fails.

    python benchmarks/peers.py [--json FILE] [--quick] [--models NAME ...] [--rounds N]
        [--threads N]
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import remat
import zoo
from comparison import Comparison, Figures, Variant, print_table, write_json
from zoo import Example

BUDGETS_COMPILE = (1.0, 0.8, 0.5, 0.3, 0.1, 0.0)
BUDGETS_REMAT = (0.8, 0.65, 0.5, 0.4, 0.3)
CLOSE = 0.99  # of a peer's peak: not worth another plan
LOWER = 0.005  # of a budget, below what would have been enough
LOWERINGS = 3
NEAR = 0.01  # of the plain peak: a fixed fraction this near to one measured already is left out
TOO_SMALL = ("BudgetTooSmall", "BudgetExceeded")
BLOCKS = ("GPT2Block", "Convolutions", "TransformerEncoderLayer", "TransformerDecoderLayer")


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Checkpoint every block of the model, in place, as a user would."""
    blocks = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    assert blocks
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def compiled(budget: float) -> Callable[[nn.Module], nn.Module]:
    """Compile under an `activation_memory_budget`.

    Dynamo keeps compiled code by backend, so that each budget needs a backend object of its own.
    The partitioner, which runs within the backend, reads the budget.
    """

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return aot_eager(graph, inputs)

    def make(model: nn.Module) -> nn.Module:
        compiled_model: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]
        return compiled_model

    return make


def rematerialized(example: Example, budget: float) -> Variant:
    """Rematerialize under a fraction of the plain peak."""
    return Variant(
        f"remat {budget}",
        lambda model: remat.rematerialize(model, example.args, example.kwargs, budget=budget),
    )


def peers() -> list[Variant]:
    """List what remat is held against."""
    found = [Variant("checkpoint per block", checkpoint_blocks)]
    found += [Variant(f"memory budget {b}", compiled(b)) for b in BUDGETS_COMPILE]
    return found


@dataclass(frozen=True, slots=True)
class Attempt:
    """remat under a fraction of the plain peak, with what was measured."""

    budget: float
    row: Figures

    def over_bytes(self, peak_bytes: int) -> int | None:
        """Subtract a peak from the measured one; `None` if remat failed."""
        return None if self.row.peak_bytes is None else self.row.peak_bytes - peak_bytes

    def close_to(self, peak_bytes: int) -> bool:
        """Tell whether it is not above a peak, and a larger budget would gain next to nothing."""
        over = self.over_bytes(peak_bytes)
        if over is None or over > 0:
            return False
        return self.budget == 1.0 or -over <= (1 - CLOSE) * peak_bytes


class Attempts:
    """remat under one budget after another, no budget twice."""

    def __init__(self, comparison: Comparison, example: Example) -> None:
        self._comparison = comparison
        self._example = example
        self._plain_bytes = comparison.first_peak_bytes
        self._made: dict[float, Attempt] = {}

    def at(self, budget: float) -> Attempt:
        """Run under this budget, rounded down, unless that was done."""
        budget = min(1.0, math.floor(budget * 1e4 + 1e-6) / 1e4)
        if budget not in self._made:
            row = self._comparison.add(rematerialized(self._example, budget))
            self._made[budget] = Attempt(budget, row)
        return self._made[budget]

    def reach(self, peak_bytes: int) -> Attempt:
        """Find a budget whose measured peak is no higher than a peer's, and close to it.

        If there is none, the attempt returned failed or is over the peak.
        """
        for attempt in self._made.values():
            if attempt.close_to(peak_bytes):
                return attempt
        attempt = self.at(peak_bytes / self._plain_bytes)
        for _ in range(LOWERINGS):
            over = attempt.over_bytes(peak_bytes)
            if over is None or over <= 0:
                break
            attempt = self.at((1 - LOWER) * attempt.budget - over / self._plain_bytes)
        else:
            return attempt
        over = attempt.over_bytes(peak_bytes)
        if over is None or attempt.close_to(peak_bytes):
            return attempt
        more = self.at(attempt.budget - over / self._plain_bytes)
        over = more.over_bytes(peak_bytes)
        return attempt if over is None or over > 0 else more

    def keep(self, names: Collection[str]) -> None:
        """Drop all that are not of these names: no peer is held against them."""
        for budget, attempt in list(self._made.items()):
            if attempt.row.name not in names:
                self._comparison.drop(attempt.row.name)
                del self._made[budget]

    def fill(self, budgets: Sequence[float]) -> None:
        """Run under the budgets that are near to none so far, for the rest of the curve."""
        for budget in budgets:
            if all(abs(budget - made) > NEAR for made in self._made):
                self.at(budget)


Outcome = Literal["ahead", "behind", "cannot reach that peak", "remat failed", "peer failed"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One peer, and remat at a peak no higher.

    `time_ratio` is ours to theirs, the median over rounds, and `quartiles` are the first and third.
    """

    peer: str
    outcome: Outcome
    peak_bytes: int | None = None
    seconds: float | None = None
    ours: str | None = None
    our_peak_bytes: int | None = None
    our_seconds: float | None = None
    time_ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    error: str | None = None

    @property
    def shown(self) -> str:
        """Say the outcome, and by how much."""
        if self.time_ratio is None or self.quartiles is None:
            return self.outcome
        sure = max(self.quartiles) < 1 or min(self.quartiles) > 1
        return f"{self.outcome} by {100 * abs(self.time_ratio - 1):.1f}%" + (
            "" if sure else ", within the noise"
        )


def judge(comparison: Comparison, peer: Figures, ours: Figures | None) -> Verdict:
    """Hold one peer against remat, once both are timed."""
    if peer.error is not None or ours is None:
        return Verdict(peer.name, "peer failed", error=peer.error)
    theirs = Verdict(peer.name, "remat failed", peer.peak_bytes, peer.seconds, ours.name)
    if ours.error is not None:
        too_small = ours.error.startswith(TOO_SMALL)
        outcome: Outcome = "cannot reach that peak" if too_small else "remat failed"
        return replace(theirs, outcome=outcome, error=ours.error)
    theirs = replace(theirs, our_peak_bytes=ours.peak_bytes, our_seconds=ours.seconds)
    assert ours.peak_bytes is not None
    assert peer.peak_bytes is not None
    if ours.peak_bytes > peer.peak_bytes:
        return replace(theirs, outcome="cannot reach that peak")
    ratios = comparison.ratios(ours.name, peer.name)
    ratio = statistics.median(ratios)
    several = ratios if len(ratios) > 1 else ratios * 2
    quarters = statistics.quantiles(several, n=4, method="inclusive")
    return replace(
        theirs,
        outcome="ahead" if ratio < 1 else "behind",
        time_ratio=ratio,
        quartiles=(quarters[0], quarters[2]),
    )


def measure(example: Example, rounds: int) -> tuple[list[Figures], list[Verdict]]:
    """Measure the peers' peaks, find budgets for remat, time everything and judge."""
    comparison = Comparison(example, Variant("plain", lambda model: model))
    attempts = Attempts(comparison, example)
    ours: dict[str, str | None] = {}
    for peer in [comparison.add(variant) for variant in peers()]:
        reached = None if peer.peak_bytes is None else attempts.reach(peer.peak_bytes)
        ours[peer.name] = None if reached is None else reached.row.name
    attempts.keep({name for name in ours.values() if name is not None})
    attempts.fill(BUDGETS_REMAT)
    figures = comparison.run(rounds)
    rows = {row.name: row for row in figures}
    return figures, [
        judge(comparison, rows[peer], None if name is None else rows[name])
        for peer, name in ours.items()
    ]


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print how one model's peers compare."""
    print(
        f"\n{'at a peak no higher':22}{'theirs MiB':>10}{'ms':>8}{'ours MiB':>10}{'ms':>8}"
        f"{'ours/theirs (quartiles)':>25}"
    )
    for row in verdicts:
        spread = ""
        if row.time_ratio is not None and row.quartiles is not None:
            spread = f"{row.time_ratio:.3f} ({row.quartiles[0]:.3f}-{row.quartiles[1]:.3f})"
        print(
            f"{row.peer:22}{_mib(row.peak_bytes):>10}{_ms(row.seconds):>8}"
            f"{_mib(row.our_peak_bytes):>10}{_ms(row.our_seconds):>8}{spread:>25}  {row.shown}"
        )
        if row.error is not None:
            print(f"{'':22}{row.error[:100]}")


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def lost(verdicts: Mapping[str, Sequence[Verdict]], outcomes: Sequence[Outcome]) -> list[str]:
    """List the verdicts with such an outcome, worst first."""
    found = [
        (row.time_ratio or math.inf, f"{name}: {row.peer}: {row.shown}")
        for name, rows in verdicts.items()
        for row in rows
        if row.outcome in outcomes
    ]
    return [text for _, text in sorted(found, reverse=True)]


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, three rounds: a smoke test"
    )
    parser.add_argument("--models", nargs="+", choices=zoo.PEERS, default=zoo.PEERS, metavar="NAME")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="timed steps of each variant (15; 3 with --quick)"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = 3 if options.quick else 15
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least one is needed")
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 4 * len(BUDGETS_COMPILE)
    results: dict[str, list[Figures]] = {}
    verdicts: dict[str, list[Verdict]] = {}
    for name in options.models:
        example = zoo.build(name, "tiny" if options.quick else "peers")
        results[name], verdicts[name] = measure(example, options.rounds)
        print_table(name, results[name])
        print_verdicts(verdicts[name])
        if options.json:
            shown = {model: [asdict(row) for row in rows] for model, rows in verdicts.items()}
            write_json(
                options.json, results, quick=options.quick, rounds=options.rounds, verdicts=shown
            )
    failed = lost(verdicts, ["remat failed"])
    behind = lost(verdicts, ["behind", "cannot reach that peak"])
    print(f"\nnot ahead: {'; '.join(failed + behind) or 'nowhere'}")
    return int(bool(failed or (behind and not options.quick)))


if __name__ == "__main__":
    sys.exit(main())
