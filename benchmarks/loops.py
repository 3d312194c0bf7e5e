"""Training loops that people write, each with its model rematerialized beside the same in plain.

For each loop: its steps, those in which a graph was traced or looked up, the plans that were made,
and the seconds that this took beyond plain steps; the largest peak of a measured step, forward and
backward, as a share of the budget; the largest difference between what the two runs leave behind.
A step is measured once as many before it as the loop repeats after, four at least, made no plan; a
plan that is made in a measured step fails. Where there are several ranks, messages are let go of by
threads that torch's profiler does not see, and then count to the end of the step: one is left out
that went over by no more than it left behind beyond the others. Loops that run in 16 bits with
dropout differ from eager as torch's tracing does. With `--kernels inductor` all models have
compiled groups, which are waited for and by estimates faster than eager kernels; how many the last
plan has is told. What loops leave behind may then differ by rounding, and they
run in double precision: in single one, Adam makes steps of what rounding leaves of a zero.

With `--sizes` each of ten steps has batches of another size, and all come again twice, when they
are measured.

Each loop runs in a process of its own, DDP and FSDP2 in two more. Exit code 1 if one failed, went
over its budget, or differs in a loop of 32 bits or more.

    python benchmarks/loops.py [--only PATTERN] [--quick] [--kernels inductor] [--sizes]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import math
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import remat
from counting import counted
from isolation import Ended, run_alone
from loop_cases import by_hand, find, names, ranks
from loop_cases.models import LARGE, SMALL, Size
from loop_cases.run import DRAWS, Kept, Run
from provenance import write_results
from remat_exec import Peak, measure_peak

RESULTS = Path(__file__).parent / "results" / "loops.json"
PACKAGES = ("remat", "torch", "transformers", "accelerate", "lightning", "peft")
PERIODS = {
    "a smaller last batch, its loss handed over": by_hand.SMALLER_AFTER,
    "ten sequence lengths": by_hand.LENGTHS,
    "gradient accumulation": 2,
}
STEPS = 10
SIXTEEN_BITS = ("Trainer, bf16", "Accelerate, bf16", "backward within autocast")
TIMEOUT_SECONDS = 300.0
COMPILING_SECONDS = 1200.0  # added for compiled groups: a smaller part on a quiet machine
ROUNDING = 1e-5  # of what compiled groups leave behind; adapters of peft are in single precision


@dataclass(frozen=True, slots=True)
class Row:
    """What one loop came to, or why it failed; sizes in bytes.

    The peak is the largest of the measured steps as a share of the budget, or, where several models
    have budgets of their own, the largest share that a plan measured. `difference` is the largest
    between any two numbers of what both runs left behind. `groups` is how many compiled groups the
    last plan has, `counts` what was traced, rehearsed and solved.
    """

    name: str
    steps: int = 0
    tracing_steps: int = 0
    plans: int = 0
    planning_seconds: float = 0.0
    measured_steps: int = 0
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    difference: float | None = None
    groups: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def is_bad(self, kernels: str) -> bool:
        """Whether it failed, went over its budget, or differs without 16 bits being the reason."""
        over = (_share(self) or 0.0) > 1
        allowed = 0.0 if kernels == "eager" else ROUNDING
        differs = (self.difference or 0.0) > allowed and self.name not in SIXTEEN_BITS
        return bool(self.error or over or differs)


def _share(row: Row) -> float | None:
    """Give the peak as a share of the budget, where both are known."""
    return row.peak_bytes / row.budget_bytes if row.peak_bytes and row.budget_bytes else None


class Meter(logging.Handler):
    """Counts plans by what is logged, and times and measures steps."""

    def __init__(self, period: int, kernels: str) -> None:
        super().__init__(logging.INFO)
        self.kernels = kernels
        self.plans = 0
        self.groups = 0  # of the last plan
        self.traced = 0
        self.planned_in: list[bool] = []
        self.tracing: list[float] = []  # seconds of the steps that traced
        self.peaks: list[tuple[Peak, int]] = []  # of a step, and its budget
        self._quiet = max(4, period)
        self._models: list[Any] = []
        self._budget: int | None = None
        logging.getLogger("remat").addHandler(self)
        logging.getLogger("remat").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Count what is planned, and what is looked at to be planned."""
        self.traced += str(record.msg).startswith("planning for")
        if str(record.msg).startswith("planned:"):
            self.plans += 1
            found = re.search(r"(\d+) compiled groups", record.getMessage())
            self.groups = int(found[1]) if found else 0

    def wrap(self, model: Any, *, backend: bool = False, **options: Any) -> Any:
        """Rematerialize at seven tenths of plain's peak, or as the loop asks for."""
        if self.kernels != "eager":
            costs = "measure" if "loss" in options else "estimate"  # which runs no loss
            options = {"kernels": self.kernels, "wait": True, "costs": costs} | options
        options = {"budget": 0.7, "limit_seconds": 1.0} | options
        if backend:
            self._budget = options["budget"]
            return torch.compile(model, backend="remat", options=options)
        made = remat.rematerialize(model, **options)
        self._models.append(made)
        return made

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step, and measure its peak if no plan is to be expected."""
        before = self.planned_in[-self._quiet :]
        plans, traced = self.plans, self.traced
        start = time.perf_counter()
        if len(before) == self._quiet and not any(before):
            with measure_peak() as peak:
                yield
            if (budget := self._budget_now()) is not None:
                self.peaks.append((peak, budget))
        else:
            yield
        if len(self._models) == 1 and hasattr(self._models[0].plan, "budget_bytes"):
            self._budget_now()
        if self.traced > traced:
            self.tracing.append(time.perf_counter() - start)
        self.planned_in.append(self.plans > plans)

    def _budget_now(self) -> int | None:
        """Give the most that a plan had so far: a fraction is of the most that plain took."""
        if len(self._models) == 1:
            self._budget = max(self._budget or 0, int(self._models[0].plan.budget_bytes))
        return self._budget

    def largest(self) -> tuple[int | None, int | None]:
        """Give the peak that is nearest to its budget, or beyond it, and that budget."""
        ranks = torch.distributed.is_initialized()
        least = min((peak.kept_bytes for peak, _ in self.peaks), default=0)
        peaks = [
            (peak.peak_bytes, budget)
            for peak, budget in self.peaks
            if not ranks or not 0 < peak.peak_bytes - budget <= peak.kept_bytes - least
        ] or [
            (model.plan.measured_peak_bytes, model.plan.budget_bytes)
            for model in self._models
            if getattr(model.plan, "measured_peak_bytes", None)
        ]
        return max(peaks, key=lambda pair: pair[0] / pair[1]) if peaks else (None, None)


class Clock:
    """Times the steps of a plain run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step."""
        start = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - start)


def period_of(name: str, draws: bool) -> int:
    """Give after how many steps the sizes of a loop come again."""
    return math.lcm(PERIODS.get(name, 1), DRAWS if draws else 1)


def both(name: str, size: Size, steps: int, kernels: str, draws: bool) -> Row:
    """Run a loop with its model rematerialized and in plain, in this process."""
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if kernels != "eager" and name not in SIXTEEN_BITS:
        torch.set_default_dtype(torch.double)
    loop, meter = find(name), Meter(period_of(name, draws), kernels)
    with counted() as counts:
        kept = loop(Run(meter.wrap, meter.step, size, steps, draws))
    clock = Clock()
    expected = loop(Run(step=clock.step, size=size, steps=steps, draws=draws))
    plain = statistics.median(clock.seconds) if clock.seconds else 0.0
    peak, budget = meter.largest()
    return Row(
        name, steps, len(meter.tracing), meter.plans,
        sum(meter.tracing) - plain * len(meter.tracing), len(meter.peaks), peak, budget,
        difference(kept, expected), None if kernels == "eager" else meter.groups, dict(counts),
    )  # fmt: skip


def difference(kept: Kept, expected: Kept) -> float:
    """Give the largest difference between what two runs left behind.

    Raises:
        RuntimeError: if they did not leave the same behind.
    """
    if kept.keys() != expected.keys():
        raise RuntimeError(f"not left by both: {sorted(kept.keys() ^ expected.keys())[:3]}")
    largest = 0.0
    for name, tensor in expected.items():
        if tensor.shape != kept[name].shape:
            raise RuntimeError(f"{name}: {tuple(kept[name].shape)}, not {tuple(tensor.shape)}")
        if not torch.equal(tensor, kept[name]):
            largest = max(largest, float((tensor.double() - kept[name].double()).abs().max()))
    return largest


def of_rank(_: int, case: tuple[str, Size, int, str, bool]) -> Row:
    """Run a loop in one of several processes."""
    return both(*case)


def work(name: str, size: Size, steps: int, kernels: str, draws: bool) -> Row:
    """Run a loop, of several processes if it needs them: the row is then of the worst."""
    if name not in ranks.LOOPS:
        return both(name, size, steps, kernels, draws)
    with tempfile.TemporaryDirectory() as folder:
        case = name, size, steps, kernels, draws
        found = ranks.run_ranks(Path(folder), of_rank, {name: case})[name]
    failed = {rank: row.strip() for rank, row in enumerate(found) if isinstance(row, str)}
    if failed:  # one rank's failure leads to another's
        last = (f"rank {rank}: {text.splitlines()[-1]}" for rank, text in failed.items())
        raise RuntimeError("; ".join(last))
    worst: Row = max(found, key=lambda row: (row.difference, _share(row) or 0.0))
    return worst


def run(name: str, size: Size, kernels: str, draws: bool) -> Row:
    """Run a loop in a process of its own; what it fails with is its row."""
    steps = max(STEPS, 3 * period_of(name, draws)) * (2 if name in ranks.LOOPS else 1)
    timeout = TIMEOUT_SECONDS + (COMPILING_SECONDS if kernels != "eager" else 0.0)
    try:
        return run_alone(work, name, size, steps, kernels, draws, timeout_seconds=timeout)
    except Ended as error:
        return Row(name, steps, error=str(error))


def shown(row: Row) -> str:
    """Describe a row in one line of the table."""
    if row.error is not None:
        return f"{row.name:44}failed: {row.error[:400]}"
    share = "-" if (found := _share(row)) is None else f"{found:.3f}"
    return (
        f"{row.name:44}{row.steps:>6}{row.tracing_steps:>8}{row.plans:>7}{row.planning_seconds:>10.1f}"
        f"{row.measured_steps:>10}{share:>13}{row.difference:>12.1e}"
        f"{'' if row.groups is None else row.groups:>8}"
    )


def main() -> int:
    """Run the loops, print a table and write the JSON; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="such as 'FSDP2*'")
    parser.add_argument("--quick", action="store_true", help="tiny models; nothing is kept")
    parser.add_argument("--kernels", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--sizes", action="store_true", help="other sizes in each step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are kept")
    options = parser.parse_args()
    chosen = [name for name in names() if fnmatch.fnmatch(name, options.only)]
    print(f"{'':44}{'steps':>6}{'tracing':>8}{'plans':>7}{'planning s':>10}{'measured':>10}"
          f"{'peak/budget':>13}{'difference':>12}{'groups':>8}")  # fmt: skip
    rows = []
    for name in chosen:
        size = SMALL if options.quick else LARGE
        rows.append(run(name, size, options.kernels, options.sizes))
        print(shown(rows[-1]), flush=True)
    bad = [row.name for row in rows if row.is_bad(options.kernels)]
    print(f"\n{len(rows) - len(bad)} of {len(rows)} right and within budget; not: {bad or 'none'}")
    stem = "loops" + "_sizes" * options.sizes + "_inductor" * (options.kernels == "inductor")
    results = RESULTS.with_stem(stem)
    path = options.json or (None if options.quick or options.only != "*" else results)
    if path is not None:
        write_results(path, {"loops": [asdict(row) for row in rows]}, PACKAGES)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
