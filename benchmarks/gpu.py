"""Training steps on a GPU by a plan, beside plain autograd: peaks, budgets, times, gradients.

Models at the sizes that people train, made with random numbers on the device; nothing is fetched.
GPT-2 with dropout in 32 bits, a Llama of 300 million parameters in bfloat16, a ViT-B under
autocast, a ResNet-50 and a U-Net in 32 bits. A budget is a fraction of plain autograd's measured
peak; where no plan is within it, the smallest is taken that one was found for. Of each step are
given what its tensors asked for, the blocks that they got, which the budget bounds, and what the
allocator held of the device with parameters and inputs, in MiB; and its median time. Gradients are
compared to plain autograd's, and to those of the same traced program with everything stored
(`torch.compile(backend="aot_eager_default_partitioner")`; `aot_eager` recomputes by a minimum cut):
tracing has other operators than eager for some layers. A plan has eager's batch norm, which that
has not. Given is the largest difference of elements relative to the largest element, by
deterministic kernels where there are some.

Bars: no step takes more than its budget, and no gradient differs from the nearer of both by more
than the rounding of its type. Exit code 1 if one is missed, or no plan could be made. Models not
begun after 6 minutes are left out, and named; what was found is written after each plan, beside the
rows of other models, budgets and ways that FILE has of the same device.

With `--numerics` a plan may also choose how values are made; gradients by other layouts, or from
copies in 16 bits, are given and not held to that bar.

    python benchmarks/gpu.py [--models NAME ...] [--budgets 0.5 0.35] [--numerics none rounding]
        [--json FILE]
    python benchmarks/gpu.py --device cpu --quick     (tiny models: tries the benchmark itself)
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import remat
from provenance import commit, write_results
from remat_exec import StepProfile, profile_step
from zoo import Example, gpt2, resnet, unet

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products need
BEGIN_WITHIN_SECONDS = 360.0
SOLVE_SECONDS = 10.0  # one for tiny models
REPEATS = 5
WAYS = ("none", "bitwise", "rounding", "lossy")
HELD = ("none", "bitwise")  # to the rounding of the type
MOST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class Row:
    """One model by one plan; sizes in bytes, times in seconds.

    `asked` is the budget as a fraction of plain autograd's peak, `numerics` which ways of making
    values were allowed, `refused` whether no plan was found for that budget. `difference` is of
    gradients from plain autograd's, `traced_difference` from the traced program's; `deterministic`
    says of them whether all kernels were.
    """

    commit: str
    model: str
    parameters: int
    asked: float
    numerics: str
    refused: bool
    budget_bytes: int
    predicted_bytes: int
    requested_bytes: int
    peak_bytes: int
    reserved_bytes: int
    seconds: float
    predicted_overhead: float
    planning_seconds: float
    plain_peak_bytes: int
    plain_reserved_bytes: int
    plain_seconds: float
    difference: float
    traced_difference: float
    most_difference: float
    deterministic: bool

    @property
    def missed(self) -> bool:
        """Whether the step is over its budget, or its gradients are wrong."""
        wrong = not min(self.difference, self.traced_difference) <= self.most_difference
        return self.peak_bytes > self.budget_bytes or (wrong and self.numerics in HELD)


class Autocast(nn.Module):
    """A model under autocast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        with torch.autocast(next(self.parameters()).device.type, torch.bfloat16):
            return self.model(*args, **kwargs)


def llama(quick: bool) -> Example:
    """Make a Llama of 300 million parameters in bfloat16."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415

    width, layers, heads, vocabulary = (32, 2, 2, 64) if quick else (1024, 20, 16, 32000)
    batch, sequence = (2, 16) if quick else (4, 2048)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, vocab_size=vocabulary,
        max_position_embeddings=sequence, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokens = torch.randint(vocabulary, (batch, sequence))
    return Example("llama", model, (tokens,), {"labels": tokens}, lambda output: output.loss)


def vit(quick: bool) -> Example:
    """Make a ViT-B/16 under autocast."""
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    small = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    config = ViTConfig(num_labels=10, **(small if quick else {}))
    batch, side = 2 if quick else 64, config.image_size
    return Example(
        "vit",
        Autocast(ViTForImageClassification(config)),
        (torch.randn(batch, 3, side, side),),
        {"labels": torch.randint(10, (batch,))},
        lambda output: output.loss,
    )


MODELS: dict[str, Callable[[bool], Example]] = {
    "gpt2": lambda quick: gpt2.make(
        "gpt2", (2, 32, 2, 64, 2, 16) if quick else (12, 768, 12, 50257, 8, 1024), 0.1
    ),
    "llama": llama,
    "vit": vit,
    "resnet50": lambda quick: resnet.make(
        "resnet50", ((1, 2), 4, 2, 32) if quick else ((3, 4, 6, 3), 64, 64, 224)
    ),
    "unet": lambda quick: unet.make("unet", (2, 4, 2, 16) if quick else (4, 64, 4, 512)),
}


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.5, 0.35], metavar="SHARE")
    parser.add_argument("--numerics", nargs="+", choices=WAYS, default=["none"], metavar="WAY")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --device cpu --quick tries the benchmark")
    facts = machine(device)
    print(", ".join(f"{name} {fact}" for name, fact in facts.items()))
    print(f"{'model':10}{'asked':>7} {'ways':9}{'budget':>9}{'asked for':>11}{'blocks':>9}"
          f"{'reserved':>10}{'plain':>9}{'ms':>9}{'time':>7}{'to plain':>11}"
          f"{'to traced':>11}")  # fmt: skip
    started = time.monotonic()
    before = rows_before(given.json, facts["device"])
    rows: list[Row] = []
    left_out: list[str] = []
    failed: dict[str, str] = {}

    def write() -> None:
        if given.json:
            merged = before | {key(row): row for row in map(asdict, rows)}
            report = {"device": facts, "quick": given.quick, "left_out": left_out,
                      "failed": failed, "rows": list(merged.values())}  # fmt: skip
            write_results(given.json, report)

    for name in given.models:
        if time.monotonic() - started > BEGIN_WITHIN_SECONDS:
            left_out.append(name)
            continue
        try:
            for row in measured(MODELS[name], given, device):
                rows.append(row)
                print(line(row), flush=True)
                write()
        except remat.RematError as error:
            failed[name] = str(error)
            print(f"{name:10} {error}", flush=True)
    write()
    missed = [*failed, *(f"{row.model} at {row.asked}" for row in rows if row.missed)]
    print(f"\nleft out: {', '.join(left_out) or 'none'}; missed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


def rows_before(path: Path | None, device: str) -> dict[tuple[str, float, str], dict[str, Any]]:
    """Read what a file has of the same device, by model, budget and way."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    rows = found["rows"] if found["device"]["device"] == device else []
    return {key(row): row for row in rows}


def key(row: dict[str, Any]) -> tuple[str, float, str]:
    """Name the cell that a row is of."""
    return row["model"], row["asked"], row["numerics"]


def machine(device: torch.device) -> dict[str, Any]:
    """Say which device this ran on."""
    facts = {"device": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = properties.name
        facts["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        facts["cuda"] = str(torch.version.cuda)
        facts["allocator"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "as it comes")
    return facts


def measured(
    make: Callable[[bool], Example], given: argparse.Namespace, device: torch.device
) -> Iterator[Row]:
    """Step one model plainly, then by a plan for each budget and allowed way."""
    torch.manual_seed(0)
    with device:
        example = make(given.quick)
    model = example.model.train()
    plain = profiled(example, model, device)
    expected, deterministic = gradients(example, model)
    compiled: Any = torch.compile(model, backend="aot_eager_default_partitioner")
    traced, _ = gradients(example, compiled)
    torch.compiler.reset()
    for share, numerics in itertools.product(given.budgets, given.numerics):
        began = time.perf_counter()
        budget, limit = int(share * plain.peak.peak_bytes), 1.0 if given.quick else SOLVE_SECONDS
        planned, refused = rematerialized(example, budget, limit, numerics)
        planning_seconds = time.perf_counter() - began
        found, also_deterministic = gradients(example, planned)
        profile = profiled(example, planned, device)
        plan = planned.plan
        yield Row(
            commit=commit(),
            model=example.name,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            asked=share,
            numerics=numerics,
            refused=refused,
            budget_bytes=plan.budget_bytes,
            predicted_bytes=plan.predicted_peak_bytes,
            requested_bytes=profile.peak.requested_bytes,
            peak_bytes=profile.peak.peak_bytes,
            reserved_bytes=profile.peak.reserved_bytes,
            seconds=profile.seconds,
            predicted_overhead=plan.predicted_overhead,
            planning_seconds=planning_seconds,
            plain_peak_bytes=plain.peak.peak_bytes,
            plain_reserved_bytes=plain.peak.reserved_bytes,
            plain_seconds=plain.seconds,
            difference=difference(found, expected),
            traced_difference=difference(found, traced),
            most_difference=max(MOST_DIFFERENCE[dtype] for dtype in types_of(example)),
            deterministic=deterministic and also_deterministic,
        )
        del planned, plan, found


def types_of(example: Example) -> set[torch.dtype]:
    """Name the types in which a model multiplies."""
    types = {parameter.dtype for parameter in example.model.parameters()}
    return types | {torch.bfloat16} if isinstance(example.model, Autocast) else types


def rematerialized(
    example: Example, budget: int, limit_seconds: float, numerics: str
) -> tuple[Any, bool]:
    """Plan for a budget in bytes, or for the least; say if the budget was refused."""

    def within(budget: int) -> Any:
        return remat.rematerialize(
            example.model,
            example.args,
            example.kwargs,
            budget=budget,
            limit_seconds=limit_seconds,
            numerics=None if numerics == "none" else numerics,
        )

    try:
        return within(budget), False
    except remat.BudgetTooSmall as error:
        smallest = error.smallest_bytes
    return within(int(1.02 * smallest) + 2**16), True


def profiled(example: Example, model: nn.Module, device: torch.device) -> StepProfile:
    """Take the time and the peak of steps that begin without gradients."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        example.step(model)

    seconds = profile_step(step, device=device, repeats=REPEATS).seconds
    model.zero_grad(set_to_none=True)
    with remat.measure_peak(device) as peak:
        example.step(model)
    model.zero_grad(set_to_none=True)
    return StepProfile(seconds, peak)


def gradients(example: Example, model: nn.Module) -> tuple[list[Tensor], bool]:
    """Give the gradients of a step by deterministic kernels, on the CPU; say if all were.

    Where there is no deterministic kernel, torch raises, and the step is taken with others.
    """
    for wanted in (True, False):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        try:
            with deterministic_kernels(wanted):
                example.step(model)
        except RuntimeError as error:
            if not wanted or "deterministic" not in str(error):
                raise
            continue
        break
    found = [
        torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu()
        for p in model.parameters()
    ]
    model.zero_grad(set_to_none=True)
    return found, wanted


@contextlib.contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Let torch use deterministic kernels alone, or any."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Find the largest difference of elements, relative to the largest element."""
    largest = max(float(b.abs().max()) for b in expected)
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs) / largest


def line(row: Row) -> str:
    """Format a row."""
    mib = [
        f"{size / 2**20:{width},.1f}"
        for size, width in (
            (row.budget_bytes, 9), (row.requested_bytes, 11), (row.peak_bytes, 9),
            (row.reserved_bytes, 10), (row.plain_peak_bytes, 9),
        )
    ]  # fmt: skip
    kernels = "" if row.deterministic else "  kernels not deterministic"
    least = "  the least: the share is refused" if row.refused else ""
    return (
        f"{row.model:10}{row.asked:>7.2f} {row.numerics:9}{''.join(mib)}{row.seconds * 1e3:>9.1f}"
        f"{row.seconds / row.plain_seconds:>7.2f}{row.difference:>11.1e}"
        f"{row.traced_difference:>11.1e}"
        f"{least}{kernels}{'  MISSED' * row.missed}"
    )


if __name__ == "__main__":
    sys.exit(main())
