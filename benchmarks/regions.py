"""What splitting a model into regions costs, and what the front door takes.

Each model of the zoo trains as one region and by blocks, at the same budgets, the last of them the
smallest that both can keep to: the overhead that each plan predicts and its bound, and the time of
a step of one as a ratio to the other, measured in turns in one process. Beside it: seconds to plan,
the time that checking a call takes, and steps of changing lengths, with how many plans they make
and what stays in memory.

    python benchmarks/regions.py [--models gpt2 ...] [--shares 0.7 0.5] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import remat
from isolation import run_alone
from provenance import write_results
from remat.session.region import Region
from remat.session.session import Session
from remat_exec import measure_peak
from zoo import Example, Size, build

RESULTS = Path(__file__).parent / "results" / "regions.json"
BLOCKS = {
    "gpt2": "transformer.h.*",
    "gpt2-no-dropout": "transformer.h.*",
    "resnet": ["[2-7]"],
    "unet": ["down.*", "up.*"],
    "transformer": ["encoder.layers.*", "decoder.layers.*"],
    "transformer-no-dropout": ["encoder.layers.*", "decoder.layers.*"],
    "t5": ["encoder.block.*", "decoder.block.*"],
    "inplace": "blocks.*",
}
ROUNDS = 7
CHECK_SECONDS = 300.0
LIMIT_SECONDS: dict[Size, float] = {"tiny": 1.0, "medium": 10.0}


def main() -> int:
    """Run what was asked for, print it as tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--shares", nargs="*", type=float, default=[0.7, 0.5])
    parser.add_argument("--quick", action="store_true", help="tiny models, few lengths; not kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shares = args.shares[:1] if args.quick else args.shares
    size: Size = "tiny" if args.quick else "medium"
    print(f"{'model':<22}{'budget':>9}{'plain':>7}{'whole':>19}{'blocks':>19}{'time':>7} planning")
    rows = [row for name in args.models for row in _compare(name, shares, size)]
    layers = 2 if args.quick else 12
    check = run_alone(_check_of_a_call, layers, timeout_seconds=CHECK_SECONDS)
    print(f"checking a call of a {layers}-layer GPT-2: {1e3 * check:.3f} ms")
    lengths = _lengths(3 if args.quick else 50, 12 if args.quick else 2000)
    print(
        f"{lengths['steps']} steps of {lengths['lengths']} lengths: {lengths['solved']} solved, "
        f"{lengths['plans']} plans, {lengths['later_plans']} after the first pass, which took the "
        f"processor {lengths['first_pass_processor_seconds']:.1f} s; resident memory grew by "
        f"{lengths['grown_mib']:.1f} MiB after it"
    )
    if not args.quick:
        found = {"regions": rows, "check_seconds": check, "lengths": lengths}
        write_results(RESULTS, found)
    return 0


def _compare(name: str, shares: list[float], size: Size) -> list[dict[str, Any]]:
    example = build(name, size)
    plain = _peak(example, copy.deepcopy(example.model))
    kinds = {"whole": None, "blocks": BLOCKS[name]}
    budgets = {f"{share:g}": int(share * plain) for share in shares}
    limit = LIMIT_SECONDS[size]
    budgets["smallest"] = max(_smallest(example, regions, limit) for regions in kinds.values())
    rows = []
    for shown, budget in budgets.items():
        row: dict[str, Any] = {"model": name, "share": shown, "budget_bytes": budget}
        row["of_plain"] = budget / plain
        made = {}
        for kind, regions in kinds.items():
            try:
                made[kind], row[kind] = _planned(example, budget, regions, limit)
            except remat.BudgetTooSmall as error:
                row[kind] = {"smallest_bytes": error.smallest_bytes}
        if len(made) == len(kinds):
            row["ratio"] = _ratio(example, made["blocks"], made["whole"])
        rows.append(row)
        _print([row])
    return rows


def _planned(
    example: Example, budget: int, regions: Any, limit: float
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Train until the plan is made; give the model, and what was seen."""
    start = time.perf_counter()
    made = remat.rematerialize(
        copy.deepcopy(example.model), budget=budget, regions=regions, limit_seconds=limit
    )
    spent = 0.0
    for _ in range(5):
        step = time.perf_counter()
        _step(example, made)
        spent = time.perf_counter() - step
    plan: Any = made.plan
    return made, {
        "planning_seconds": time.perf_counter() - start - 5 * spent,
        "predicted_overhead": plan.predicted_overhead,
        "bound_overhead": plan.bound_overhead,
        "peak_bytes": _peak(example, made),
    }


def _smallest(example: Example, regions: Any, limit: float) -> int:
    """Find the smallest budget that an error names."""
    model = remat.rematerialize(
        copy.deepcopy(example.model), budget=1, regions=regions, limit_seconds=limit
    )
    for _ in range(5):
        try:
            _step(example, model)
        except remat.BudgetTooSmall as error:
            return int(error.smallest_bytes)
    raise RuntimeError(f"{example.name} trains within a byte")


def _step(example: Example, model: torch.nn.Module) -> None:
    model.zero_grad()
    example.step(model)


def _peak(example: Example, model: torch.nn.Module) -> int:
    _step(example, model)
    model.zero_grad()
    with measure_peak() as peak:
        _step(example, model)
    return peak.peak_bytes


def _ratio(example: Example, one: torch.nn.Module, other: torch.nn.Module) -> float:
    ratios = []
    for _ in range(ROUNDS):
        taken = []
        for model in (one, other):
            start = time.perf_counter()
            _step(example, model)
            taken.append(time.perf_counter() - start)
        ratios.append(taken[0] / taken[1])
    return statistics.median(ratios)


def _gpt2(layers: int, **sizes: int) -> Any:
    config = transformers.GPT2Config(
        n_layer=layers, vocab_size=100, n_positions=64, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes,
    )  # fmt: skip
    model: Any = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def _check_of_a_call(layers: int) -> float:
    """Time a forward whose only region gives what it gave before: what is left is the check."""
    torch.set_num_threads(1)
    model = remat.rematerialize(
        _gpt2(layers, n_embd=8, n_head=1), budget="1GiB", solver="store-all"
    )
    tokens = torch.zeros(1, 4, dtype=torch.long)
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
    run, given = Session.call, []

    def noted(session: Session, region: Region, inputs: Any) -> Any:
        given.append(run(session, region, inputs))
        return given[-1]

    def again(session: Session, region: Region, inputs: Any) -> Any:
        session.times_met += 1
        return given[-1]

    times = []
    try:
        setattr(Session, "call", noted)  # noqa: B010
        model(tokens, labels=tokens)
        setattr(Session, "call", again)  # noqa: B010
        for _ in range(300):
            start = time.perf_counter()
            model(tokens, labels=tokens)
            times.append(time.perf_counter() - start)
    finally:
        setattr(Session, "call", run)  # noqa: B010
    return statistics.median(times)


def _lengths(lengths: int, steps: int) -> dict[str, Any]:
    """Train on changing lengths; the first pass sees each once."""
    model = remat.rematerialize(_gpt2(2, n_embd=16, n_head=2), budget="64MiB", limit_seconds=1)
    plans: dict[int, Any] = {}
    later, after_first, start, first_pass = 0, 0.0, time.process_time(), 0.0
    for step in range(steps):
        tokens = torch.zeros(2, 8 + step % lengths, dtype=torch.long)
        model(tokens, labels=tokens).loss.backward()
        model.zero_grad()
        if id(model.plan) not in plans:
            plans[id(model.plan)] = model.plan
            later += step >= 2 * lengths
        if step == lengths - 1:
            first_pass = time.process_time() - start
        if step == 2 * lengths:
            after_first = _resident()
    solved = sum(plan.solution.solver != "known schedule" for plan in plans.values())
    grown = _resident() - after_first
    return {
        "lengths": lengths, "steps": steps, "plans": len(plans), "solved": solved,
        "later_plans": later, "grown_mib": grown, "first_pass_processor_seconds": first_pass,
    }  # fmt: skip


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        shown, over = [], False
        for kind in ("whole", "blocks"):
            found = row[kind]
            if "smallest_bytes" in found:
                shown.append(f"needs {found['smallest_bytes'] / 2**20:.1f} MiB")
                continue
            bound = 100 * (found["bound_overhead"] or 0)
            shown.append(f"{100 * found['predicted_overhead']:.2f} ({bound:.2f})")
            over |= found["peak_bytes"] > row["budget_bytes"]
        seconds = "/".join(
            f"{row[kind]['planning_seconds']:.0f}" if "planning_seconds" in row[kind] else "-"
            for kind in ("whole", "blocks")
        )
        ratio = f"{row['ratio']:.3f}" if "ratio" in row else "-"
        print(
            f"{row['model']:<22} {row['share']:>8} {row['of_plain']:>6.2f} {shown[0]:>18} "
            f"{shown[1]:>18} {ratio:>6} {seconds:>8} s{' OVER' if over else ''}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
