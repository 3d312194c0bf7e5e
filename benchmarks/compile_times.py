"""Compiling groups of operators: kinds by the depth of a model, and seconds to compile them.

GPT-2 without dropout, of a width of 192; kinds are those of both programs of groups. *Cold* is with
empty caches: kernels are compiled in processes of their own and loaded. *Warm* is a new process
after that one, with what it needs of Inductor's modules: the seconds that compiled groups add to
planning there. Once per machine Inductor compiles a header, which takes longer than all kernels:
that is done before.

Bars: 48 layers within 1.3 times 12 layers, cold; under 2 s warm. Exit code 1 if one is missed.

    python benchmarks/compile_times.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from isolation import run_alone
from provenance import write_results
from remat_graph import Numerics
from remat_graph.torch import Compilation, Kernel, capture
from remat_graph.torch.fusing.compiling import compile_kernels
from zoo import gpt2

DEPTHS, QUICK_DEPTHS = (12, 48), (1, 2)
MOST_BY_DEPTH, MOST_WARM_SECONDS = 1.3, 2.0
TIMEOUT_SECONDS = 900.0


def kernels(depth: int, width: int = 192) -> tuple[list[Kernel], int]:
    """Give the kernels of a GPT-2, and how many groups there are."""
    example = gpt2.make("gpt2", (depth, width, 6, 2000, 4, 128), dropout=0.0)
    captured = capture(example.model, example.args, example.kwargs, costs="estimate")
    able = captured.with_alternatives(Numerics.ROUNDING, laid_out=())
    groups = sum(op.endswith("__fused") for op in able.in_groups().program.calls)
    return list(able.group_kernels), groups


def seconds_to_compile(depth: int, cache: str) -> tuple[int, int, float, float]:
    """Count kinds and groups; compile beside, then load: the seconds of both, and of loading."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    kinds, groups = kernels(depth)
    start = time.perf_counter()
    Compilation(kinds).wait()
    loading = time.perf_counter()
    compile_kernels(kinds)
    end = time.perf_counter()
    failed = [kernel.failure for kernel in kinds if kernel.failure]
    if failed:
        raise RuntimeError(f"{len(failed)} kernels are not compiled: {failed[0]}")
    return len(kinds), groups, end - start, end - loading


def warm_seconds(depth: int, cache: str) -> float:
    """Time the loading of kernels that another process has compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    kinds, _ = kernels(depth)
    start = time.perf_counter()
    compile_kernels(kinds)
    return time.perf_counter() - start


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one and two layers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    rows = []
    print(f"{'layers':>7}{'groups':>8}{'kinds':>7}{'cold s':>9}{'warm s':>9}")
    for depth in QUICK_DEPTHS if options.quick else DEPTHS:
        with tempfile.TemporaryDirectory() as cache:
            run_alone(seconds_to_compile, 1, cache, timeout_seconds=TIMEOUT_SECONDS)  # the header
            kinds, groups, cold, _ = run_alone(
                seconds_to_compile, depth, cache, timeout_seconds=TIMEOUT_SECONDS
            )
            warm = run_alone(warm_seconds, depth, cache, timeout_seconds=TIMEOUT_SECONDS)
        rows.append({"layers": depth, "groups": groups, "kinds": kinds, "cold_seconds": cold,
                     "warm_seconds": warm})  # fmt: skip
        print(f"{depth:7}{groups:8}{kinds:7}{cold:9.1f}{warm:9.2f}", flush=True)
    ratio = rows[-1]["cold_seconds"] / rows[0]["cold_seconds"]
    warmest = max(row["warm_seconds"] for row in rows)
    print(f"cold, {rows[-1]['layers']} layers beside {rows[0]['layers']}: {ratio:.2f} times; "
          f"warm, at most {warmest:.2f} s")  # fmt: skip
    if options.json:
        write_results(options.json, {"rows": rows, "cold_ratio": ratio})
    return int(ratio > MOST_BY_DEPTH or warmest > MOST_WARM_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
