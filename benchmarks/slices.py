"""Architectures of transformers with their largest values in slices, trained beside eager.

Each is built tiny from its configuration, with a vocabulary that is large beside its width, returns
its loss alone, and is trained some steps by SGD: once plain, once by remat within little more than
the least that is found with `numerics="rounding"`. Told are the least budgets without and with
slices, of plain's peak; the most that any step took, of the budget; and how far the losses are
apart. What must hold: nothing is over the budget, and losses differ by rounding alone.

    python benchmarks/slices.py [--models NAME ...] [--steps N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import remat
from isolation import Ended, run_alone
from provenance import write_results
from remat_exec import measure_peak

RESULTS = Path(__file__).parent / "results" / "slices.json"
TIMEOUT_SECONDS = 600.0
MORE = 1.05  # of the least budget, in which a model is trained
APART = 1e-4  # of a loss: rounding, grown over the steps
BATCH, TOKENS, WORDS = 2, 64, 4000
TEXT = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "gemma": {"head_dim": 16, "num_key_value_heads": 4},
    "gemma2": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 2},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8},
    "distilbert": {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 64},
    "t5": {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16,
           "decoder_start_token_id": 0},
    "bart": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128,
             "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "granite": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2},
}  # fmt: skip
GROUPED = ("llama", "qwen2", "mistral", "stablelm", "olmo2", "cohere", "starcoder2", "smollm3")
MASKED, SEQUENCE = ("bert", "roberta", "distilbert", "electra"), ("t5", "bart")
MODELS = (
    *GROUPED, "phi", "gpt_neox", "falcon", "phi3", "granite", "gemma", "gemma2", "qwen3", "gpt2",
    "opt", "bloom", "gptj", "codegen", "gpt_bigcode", *MASKED, *SEQUENCE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What one architecture took; bytes, and seconds of planning and of the first step."""

    model: str
    plain_bytes: int
    least_bytes: int
    least_in_slices_bytes: int
    budget_bytes: int
    peak_bytes: int
    apart: float
    stretches: int
    seconds: float


class LossAlone(nn.Module):
    """A model of transformers that is asked for its loss and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the loss of tokens that are their own labels."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def build(name: str) -> LossAlone:
    """Build a tiny model of an architecture, without dropout."""
    from transformers import (  # noqa: PLC0415 - it takes seconds
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
    )

    settings = {**TEXT, **OTHERS.get(name, {})}
    if name in GROUPED:
        settings["num_key_value_heads"] = 2
    config = AutoConfig.for_model(name, **settings)
    for key in vars(config).copy():
        if key.endswith(("dropout", "dropout_rate", "pdrop", "layerdrop", "dropout_prob")):
            setattr(config, key, 0.0)
    config.use_cache = False
    kind = AutoModelForCausalLM
    if name in MASKED:
        kind = AutoModelForMaskedLM
    elif name in SEQUENCE:
        kind = AutoModelForSeq2SeqLM
    torch.manual_seed(0)
    return LossAlone(kind.from_config(config)).train()


def least_of(model: nn.Module, tokens: Tensor, numerics: str | None) -> int:
    """Ask for the smallest budget that a plan is found for."""
    try:
        remat.rematerialize(copy.deepcopy(model), (tokens,), budget=1, numerics=numerics)
    except remat.BudgetTooSmall as error:
        return error.smallest_bytes
    raise AssertionError("one byte was enough")


def trained(model: nn.Module, steps: int) -> tuple[list[float], int]:
    """Train on the same batches each time; give the losses, and the most that a step took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(0)
    losses, most = [], 0
    for _ in range(steps):
        tokens = torch.randint(3, WORDS, (BATCH, TOKENS), generator=draw)
        optimizer.zero_grad(set_to_none=True)
        with measure_peak() as peak:
            loss = model(tokens)
            loss.backward()
        most = max(most, peak.peak_bytes)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, most


def measure(name: str, steps: int) -> dict[str, Any]:
    """Measure an architecture in this process."""
    torch.set_num_threads(1)
    model, tokens = build(name), torch.randint(3, WORDS, (BATCH, TOKENS))
    expected, plain = trained(copy.deepcopy(model), steps)
    least, in_slices = (least_of(model, tokens, numerics) for numerics in (None, "rounding"))
    budget = int(MORE * in_slices)
    start = time.perf_counter()
    sliced: Any = remat.rematerialize(model, (tokens,), budget=budget, numerics="rounding")
    seconds = time.perf_counter() - start
    losses, peak = trained(sliced, steps)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    stretches = len(sliced.plan.kinds[0].sliced)
    return asdict(Row(name, plain, least, in_slices, budget, peak, apart, stretches, seconds))


def shown(row: dict[str, Any]) -> str:
    """Describe a row in one line."""
    if "error" in row:
        return f"{row['model']}: failed: {row['error'][:150]}"
    plain = row["plain_bytes"]
    return (
        f"{row['model']}: plain {plain / 2**20:.1f} MiB; the least {row['least_bytes'] / plain:.3f}"
        f" of it, in slices {row['least_in_slices_bytes'] / plain:.3f}; peak "
        f"{row['peak_bytes'] / row['budget_bytes']:.3f} of the budget; losses {row['apart']:.0e} "
        f"apart; {row['stretches']} stretches; planned in {row['seconds']:.0f} s"
    )


def holds(row: dict[str, Any]) -> bool:
    """Whether a row is as it must be."""
    within = "error" not in row and row["peak_bytes"] <= row["budget_bytes"]
    return bool(within and row["apart"] <= APART)


def main() -> int:
    """Train each architecture, print and write; 1 if one is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    parser.add_argument("--quick", action="store_true", help="two steps, not kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are kept")
    options = parser.parse_args()
    steps = 2 if options.quick else options.steps
    rows = []
    for name in options.models:
        try:
            row = run_alone(measure, name, steps, timeout_seconds=TIMEOUT_SECONDS)
        except Ended as error:
            row = {"model": name, "error": str(error)}
        rows.append(row)
        print(shown(row), flush=True)
    path = options.json or (None if options.quick else RESULTS)
    if path is not None:
        write_results(path, {"steps": steps, "rows": rows}, ("remat", "torch", "transformers"))
    wrong = [row["model"] for row in rows if not holds(row)]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as they must be", *wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
