"""Compiled groups in steps of several regions: of ever new sizes, and compiled beside the steps."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from integration_cases.kernels import Here
from torch import nn

import remat
from remat.session import step_kernels
from remat.session.kind_finder import KindFinder
from remat_exec import measure_peak
from remat_graph.torch import Capture
from remat_graph.torch.capturing import captures, groups_of_sizes, ways
from remat_graph.torch.fusing import compiling, missing
from remat_graph.torch.fusing.kernel import Kernel

_WIDTH = 8


class Part(nn.Module):
    """Something written out between products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return x + self.down(torch.tanh(hidden * 0.8) * hidden)


class Two(nn.Module):
    """Two regions, with a break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


class Steps:
    """Steps of a model by groups beside eager's: which programs its regions run as.

    `started` counts the kernels of each compilation; `within_steps` names those that were compiled
    outside of these.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        torch.manual_seed(0)
        self.eager = Two().double()
        self.run = remat.rematerialize(
            copy.deepcopy(self.eager), budget="1MiB", kernels="inductor", limit_seconds=0.1,
            **options,
        )  # fmt: skip
        self.programs: list[Capture] = []
        self.started: list[int] = []
        self.within_steps: list[str] = []
        there: set[str] = set()
        steps, find, compile_ = self, KindFinder.find, compiling._compiled

        def found(finder: KindFinder, *args: Any) -> tuple[int, Capture]:
            number, program = find(finder, *args)
            self.programs.append(program)
            return number, program

        def noted(kernel: Kernel) -> Any:
            self.within_steps.extend([] if kernel.key in there else [kernel.key])
            return compile_(kernel)

        class Counted(Here):
            def __init__(self, kernels: Iterable[Kernel]) -> None:
                kernels = list(kernels)
                there.update(kernel.key for kernel in kernels)
                super().__init__(kernels)
                steps.started.append(len(kernels))

        monkeypatch.setattr(missing, "_compiled", Counter())  # by other tests of this process
        monkeypatch.setattr(KindFinder, "find", found)
        monkeypatch.setattr(compiling, "_compiled", noted)
        monkeypatch.setattr(step_kernels, "Compilation", Counted)

    def step(self, rows: int) -> None:
        x = torch.randn(rows, 6, _WIDTH, dtype=torch.double)
        self.eager.zero_grad()
        self.run.zero_grad()
        self.eager(x).backward()
        with measure_peak() as peak:
            self.run(x).backward()
        assert peak.peak_bytes <= 2**20
        for one, two in zip(self.run.parameters(), self.eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How operators were costed."""
    seen: list[str] = []
    cost = captures.costed_graph

    def noted(program: Any, costs: str, *rest: Any) -> Any:
        seen.append(costs)
        return cost(program, costs, *rest)

    monkeypatch.setattr(captures, "costed_graph", noted)
    return seen


@pytest.mark.sweep
def test_regions_of_ever_new_sizes_share_their_kernels(
    monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    """They are found and compiled once, beside the steps; later sizes run as those that are known.

    So is what is needed besides, which is known once some were measured, and are left out.
    """

    def left_out(program: Any, times_of: Any, left_out: frozenset[str] = frozenset()) -> Any:
        times_of(program)
        return left_out | {op for op in program.calls if op == "mul_1"}

    monkeypatch.setattr(ways, "ops_left_out", left_out)
    monkeypatch.setattr(groups_of_sizes, "ops_left_out", left_out)
    steps = Steps(monkeypatch)
    for rows in (12, 16, 13, 15, 14, 11, 17, 18, 12, 16, 13):
        steps.step(rows)
    measured.clear()
    steps.programs.clear()
    for rows in (19, 10, 20, 21):
        steps.step(rows)
    assert len(steps.programs) == 8
    assert all(program.unfused for program in steps.programs)
    assert not measured
    assert len(steps.started) == 2
    assert all(steps.started), steps.started
    assert not steps.within_steps


def test_where_kernels_are_always_missing_regions_run_eager_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Vain:
        is_done = True

        def __init__(self, kernels: Iterable[Kernel]) -> None:
            steps.started.append(len(list(kernels)))

    steps = Steps(monkeypatch)
    monkeypatch.setattr(step_kernels, "_MOST_TIMES", 2)
    monkeypatch.setattr(step_kernels, "Compilation", Vain)
    for rows in (7,) * 9:
        steps.step(rows)
    assert len(steps.started) == 3
    assert all(program.unfused is None for program in steps.programs)
    assert not steps.within_steps
