"""Compiled groups where sizes change: found once, compiled once, for all sizes of a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from integration_cases.sized import MODELS
from torch import nn

import remat
from remat_exec import measure_peak
from remat_graph.torch.fusing import compiling
from remat_graph.torch.fusing.sized_code import SizedCode

pytestmark = pytest.mark.usefixtures("kernels_compiled_here")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[SizedCode | str]:
    """What is compiled: groups of any size, or the keys of those of one."""
    seen: list[SizedCode | str] = []

    def note(run: Callable) -> Callable:
        def noted(item: SizedCode, *numbers: object) -> object:
            seen.append(item if isinstance(item, SizedCode) else item.key)
            return run(item, *numbers)

        return noted

    for name in ("_code_of_sizes", "_compiled"):
        monkeypatch.setattr(compiling, name, note(getattr(compiling, name)))
    return seen


class Annealed(nn.Module):
    """A layer, a norm and a softmax that a temperature divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, temperature: float) -> torch.Tensor:
        scores = torch.tanh(self.norm(self.up(x)) * 2) / temperature
        return (scores.softmax(-1) * scores.sigmoid()).square().sum()


class Signed(nn.Module):
    """A layer and a norm, times a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, counter: int) -> torch.Tensor:
        return (torch.tanh(self.norm(self.up(x)) * 2).square() * counter).sum()


def steps_by_groups(
    model: nn.Module, batches: list[tuple], budget: float | int
) -> Iterator[nn.Module]:
    """Train by estimates, by which groups are faster; give the model behind each step.

    Gradients must be those of eager in double precision, and peaks within the budget.
    """
    model = model.double()
    run = remat.rematerialize(
        copy.deepcopy(model), budget=budget, kernels="inductor", costs="estimate", limit_seconds=0.2
    )
    for batch in batches:
        inputs = [
            each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
            for each in batch
        ]
        found = []
        for each in (run, model):
            each.zero_grad()
            torch.manual_seed(3)
            with measure_peak() as peak:
                each(*inputs).backward()
            assert each is model or peak.peak_bytes <= run.plan.budget_bytes
            found.append([parameter.grad for parameter in each.parameters()])
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)
        yield run


def is_grouped(run: nn.Module) -> bool:
    return any(op.name.endswith("__fused") for op in run.plan.graph.ops)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["attention", "dropout", "graph", "images"])
def test_a_group_is_compiled_once_for_all_sizes(name: str, compiled: list[SizedCode | str]) -> None:
    """From when it is there on, each size runs by it: dropout's masks are those of eager."""
    make, inputs_of, sizes = MODELS[name]
    torch.manual_seed(0)
    sizes = [*sizes[:4], sizes[3], *(sizes[3] - less for less in (1, 2, 4, 5)), sizes[2]]
    counts, grouped = [], []
    for run in steps_by_groups(make(), [inputs_of(size) for size in sizes], 2**30):
        counts.append(len(compiled))
        grouped.append(is_grouped(run))
    assert grouped[0] is False
    assert all(grouped[7:])  # two calls before, of sizes that are near
    assert counts[6] == counts[-1] > 0
    assert all(isinstance(each, SizedCode) for each in compiled)
    assert {each.failure for each in compiled} == {None}


@pytest.mark.sweep
def test_plans_of_groups_serve_sizes_that_are_near(compiled: list[SizedCode | str]) -> None:
    """Within a budget that not all of them can store everything in."""
    make, inputs_of, _ = MODELS["graph"]
    torch.manual_seed(0)
    sizes = [61, 74, 70, 70, 70, 78, 58, 83, 40, 90, 77]
    again, solvers = [], []
    for run in steps_by_groups(make(), [inputs_of(size) for size in sizes], 0.75):
        again.append(is_grouped(run) and run.plan.recomputations > 0)
        solvers.append(run.plan.solver)
    assert all(isinstance(each, SizedCode) for each in compiled)
    assert any(again)
    assert solvers[-1] == "known schedule"


def test_a_number_that_is_no_size_is_in_no_group(compiled: list[SizedCode | str]) -> None:
    """What it divides by is an argument of one operator; the others are compiled once."""
    x = torch.randn(64, 8)
    batches = [(x, 2.0 / (1 + step)) for step in range(7)]
    *_, run = steps_by_groups(Annealed(), batches, 2**30)
    assert is_grouped(run)
    assert len({each.key if isinstance(each, SizedCode) else each for each in compiled}) == len(
        compiled
    )


@pytest.mark.sweep
def test_a_counter_may_be_below_zero() -> None:
    """Sizes may not: code of any size is for none that is."""
    x = torch.randn(64, 8)
    plans = []
    counters = 7, 9, 8, 5, 6, 10, 11, 12, -7, -8
    for run in steps_by_groups(Signed(), [(x, n) for n in counters], 2**30):
        plans.append(run.plan)
        assert len(plans) != 8 or is_grouped(run)
    assert plans[6] is plans[7]
    assert plans[8] is not plans[7]
    assert plans[9] is not plans[7]  # what runs one by one takes more than that has room for


class Unread(nn.Module):
    """Gives scores beside the loss, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.up(x)
        return {"scores": scores.tanh(), "loss": (torch.tanh(scores * 2) + scores).square().sum()}


@pytest.mark.sweep
def test_models_with_outputs_that_no_step_reads_run_groups() -> None:
    run = remat.rematerialize(
        Unread(), budget=2**30, kernels="inductor", costs="estimate", limit_seconds=0.2, wait=True
    )
    for rows in (64, 60, 70, 66, 63, 61):
        run(torch.randn(rows, 8))["loss"].backward()
    assert is_grouped(run)


class Padded(nn.Module):
    """Pads what comes out of a layer, of which torch decides each size to compile it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(self.up(x).tanh().square(), (0, 0, 0, 1), value=2.0).exp().sum()


def test_what_torch_decides_sizes_of_is_in_no_group(compiled: list[SizedCode | str]) -> None:
    """Else each size would be compiled."""
    rows = 31, 33, 29, 35, 37, 30, 28, 31, 26
    counts, grouped = [], []
    for run in steps_by_groups(Padded(), [(torch.randn(count, 8),) for count in rows], 2**30):
        counts.append(len(compiled))
        grouped.append(is_grouped(run))
    assert grouped[-1]
    assert counts[-1] == counts[-3] > 0
    assert {each.failure for each in compiled} == {None}
