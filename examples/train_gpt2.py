"""Train a byte-level GPT-2 on the Python standard library, plain and at half of plain's memory.

Both runs start from the same weights, see the same batches and draw the same dropout. Their steps
alternate, so that whatever else the machine does slows both alike. Writes `demo.json`, and
`demo.png` with the memory held over one step of each.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import statistics
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

import remat
from remat_exec import Peak
from remat_graph import write_atomically
from remat_solvers import Progress

MIB = 2**20


def main() -> int:
    options = parse_options()
    transformers_logging.set_verbosity_error()
    print(f"text: {options.text_bytes / MIB:.1f} MiB of the standard library's sources")
    text = read_standard_library(options.text_bytes)
    model = build_model(options)
    print(f"model: GPT-2, {options.layers} layers, {sum(p.numel() for p in model.parameters()):,} "
          f"parameters, batch {options.batch} x {options.length} bytes, dropout on")  # fmt: skip

    plain = Run("plain", copy.deepcopy(model))
    print("plain: measuring the peak of one step")
    plain_peak = plain.peak(text, options, step=0).peak_bytes
    budget = int(options.fraction * plain_peak)
    print(f"plain: peak {plain_peak / MIB:.1f} MiB; budget {budget / MIB:.1f} MiB")

    start = time.perf_counter()
    example = batch_at(text, options, step=0)
    planned = remat.rematerialize(
        copy.deepcopy(model),
        (example,),
        {"labels": example},
        budget=budget,
        limit_seconds=options.limit_seconds,
        progress=show_progress,
    )
    plan_seconds = time.perf_counter() - start
    plan = planned.plan
    print(plan)
    small = Run("remat", planned)

    print(f"\n{'step':>5}  {'plain loss':>12}  {'remat loss':>12}  {'plain s':>8}  {'remat s':>8}")
    for step in range(options.steps):
        for run in (plain, small) if step % 2 == 0 else (small, plain):
            run.train(text, options, step)
        if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
            print(f"{step:>5}  {plain.losses[-1]:>12.7f}  {small.losses[-1]:>12.7f}  "
                  f"{plain.seconds[-1]:>8.3f}  {small.seconds[-1]:>8.3f}", flush=True)  # fmt: skip

    curves = {run.name: run.peak(text, options, step=options.steps) for run in (plain, small)}
    peak = curves["remat"].peak_bytes
    ratio = statistics.median(small.seconds[1:]) / statistics.median(plain.seconds[1:])
    identical = plain.losses == small.losses and all(
        torch.equal(a, b)
        for a, b in zip(plain.model.parameters(), small.model.parameters(), strict=True)
    )
    report = {
        "model": {"layers": options.layers, "width": options.width, "batch": options.batch,
                  "length": options.length},
        "budget_bytes": budget,
        "plain_peak_bytes": plain_peak,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "measured_peak_bytes": peak,
        "time_ratio": ratio,
        "predicted_overhead": plan.predicted_overhead,
        "bound_overhead": plan.bound_overhead,
        "plan_seconds": plan_seconds,
        "solver": plan.solution.solver,
        "status": plan.solution.status.value,
        "losses_plain": plain.losses,
        "losses_remat": small.losses,
        "parameters_identical": identical,
    }  # fmt: skip
    write_atomically(options.output / "demo.json", json.dumps(report, indent=1) + "\n")
    draw(options.output / "demo.png", curves, budget)

    bound = plan.bound_overhead or 0.0
    print(
        f"\nbudget {budget / MIB:.1f} MiB; peak predicted {plan.predicted_peak_bytes / MIB:.1f}, "
        f"measured {peak / MIB:.1f} MiB; planned in {plan_seconds:.1f} s; "
        f"overhead predicted {100 * plan.predicted_overhead:.2f}%, at least {100 * bound:.2f}%"
    )
    figures = (f"peak {peak / MIB:.1f} MiB within a budget of {budget / MIB:.1f} MiB "
               f"(plain {plain_peak / MIB:.1f} MiB), time {ratio:.2f} x")  # fmt: skip
    if identical and peak <= budget:
        print(f"OK: {figures}, losses identical")
        return 0
    print(f"FAILED: {figures}, losses {'identical' if identical else 'DIFFER'}")
    return 1


@dataclass
class Run:
    """One training run, with its own optimiser and records."""

    name: str
    model: torch.nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self, text: torch.Tensor, options: argparse.Namespace, step: int) -> None:
        batch = batch_at(text, options, step)
        torch.manual_seed(options.seed + step)
        self.optimizer.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = self.model(batch, labels=batch).loss
        loss.backward()
        self.seconds.append(time.perf_counter() - start)
        self.optimizer.step()
        self.losses.append(loss.item())

    def peak(self, text: torch.Tensor, options: argparse.Namespace, step: int) -> Peak:
        """Measure a step that changes nothing."""
        batch = batch_at(text, options, step)
        self.optimizer.zero_grad(set_to_none=True)
        with remat.measure_peak() as peak:
            self.model(batch, labels=batch).loss.backward()
        self.optimizer.zero_grad(set_to_none=True)
        return peak


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24, help="training steps of each run")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="bytes in one sequence")
    parser.add_argument("--fraction", type=float, default=0.5, help="budget over plain's peak")
    parser.add_argument("--limit-seconds", type=float, default=20, help="for the solver")
    parser.add_argument("--text-bytes", type=int, default=4 * MIB)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(), help="folder for the two files")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be 2 or more")
    if not options.output.is_dir():
        parser.error(f"--output {options.output} is not a folder")
    return options


def read_standard_library(size: int) -> torch.Tensor:
    """Read the first `size` bytes of the sources of the standard library, as int64."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    if len(text) < 2**16:
        raise SystemExit(f"FAILED: found only {len(text)} bytes of Python sources in {folder}")
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).to(torch.int64)


def batch_at(text: torch.Tensor, options: argparse.Namespace, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - options.length, (options.batch,), generator=generator)
    return torch.stack([text[start : start + options.length] for start in starts.tolist()])


def build_model(options: argparse.Namespace) -> GPT2LMHeadModel:
    torch.manual_seed(options.seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=options.length,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=6,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).train()


def show_progress(progress: Progress) -> None:
    found = "-" if progress.incumbent_time is None else f"{progress.incumbent_time:.4f} s"
    bound = "-" if progress.lower_bound is None else f"{progress.lower_bound:.4f} s"
    note = progress.message
    print(f"  planning: {progress.seconds:5.1f} s  best {found}  bound {bound}  {note}", flush=True)


def draw(path: Path, curves: dict[str, Peak], budget: int) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the back end is chosen

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for name, peak in curves.items():
        times = [moment * 1e3 for moment, _ in peak.curve]
        held = [size / MIB for _, size in peak.curve]
        axes.step(times, held, where="post", label=f"{name}: peak {max(held):.1f} MiB")
    axes.axhline(budget / MIB, color="black", linestyle="--", linewidth=1,
                 label=f"budget {budget / MIB:.1f} MiB")  # fmt: skip
    axes.set_xlabel("time within one step, profiler running (ms)")
    axes.set_ylabel("memory beyond the start of the step (MiB)")
    axes.set_title("One training step: plain autograd and remat")
    axes.set_ylim(bottom=0)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(path, picture.getvalue())
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
