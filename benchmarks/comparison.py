"""Two variants of one training step in turns: peaks, and the ratio of their times.

Each side steps a model of its own, with the same weights, batch and seed, from no gradients. A
time ratio is the median over rounds of the ratio within a round, one step of each, so that what
slows the machine for a while slows both sides; its quartiles say how much noise is left. Only two
share a process: each further model costs all of them time, the plain one most.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from provenance import write_results
from remat_exec import measure_peak
from zoo import Example

__all__ = ["PLAIN", "Pair", "Runner", "Side", "Variant", "compare", "print_table", "write_json"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A name, and how to make the model to step from a copy of the plain one."""

    name: str
    make: Callable[[nn.Module], nn.Module]


PLAIN = Variant("plain", lambda model: model)


@dataclass(frozen=True, slots=True)
class Side:
    """What one variant measured; `setup_seconds` is up to the end of its first step."""

    name: str
    peak_bytes: int
    seconds: float
    setup_seconds: float


@dataclass(frozen=True, slots=True)
class Pair:
    """One variant beside another; all ratios are to the other.

    `quartiles` are the first and the third of the time ratio over the rounds. The gradient error is
    the distance of all gradients together, relative to their norm, under one seed.
    """

    one: Side
    other: Side
    time_ratio: float
    quartiles: tuple[float, float]
    gradient_error: float

    @property
    def peak_ratio(self) -> float:
        """The peak of one relative to the other's."""
        return self.one.peak_bytes / self.other.peak_bytes


class Runner:
    """A variant that is set up, with a model of its own; its peak is measured."""

    def __init__(self, variant: Variant, example: Example) -> None:
        self.name = variant.name
        self.times: list[float] = []
        self._example = example
        self._base = copy.deepcopy(example.model)
        start = time.perf_counter()
        self._model = variant.make(self._base)
        self.step()
        self.setup_seconds = time.perf_counter() - start
        self.step()
        parameters = self._base.parameters()
        self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.step()  # what is learnt from a first backward holds from here on
        self.clear()
        with measure_peak() as peak:
            example.step(self._model)
        self.peak_bytes = peak.peak_bytes
        self.clear()

    def step(self) -> float:
        """Run one step from no gradients with a fixed seed; return its seconds."""
        self.clear()
        torch.manual_seed(0)
        start = time.perf_counter()
        self._example.step(self._model)
        return time.perf_counter() - start

    def clear(self) -> None:
        """Drop the gradients."""
        self._base.zero_grad(set_to_none=True)

    def timed_round(self) -> None:
        """Take the time of one step."""
        self.times.append(self.step())
        self.clear()

    def side(self) -> Side:
        """Give what was measured."""
        seconds = statistics.median(self.times)
        return Side(self.name, self.peak_bytes, seconds, self.setup_seconds)


def compare(one: Runner, other: Runner, rounds: int) -> Pair:
    """Time two variants that are set up in turns, `rounds` steps of each."""
    gc.collect()
    for runner in (one, other):
        runner.times.clear()
    for _ in range(rounds):
        other.timed_round()
        one.timed_round()
    ratios = [mine / its for mine, its in zip(one.times, other.times, strict=True)]
    several = ratios if len(ratios) > 1 else ratios * 2
    first, middle, third = statistics.quantiles(several, n=4, method="inclusive")
    error = _distance(one.gradients, other.gradients)
    return Pair(one.side(), other.side(), middle, (first, third), error)


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    difference = sum(
        float((a - b).abs().square().sum()) for a, b in zip(found, expected, strict=True)
    )
    norm = sum(float(b.abs().square().sum()) for b in expected)
    return math.sqrt(difference / norm)


def print_table(pairs: Mapping[str, Pair]) -> None:
    """Print one row for each pair, by its title."""
    print(f"{'':24}{'peak MiB':>10}{'peak':>7}{'ms':>9}{'time (quartiles)':>20}"
          f"{'set-up s':>10}{'grad error':>12}")  # fmt: skip
    for title, pair in pairs.items():
        first, third = pair.quartiles
        spread = f"{pair.time_ratio:.3f} ({first:.3f}-{third:.3f})"
        print(f"{title:24}{pair.one.peak_bytes / 2**20:10.1f}{pair.peak_ratio:7.2f}"
              f"{pair.one.seconds * 1e3:9.1f}{spread:>20}{pair.one.setup_seconds:10.1f}"
              f"{pair.gradient_error:12.1e}")  # fmt: skip


def write_json(path: Path, pairs: Mapping[str, Pair], **facts: Any) -> None:
    """Write pairs and what they were made on."""
    write_results(path, {**facts, "models": {name: asdict(pair) for name, pair in pairs.items()}})
