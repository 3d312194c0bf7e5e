"""The least budgets of large language models on an H100, planned without their data.

Each is built from its configuration on the meta device; costs are estimates for the device. Told is
the least budget that a plan is found for, and what none goes below: of whole values; in slices,
with the logits not made (`outputs="loss"`); and that with an optimizer in the backward, so that
gradients leave at once.

    python benchmarks/dry_floor.py [--models NAME ...] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import remat
from isolation import Ended, run_alone
from provenance import write_results

RESULTS = Path(__file__).parent / "results" / "dry_floor.json"
TIMEOUT_SECONDS = 1200.0
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in slices": {"numerics": "rounding", "outputs": "loss"},
    "in slices, gradients leave": {
        "numerics": "rounding", "outputs": "loss", "optimizer_in_backward": True,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """A model type of transformers with its sizes, and the batch; `goal` is in GiB, by way."""

    kind: str
    settings: dict[str, Any]
    batch: int
    tokens: int
    dtype: torch.dtype
    goals: dict[str, float]


SHAPES = {
    "GPT-2, 8 x 1,024": Shape("gpt2", {}, 8, 1024, torch.float32, {"in slices": 1.8}),
    "Qwen3-0.6B, 1 x 16,384": Shape(
        "qwen3",
        {
            "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "tie_word_embeddings": True,
        },
        1, 16_384, torch.bfloat16, {"in slices": 4.0},
    ),
    "Llama-3-8B, 1 x 8,192": Shape(
        "llama",
        {
            "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        },
        1, 8192, torch.bfloat16, {"in slices, gradients leave": 4.0},
    ),
}  # fmt: skip


def measure(name: str, way: str, layers: int | None) -> dict[str, Any]:
    """Look for the least budget of a model in this process."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - it takes seconds

    shape = SHAPES[name]
    settings = shape.settings | ({} if layers is None else {"num_hidden_layers": layers})
    config = AutoConfig.for_model(shape.kind, **settings)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=shape.dtype)
        tokens = torch.zeros(shape.batch, shape.tokens, dtype=torch.int64)
    call = {"input_ids": tokens, "labels": tokens}
    start = time.perf_counter()
    try:
        remat.plan(model, (), call, budget=1, costs=remat.DEVICES["h100"], **WAYS[way])
    except remat.BudgetTooSmall as error:
        seconds = time.perf_counter() - start
        return {"smallest": error.smallest_bytes, "least": error.least_bytes, "seconds": seconds}
    raise AssertionError("one byte was enough")


def missed(row: dict[str, Any]) -> bool:
    """Whether a row failed, or needs more than it may."""
    goal = SHAPES[row["model"]].goals.get(row["way"])
    return "error" in row or (goal is not None and row["smallest"] > goal * 2**30)


def main() -> int:
    """Look for each least budget, print and write; 1 if one is above its goal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="models of two layers, not kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are kept")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for way in WAYS:
            row: dict[str, Any] = {"model": name, "way": way}
            layers = 2 if options.quick else None
            try:
                row |= run_alone(measure, name, way, layers, timeout_seconds=TIMEOUT_SECONDS)
            except Ended as error:
                row["error"] = str(error)
            rows.append(row)
            told = row.get("error") or (
                f"{row['smallest'] / 2**30:.2f} GiB, none below {row['least'] / 2**30:.2f}; "
                f"{row['seconds']:.0f} s"
            )
            print(f"{name}, {way}: {told}", flush=True)
    path = options.json or (None if options.quick else RESULTS)
    if path is not None:
        write_results(path, {"rows": rows}, ("remat", "torch", "transformers"))
    above = [f"{row['model']}, {row['way']}" for row in rows if missed(row)]
    print("above their goals: " + ("; ".join(above) or "none"))
    return int(bool(above) and not options.quick)


if __name__ == "__main__":
    sys.exit(main())
