"""Variants of one training step side by side: peaks, and times as medians of interleaved rounds.

Every variant steps a model of its own, with the same weights, batch and seed. One that cannot be
built or fails is kept, with its error. Times are reported relative to the first variant's, from the
same rounds; so are peaks, which count what a step allocates from no gradients.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from remat_exec import measure_peak
from remat_graph.files import write_atomically
from zoo import Example

__all__ = ["Comparison", "Figures", "Variant", "compare", "print_table", "write_json"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Variant:
    """A name, and how to make the model to step from a copy of the plain one."""

    name: str
    make: Callable[[nn.Module], nn.Module]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one variant measured; ratios and the gradient error are to the first variant.

    The gradient error is the distance of all gradients together, relative to their norm, under one
    seed. `setup_seconds` is from making the variant to the end of its first step. Before the first
    round there are no times.
    """

    name: str
    peak_bytes: int | None = None
    peak_ratio: float | None = None
    seconds: float | None = None
    time_ratio: float | None = None
    setup_seconds: float | None = None
    gradient_error: float | None = None
    error: str | None = None


class _Runner:
    """One variant, with a model of its own."""

    def __init__(self, variant: Variant, example: Example) -> None:
        self.name = variant.name
        self.example = example
        self.times: list[float] = []
        self.peak_bytes: int | None = None
        self.setup_seconds: float | None = None
        self.gradients: list[Tensor] = []
        self.error: str | None = None
        self.base = copy.deepcopy(example.model)
        self.guarded(lambda: self._set_up(variant))

    def _set_up(self, variant: Variant) -> None:
        start = time.perf_counter()
        self.model = variant.make(self.base)
        self.step()
        self.setup_seconds = time.perf_counter() - start
        self.step()
        self.gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self.base.parameters()
        ]
        self.clear()
        with measure_peak() as peak:
            self.example.step(self.model)
        self.peak_bytes = peak.peak_bytes
        self.clear()

    def guarded(self, action: Callable[[], object]) -> None:
        """Run something unless this variant has failed; an exception is its result."""
        if self.error is not None:
            return
        try:
            action()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.info("%s: %s failed", self.example.name, self.name, exc_info=True)

    def step(self) -> float:
        """Run one step from no gradients with a fixed seed; return its seconds."""
        self.clear()
        torch.manual_seed(0)
        start = time.perf_counter()
        self.example.step(self.model)
        return time.perf_counter() - start

    def clear(self) -> None:
        """Drop the gradients."""
        self.base.zero_grad(set_to_none=True)

    def timed_round(self) -> None:
        """Take the time of one step."""
        self.times.append(self.step())
        self.clear()

    def ratios(self, other: _Runner) -> list[float]:
        """Take each round's time relative to another's in the same round."""
        return [mine / its for mine, its in zip(self.times, other.times, strict=True)]

    def figures(self, first: _Runner) -> Figures:
        if self.error is not None:
            return Figures(self.name, error=self.error)
        assert self.peak_bytes is not None
        assert first.peak_bytes is not None
        return Figures(
            self.name,
            peak_bytes=self.peak_bytes,
            peak_ratio=self.peak_bytes / first.peak_bytes,
            seconds=statistics.median(self.times) if self.times else None,
            time_ratio=statistics.median(self.ratios(first)) if self.times else None,
            setup_seconds=self.setup_seconds,
            gradient_error=_distance(self.gradients, first.gradients),
        )


class Comparison:
    """Variants of one example in this process; the first is what the others are held against.

    Peaks are known as soon as a variant is added, times once all of them were stepped in turns.
    """

    def __init__(self, example: Example, first: Variant) -> None:
        """Set up the first variant.

        Raises:
            RuntimeError: if it fails.
        """
        self._example = example
        self._runners = {first.name: _Runner(first, example)}
        self._first = self._runners[first.name]
        self._check_first()

    def add(self, variant: Variant) -> Figures:
        """Set up one more variant and measure its peak.

        Raises:
            ValueError: if there is one of this name.
        """
        if variant.name in self._runners:
            raise ValueError(f"{self._example.name}: there are two variants {variant.name!r}")
        runner = _Runner(variant, self._example)
        self._runners[variant.name] = runner
        return runner.figures(self._first)

    @property
    def first_peak_bytes(self) -> int:
        """The peak of the first variant."""
        assert self._first.peak_bytes is not None
        return self._first.peak_bytes

    def drop(self, name: str) -> None:
        """Forget a variant, for one that was set up only for its peak."""
        del self._runners[name]

    def run(self, rounds: int) -> list[Figures]:
        """Time all variants, one step of each in every round.

        A time ratio is the median over rounds of the ratio within a round, so that what slows the
        machine for a while slows both sides.

        Raises:
            RuntimeError: if the first variant fails.
        """
        for _ in range(rounds):
            for runner in self._runners.values():
                runner.guarded(runner.timed_round)
        self._check_first()
        return [runner.figures(self._first) for runner in self._runners.values()]

    def ratios(self, name: str, other: str) -> list[float]:
        """Take the times of one variant relative to those of another, round by round."""
        return self._runners[name].ratios(self._runners[other])

    def _check_first(self) -> None:
        if self._first.error is not None:
            raise RuntimeError(
                f"{self._example.name}: {self._first.name} failed: {self._first.error}"
            )


def compare(example: Example, variants: Sequence[Variant], rounds: int) -> list[Figures]:
    """Measure all variants in this process; see `Comparison`.

    Raises:
        RuntimeError: if the first variant fails.
    """
    comparison = Comparison(example, variants[0])
    for variant in variants[1:]:
        comparison.add(variant)
    return comparison.run(rounds)


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    difference = sum(
        float((a - b).abs().square().sum()) for a, b in zip(found, expected, strict=True)
    )
    norm = sum(float(b.abs().square().sum()) for b in expected)
    return math.sqrt(difference / norm)


def print_table(title: str, figures: Sequence[Figures]) -> None:
    """Print one model's variants."""
    print(f"\n{title}")
    print(
        f"{'':28}{'peak MiB':>10}{'peak':>7}{'ms':>9}{'time':>7}{'set-up s':>10}{'grad error':>12}"
    )
    for row in figures:
        if row.error is not None:
            print(f"{row.name:28}failed: {row.error[:90]}")
            continue
        assert row.peak_bytes is not None
        assert row.seconds is not None
        print(
            f"{row.name:28}{row.peak_bytes / 2**20:10.1f}{row.peak_ratio:7.2f}"
            f"{row.seconds * 1e3:9.1f}{row.time_ratio:7.2f}{row.setup_seconds:10.1f}"
            f"{row.gradient_error:12.1e}"
        )


def write_json(path: Path, results: Mapping[str, Sequence[Figures]], **facts: object) -> None:
    """Write results and the machine they were made on; a reader sees the old file or the new."""
    report = {
        "machine": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "processor": platform.machine(),
        },
        **facts,
        "models": {name: [asdict(row) for row in rows] for name, rows in results.items()},
    }
    write_atomically(path, json.dumps(report, indent=1) + "\n")
