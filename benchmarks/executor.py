"""What running generated code costs when nothing is recomputed: remat's executor against eager.

Each model of the zoo runs a schedule that stores everything. Exit code 1 if the median over the
models of the time ratio is above 1.05 (not asked of `--quick`, whose steps are too short), if any
peak is above eager's, or if anything failed.

    python benchmarks/executor.py [--json FILE] [--quick] [--models NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zoo
from comparison import PLAIN, Pair, Runner, Variant, compare, print_table, write_json
from remat_exec import Executable
from remat_graph.torch import capture, read_call
from remat_solvers import store_all
from zoo import Example

MOST_TIME = 1.05


class Stored(nn.Module):
    """A module run by an executable, whatever it is called with."""

    def __init__(self, module: nn.Module, executable: Executable) -> None:
        super().__init__()
        self.module = module
        self.executable = executable

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward."""
        outputs = self.executable(self.module, read_call(args, kwargs).tensors)
        return self.executable.capture.output_structure.rebuild(iter(outputs))


def stored(example: Example) -> Variant:
    """Run by the schedule that computes every op once."""

    def make(model: nn.Module) -> nn.Module:
        captured = capture(model, example.args, example.kwargs, costs="estimate")
        return Stored(model, Executable(captured, store_all(captured.graph)))

    return Variant("executor, all stored", make)


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, two rounds: a smoke test"
    )
    parser.add_argument("--models", nargs="+", choices=zoo.NAMES, default=zoo.NAMES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pairs: dict[str, Pair] = {}
    failed = []
    for name in options.models:
        example = zoo.build(name, "tiny" if options.quick else "medium")
        rounds = 2 if options.quick else options.rounds
        try:
            pairs[name] = compare(Runner(stored(example), example), Runner(PLAIN, example), rounds)
        except Exception as error:  # the others are measured all the same
            failed.append(f"{name} ({type(error).__name__}: {error})".partition("\n")[0])
    print_table(pairs)
    times = [pair.time_ratio for pair in pairs.values()]
    time_ratio = statistics.median(times) if times else None
    above = [name for name, pair in pairs.items() if pair.peak_ratio > 1.0]
    if options.json:
        write_json(
            options.json, pairs, quick=options.quick, threads=options.threads,
            median_time_ratio=time_ratio,
        )  # fmt: skip
    shown = "none" if time_ratio is None else f"{time_ratio:.3f}"
    print(f"\nmedian time ratio {shown}, at most {MOST_TIME} is wanted")
    print(
        f"peak above eager's: {', '.join(above) or 'none'}; failed: {', '.join(failed) or 'none'}"
    )
    is_slow = time_ratio is not None and time_ratio > MOST_TIME and not options.quick
    return int(bool(failed or above) or is_slow)


if __name__ == "__main__":
    sys.exit(main())
