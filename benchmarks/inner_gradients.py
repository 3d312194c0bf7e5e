"""Models whose forward computes gradients, beside what a user would pick instead.

A force field, a physics-informed loss, a critic with a penalty on its slope, and two inner steps:
plain; `torch.utils.checkpoint` around every block; `torch.compile` on aot_eager, which recomputes
by a minimum cut, at an `activation_memory_budget` of 1.0, 0.5 and 0.3, with
`torch._dynamo.config.trace_autograd_ops`; and remat at shares of plain's peak, at the least that it
names, and at each peer's peak. Each stands with plain, or remat with a peer, in a process of its
own; see `peers.py` for how.

    python benchmarks/inner_gradients.py [--models NAME ...] [--rounds N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config

import peers
import remat
from comparison import PLAIN, Runner, Variant, compare
from inner_gradient_models import BLOCKS, MODELS, build
from isolation import Ended, run_alone
from peer_table import shown
from provenance import write_results

RESULTS = Path(__file__).parent / "results" / "inner_gradients.json"
TIMEOUT_SECONDS = 600.0
SHARES = (0.8, 0.6, 0.5)
LEAST = "remat, the least"
COMPILED = {f"aot_eager {share}": share for share in (1.0, 0.5, 0.3)}
PEERS = (peers.CHECKPOINT, *COMPILED)


def least_bytes(name: str) -> int:
    """Ask for the smallest budget that a plan is found for."""
    example = build(name)
    try:
        remat.rematerialize(example.model, example.args, budget=1, loss=example.loss)
    except remat.BudgetTooSmall as error:
        return error.smallest_bytes
    raise AssertionError("one byte was enough")


def variant(name: str, of: str) -> Variant:
    """Find what is to be measured by its name."""
    if of == peers.CHECKPOINT:
        return Variant(of, lambda model: peers.checkpoint_blocks(model, BLOCKS))
    if of in COMPILED:
        return Variant(of, peers.compiled("aot_eager", COMPILED[of]))
    budget = least_bytes(name) if of == LEAST else float(of.removeprefix("remat "))
    return peers.rematerialized(build(name), budget, peers.EAGER)


def measure(name: str, of: str, against: str, rounds: int) -> dict[str, Any]:
    """Measure a variant beside plain, or remat within the peak of a peer beside it."""
    torch.set_num_threads(1)
    torch._dynamo.config.trace_autograd_ops = True  # for torch.compile
    example = build(name)
    if against == PLAIN.name:
        other = Runner(PLAIN, example)
        one = Runner(variant(name, of), example)
    else:
        other = Runner(variant(name, against), example)
        try:
            one = peers.reach(example, other.peak_bytes, peers.EAGER)
        except (remat.BudgetTooSmall, remat.BudgetExceeded) as error:
            return {"out_of_reach": str(error).partition("\n")[0]}
    pair = compare(one, other, rounds)
    return {**asdict(pair), "peak_ratio": pair.peak_ratio}


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="9")
    parser.add_argument("--quick", action="store_true", help="one model, not kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are kept")
    options = parser.parse_args()
    models = options.models[:1] if options.quick else options.models
    rounds = options.rounds
    asked = [(of, PLAIN.name) for of in (*PEERS, *(f"remat {share}" for share in SHARES), LEAST)]
    asked += [("remat", peer) for peer in PEERS]
    rows = list[dict[str, Any]]()
    for name in models:
        for of, against in asked:
            row: dict[str, Any] = {"model": name, "variant": of, "against": against}
            try:
                row |= run_alone(
                    measure, name, of, against, rounds, timeout_seconds=TIMEOUT_SECONDS
                )
            except Ended as error:
                row["error"] = str(error)
            rows.append(row)
            print(f"{name}, {shown(row)}", flush=True)
            path = options.json or (None if options.quick else RESULTS)
            if path is not None:
                write_results(path, {"rounds": rounds, "rows": rows})
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
