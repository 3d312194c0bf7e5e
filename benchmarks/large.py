"""Planning models that do not fit here: a Llama of 7 billion parameters without data.

Llamas of one width, in bfloat16 with labels, on the meta device or made under a `FakeTensorMode`,
are planned for a `DeviceSpec` at shares of storing everything. Each point is of a fresh process
that does nothing else: seconds and CPU seconds of `remat.plan`, of which capture and solving, and
the most memory that the process had, torch and transformers included. Overhead and gap are in
points, percent of the time of computing everything once. What depth costs is said as CPU seconds
beside those of the fewest layers, and as the slope of a line through the logarithms of CPU seconds
and ops.

Bar: 32 layers (7 billion parameters) within 60 s and 2 GiB. Exit code 1 if it is missed.

    python benchmarks/large.py [--quick] [--layers 12 24 32 48 96] [--batches 8] [--shares 0.5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses import FakeTensorMode

import remat
from partition import growth, high_water_bytes
from provenance import write_results

RESULTS = Path(__file__).parent / "results" / "large.json"
A100 = remat.DeviceSpec("A100", 19.5e12, 312e12, 2.0e12, 4e-6)
SEQUENCE = 2048
BAR_LAYERS, MOST_SECONDS, MOST_BYTES = 32, 60.0, 2 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One plan; `overhead` and `bound` are in points."""

    made: str
    layers: int
    batch: int
    share: float
    parameters: int
    ops: int
    store_all_bytes: int
    overhead: float
    bound: float
    capture_seconds: float
    solve_seconds: float
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="12 layers alone; writes nothing")
    parser.add_argument("--layers", nargs="+", type=int, default=[12, 24, 32, 48, 96])
    parser.add_argument("--batches", nargs="+", type=int, default=[8])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5])
    given = parser.parse_args()
    points = [
        (made, layers, batch, share)
        for batch in given.batches
        for share in given.shares
        for layers in (given.layers[:1] if given.quick else given.layers)
        for made in (("meta", "fake") if layers == BAR_LAYERS else ("meta",))
    ]
    print(f"{'made on':8}{'layers':>7}{'batch':>6}{'share':>6}{'ops':>7}{'stored':>11}"
          f"{'capture':>9}{'solve':>7}{'all':>7}{'cpu s':>7}{'MiB':>6}"
          f"{'overhead':>10}{'gap':>7}")  # fmt: skip
    rows: list[Row] = []
    for point in points:
        rows.append(measure_apart(*point))
        print(line(rows[-1]), flush=True)
        if not given.quick:
            write_results(
                RESULTS, {"rows": [asdict(row) for row in rows]}, ("remat", "torch", "transformers")
            )
    depths = [row for row in rows if row.made == "meta"]
    if len({row.layers for row in depths}) > 1:
        least = depths[0]
        times = [f"{row.cpu_seconds / least.cpu_seconds:.2f} ({row.layers})" for row in depths[1:]]
        print(f"CPU seconds of those of {least.layers} layers: {', '.join(times)}")
        print(f"CPU seconds grow as ops to the power of {growth(depths):.2f}")
    missed = [
        line(row)
        for row in rows
        if row.layers <= BAR_LAYERS and (row.seconds > MOST_SECONDS or row.peak_bytes > MOST_BYTES)
    ]
    print(f"missed: {'; '.join(missed) or 'none'} (60 s and 2 GiB for 32 layers)")
    return int(bool(missed))


def measure_apart(made: str, layers: int, batch: int, share: float) -> Row:
    """Measure in a process of its own, so that its memory is that of one plan alone."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (made, layers, batch, share))


def measure(made: str, layers: int, batch: int, share: float) -> Row:
    """Plan a Llama once."""
    model, call = llama(made, layers, batch)
    start, cpu = time.perf_counter(), time.process_time()
    plan = remat.plan(model, (), call, budget=share, costs=A100)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    assert plan.bound_overhead is not None
    return Row(
        made=made,
        layers=layers,
        batch=batch,
        share=share,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ops=len(plan.graph.ops),
        store_all_bytes=plan.store_all_peak_bytes,
        overhead=100 * plan.predicted_overhead,
        bound=100 * plan.bound_overhead,
        capture_seconds=plan.capture_seconds,
        solve_seconds=plan.solution.solve_seconds,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        peak_bytes=high_water_bytes(),
    )


def llama(made: str, layers: int, batch: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Make a Llama as wide as the one of 7 billion parameters, and what it is called with."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        vocab_size=32000,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    mode: AbstractContextManager[Any] = torch.device("meta") if made == "meta" else FakeTensorMode()
    with mode:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tokens = torch.zeros(batch, SEQUENCE, dtype=torch.long)
    model.train()
    return model, {"input_ids": tokens, "labels": tokens}


def line(row: Row) -> str:
    """Format a row."""
    return (
        f"{row.made:8}{row.layers:>7}{row.batch:>6}{row.share:>6.2f}{row.ops:>7}"
        f"{row.store_all_bytes / 2**30:>7.1f} GiB{row.capture_seconds:>9.1f}"
        f"{row.solve_seconds:>7.1f}{row.seconds:>7.1f}{row.cpu_seconds:>7.1f}"
        f"{row.peak_bytes / 2**20:>6.0f}{row.overhead:>10.2f}{row.overhead - row.bound:>7.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
