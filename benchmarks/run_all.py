"""Every benchmark, one after the other, and then the tables of README and docs.

The whole takes many hours and wants a quiet machine; results go to `benchmarks/results`. With
`--quick` each is tried at its smallest, in minutes: nothing is kept, and pages are only checked.
A benchmark whose figures miss what it asks for ends with 1 and is named; one that fails ends with
a traceback, and then this ends with 1, too.

    python benchmarks/run_all.py [--quick] [--only PATTERN]
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
QUICK_SECONDS = 600.0  # far more than any takes: a stuck one ends
JSON = ("--json", "{json}")

# For each the arguments of a full run, and of a quick one.
BENCHMARKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ablation": (
        JSON,
        ("--models", "fno-1d", "--shares", "0.5", "--limit", "0.2", *JSON),
    ),
    "alternatives": (JSON, ("--quick", "--models", "unet", "--ways", "bitwise", "--rounds", "1")),
    "back_ends": (JSON, ("--graphs", "1", "--seeds", "1", *JSON)),
    "certified": (
        ("--fresh", *JSON),
        ("--models", "fno-1d", "--points", "published", *JSON),
    ),
    "compile_times": (JSON, ("--quick", *JSON)),
    "dry_floor": (JSON, ("--quick", "--models", "GPT-2, 8 x 1,024")),
    "estimates": (JSON, ("--models", "unet", *JSON)),
    "exact": (JSON, ("--quick", "--models", "unet", "--shares", "0.7")),
    "executor": (JSON, ("--quick", "--models", "unet", *JSON)),
    "floor": (("--fresh", *JSON),
              ("--quick", "--models", "32,000 words", "--only", "remat, the *")),
    "gpu": (JSON, ("--device", "cpu", "--quick", "--models", "gpt2", "--budgets", "0.8", *JSON)),
    "growth": (JSON, ("--quick", "--shapes", "gpt-2", "--shares", "0.5", *JSON)),
    "inner_gradients": (JSON, ("--quick", "--rounds", "1", *JSON)),
    "large": ((), ("--quick",)),
    "loops": (JSON, ("--quick", "--only", "gradient accumulation")),
    "monet": (JSON, ("--quick", "--models", "unet")),
    "matrix": (("--fresh", *JSON), ("--only", "transformers/gpt2", *JSON)),
    "partition": (JSON, ("--quick", *JSON)),
    "patterns": ((), ("--quick", "--models", "loop", "--steps", "8")),
    "peers": (("--fresh", *JSON), ("--quick", "--models", "unet", "--threads", "1",
                                   "--only", "checkpoint*", "--rounds", "1")),
    "planning": (JSON, ("--quick", "--fractions", "0.5", "--limit-seconds", "1", *JSON)),
    "regions": ((), ("--quick", "--models", "inplace")),
    "slices": (JSON, ("--quick", "--models", "gpt2")),
    "solvers": (
        ("--again", *JSON),
        ("--models", "fno-1d", "--solvers", "refine", "h-ilp", "--budgets", "0.5", "--limit", "2",
         *JSON),
    ),
    "structure": (JSON, ("--models", "fno-1d", *JSON)),
    "tradeoff": (JSON, ("--quick", *JSON)),
    "tw_remat": ((*JSON, "--plot", "{png}"), ("--quick", *JSON)),
    "wild": (("--fresh", *JSON), ("--only", "siren-pytorch/SirenNet", *JSON)),
}  # fmt: skip
NEEDS_CUDA = ("gpu",)
LONGEST = ("regions", "alternatives")  # of the quick ones; begun first, as two run at once


def main() -> int:
    """Run what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="try each, keep nothing")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="such as 'solvers'")
    options = parser.parse_args()
    chosen = fnmatch.filter(BENCHMARKS, options.only)
    if not chosen:
        parser.error(f"--only {options.only!r}: there are {', '.join(BENCHMARKS)}")
    if not options.quick and not _has_cuda():
        chosen = [name for name in chosen if name not in NEEDS_CUDA]
    if options.quick:
        chosen.sort(key=lambda name: name not in LONGEST)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) if options.quick else RESULTS
        with ThreadPoolExecutor(2 if options.quick else 1) as pool:  # a quick run measures nothing
            for name, ending in pool.map(lambda name: run(name, kept, options.quick), chosen):
                print(f"{name:14}{ending}", flush=True)
                if "failed" in ending:
                    failed.append(name)
    tables = [sys.executable, str(FOLDER / "tables.py"), *["--check"] * options.quick]
    stale = subprocess.run(tables, check=False).returncode != 0
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed) or stale)


def run(name: str, folder: Path, quick: bool) -> tuple[str, str]:
    """Run a benchmark, and say how long it took and how it ended, after its name."""
    started = time.perf_counter()
    ending = _ending(name, folder, quick=quick)
    return name, f"{time.perf_counter() - started:8.1f} s  {ending}"


def _ending(name: str, folder: Path, *, quick: bool) -> str:
    files = {kind: str(folder / f"{name}.{kind}") for kind in ("json", "png")}
    arguments = [argument.format(**files) for argument in BENCHMARKS[name][quick]]
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL if quick else None,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=QUICK_SECONDS if quick else None,
            env={**os.environ, "OMP_NUM_THREADS": "1"} if quick else None,  # two run at once
        )
    except subprocess.TimeoutExpired:
        return f"failed: more than {QUICK_SECONDS:.0f} s"
    if done.returncode == 0:
        return "ok"
    if done.returncode == 1 and "Traceback" not in done.stderr:
        return "misses what it asks for"
    return f"failed: exit code {done.returncode}\n{done.stderr[-2000:]}"


def _has_cuda() -> bool:
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
