"""Training steps that differ: whether each is right, and within the budget.

Each model of `pattern_models` is trained for 50 steps, in a process of its own, beside plain eager
with the same seeds. The budget is six tenths of the most that plain takes in any of these steps;
where that is refused, what the error names, and so on until nothing is refused. Weights are made
equal after each step, so that rounding does not add up.

| column | |
|---|---|
| equal | bitwise: loss, gradients and buffers are eager's at every step; else how far they are,
  relative to the largest gradient of the step |
| peak | the most of any step, beyond what was there before it; of the steps after planning alone |
| over | steps that took more than the budget |
| plans | how many the steps ran by; `planned` the seconds spent planning, Dynamo's left out |

A step in which a graph is captured cannot be measured: it is run once more, with the same seed.

    python benchmarks/patterns.py [--models NAME ...] [--steps 50] [--share 0.6] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import remat
from pattern_models import PATTERNS, Pattern, seed_everything
from provenance import write_results
from remat.planning.task import RunnablePlan
from remat.session.session import Session
from remat.session.step import StepState
from remat.session.step_planner import StepPlanner
from remat_graph.torch import AllocationRecorder

RESULTS = Path(__file__).parent / "results" / "patterns.json"
ATTEMPTS = 5
LIMIT_SECONDS = 2.0
Step = dict[str, torch.Tensor]


def main() -> int:
    """Train what was asked for, print a table and write the JSON; 1 if any is wrong or over."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(PATTERNS), choices=list(PATTERNS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--quick", action="store_true", help="nothing is kept")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(judge(options.work, options.steps, options.share)))
        return 0
    known = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else []
    rows = {row["model"]: row for row in known}
    print(_HEADING, flush=True)
    for name in options.models:
        rows[name] = _in_new_process(name, options)
        print(_line(rows[name]), flush=True)
        if not options.quick:
            found = {"models": [rows[n] for n in PATTERNS if n in rows]}
            write_results(RESULTS, found, ("remat", "torch", "transformers"))
    return int(any(rows[n].get("over", True) for n in options.models))


def _in_new_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", name]
    command += ["--steps", str(options.steps), "--share", str(options.share)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"model": name, "error": f"exit code {done.returncode}"}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def judge(name: str, steps: int, share: float) -> dict[str, Any]:
    """Train a model in this process, at the first budget that is not refused."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    gc.freeze()
    pattern = PATTERNS[name]
    plain_peaks, plain_seconds = _plain(pattern, steps)
    budget = int(share * max(plain_peaks))
    refused: list[int] = []
    for _ in range(ATTEMPTS):
        trained = Trained()
        try:
            _train(pattern, steps, budget, trained)
        except (remat.BudgetTooSmall, remat.BudgetExceeded) as error:
            refused.append(len(trained.peaks))
            budget = max(budget + budget // 50, getattr(error, "smallest_bytes", 0))
        else:
            return {
                "model": name, "about": pattern.about, "steps": steps,
                "plain_peak_bytes": max(plain_peaks), "plain_peaks": plain_peaks,
                "plain_seconds": plain_seconds, "budget_bytes": budget,
                "least": bool(refused), "refused_at": refused, **trained.facts(budget),
            }  # fmt: skip
    return {"model": name, "error": f"refused at steps {refused}, at last with {budget} bytes"}


@dataclass
class Trained:
    """What was seen of the steps of one model."""

    peaks: list[int] = field(default_factory=list)
    captured_at: list[int] = field(default_factory=list)
    error: float = 0.0
    unequal: list[int] = field(default_factory=list)
    plans: int = 0
    planning_seconds: float = 0.0
    seconds: float = 0.0
    warned: list[str] = field(default_factory=list)

    def facts(self, budget: int) -> dict[str, Any]:
        """List what is known, for JSON."""
        settled = [p for at, p in enumerate(self.peaks) if at not in self.captured_at]
        return {
            "peaks": self.peaks,
            "captured_at": self.captured_at,
            "peak_bytes": max(self.peaks),
            "settled_peak_bytes": max(settled, default=None),
            "over": [at for at, peak in enumerate(self.peaks) if peak > budget],
            "error": self.error,
            "unequal": self.unequal,
            "plans": self.plans,
            "planning_seconds": self.planning_seconds,
            "seconds": self.seconds,
            "warned": self.warned,
        }


class Meter:
    """Measures whole steps, also those that remat records itself.

    Where a graph is captured in a step, costs are measured between, and `interrupted` says that the
    step must be run once more.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.plans = 0
        self.interrupted = False
        self.peak_bytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step."""
        self.interrupted = False
        gc.collect()
        with AllocationRecorder(torch.device("cpu"), shared=True) as recorder:
            yield
        self.peak_bytes = recorder.peak_bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See when remat plans, and for how long."""

        def timed(function: Callable[..., Any], *args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - start

        def captured(session: Session, *args: Any) -> Any:
            self.interrupted = True
            made = timed(plan, session, *args)
            self.plans += isinstance(made, RunnablePlan)
            return made

        def chosen(chooser: StepPlanner, *args: Any) -> Any:
            self.plans += 1
            return choose(chooser, *args)

        plan, begin, choose = Session.plan, StepState.begin, StepPlanner.plan
        setattr(Session, "plan", captured)  # noqa: B010
        setattr(StepState, "begin", lambda *args: timed(begin, *args))  # noqa: B010
        setattr(StepPlanner, "plan", chosen)  # noqa: B010
        try:
            yield
        finally:
            setattr(Session, "plan", plan)  # noqa: B010
            setattr(StepState, "begin", begin)  # noqa: B010
            setattr(StepPlanner, "plan", choose)  # noqa: B010


def _run(model: Any, pattern: Pattern, step: int, meter: Meter) -> tuple[Step, float]:
    """Take a step; give its gradients, buffers and loss, and the seconds it took."""
    seed_everything(1000 + step)
    batch = pattern.batch(step)
    model.zero_grad()
    with meter.step():
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        seconds = time.perf_counter() - start
    found = {"loss": loss.detach().clone()}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found, seconds


def _plain(pattern: Pattern, steps: int) -> tuple[list[int], float]:
    seed_everything(0)
    model, meter, peaks, spent = pattern.build(), Meter(), [], 0.0
    for step in range(steps):
        _, seconds = _run(model, pattern, step, meter)
        peaks.append(meter.peak_bytes)
        spent += seconds
        _descend(model)
    return peaks, spent


def _train(pattern: Pattern, steps: int, budget: int, trained: Trained) -> None:
    """Train beside eager.

    Raises:
        BudgetTooSmall, BudgetExceeded: as remat does; `trained` has the steps before.
    """
    seed_everything(0)
    plain: Any = pattern.build()
    model: Any = remat.rematerialize(
        copy.deepcopy(plain), budget=budget, limit_seconds=LIMIT_SECONDS
    )
    meter = Meter()
    for step in range(steps):
        expected, _ = _run(plain, pattern, step, meter)
        with meter.watching(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found, seconds = _run(model, pattern, step, meter)
            captured = meter.interrupted
            while meter.interrupted:
                found, _ = _run(model, pattern, step, meter)
        trained.warned += [f"{step}: {w.message}" for w in warned if _is_ours(w)]
        trained.peaks.append(meter.peak_bytes)
        trained.seconds += seconds
        trained.captured_at += [step] * captured
        error = _difference(found, expected)
        trained.error = max(trained.error, error)
        trained.unequal += [step] * (error > 0)
        _descend(plain)
        with torch.no_grad():
            for ours, theirs in zip(_tensors(model), _tensors(plain), strict=True):
                ours.copy_(theirs)
    trained.planning_seconds, trained.plans = meter.seconds, meter.plans


def _is_ours(warning: warnings.WarningMessage) -> bool:
    return warning.category.__module__.startswith("remat")


def _tensors(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _difference(found: Step, expected: Step) -> float:
    """Give the largest difference, relative to the largest gradient, or 0 where bits are equal."""
    if found.keys() != expected.keys():
        return float("inf")
    largest = max(float(t.abs().max()) for n, t in expected.items() if t.is_floating_point())
    worst = 0.0
    for name, wanted in expected.items():
        if not torch.equal(found[name], wanted):
            worst = max(worst, float((found[name] - wanted).abs().max()) / largest)
    return worst


def _descend(model: Any) -> None:
    """Take a small step, of a length that does not depend on the scale of the gradients."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-3 * parameter.grad / max(largest, 1e-6))


_HEADING = (
    f"{'model':<15} {'equal':<8} {'plain':>7} {'budget':>7} {'peak':>7} {'settled':>8} MiB "
    f"{'over':>4} {'plans':>5} {'planned':>8} {'time':>5}"
)


def _line(row: dict[str, Any]) -> str:
    if "peaks" not in row:
        return f"{row['model']:<15} {row['error']}"
    sizes = [row[k] for k in ("plain_peak_bytes", "budget_bytes", "peak_bytes")]
    settled = row["settled_peak_bytes"] or 0
    equal = "bitwise" if not row["unequal"] else f"{row['error']:.0e}"
    return (
        f"{row['model']:<15} {equal:<8} " + " ".join(f"{size / 2**20:7.2f}" for size in sizes)
        + f" {settled / 2**20:8.2f}     {len(row['over']):>4} {row['plans']:>5} "
        f"{row['planning_seconds']:6.1f} s {row['seconds'] / row['plain_seconds']:5.1f}"
        + (" (the least)" if row["least"] else "")
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
