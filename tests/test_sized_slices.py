"""Calls of ever new sizes where rounding may differ: in the slices and the schedule of one near."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from integration_cases.lengths import Inputs, Language, words
from integration_cases.sweeps import swept
from torch import nn
from torch.nn.functional import relu, silu

import remat
from remat.planning.task import RunnablePlan
from remat.session import region_planner
from remat_exec import codegen, measure_peak
from remat_graph import simulate
from remat_graph.torch import SizedRegion
from remat_graph.torch.capturing import ways
from remat_solvers import store_all


class Gated(nn.Module):
    """Gated feed-forward layers, much wider inside than outside."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(8, 256) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(8, 256) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(256, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            x = x + down(silu(gate(x)) * up(x))
        return x.square().mean()


class Convolutions(nn.Module):
    """Convolutions of batches of any size, of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(relu(self.first(x))).square().mean()


def as_many_words(length: int, seed: int) -> tuple[torch.Tensor, ...]:
    return words(400 // length, length, seed)


def values(*shape: int, seed: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[random.Random, int], Inputs], float]] = {
    "lengths": (Language, lambda d, at: words(4, d.randint(30, 130), at), 0.35),
    "batches": (Language, lambda d, at: as_many_words(d.randint(30, 130), at), 0.35),
    "tied": (lambda: Language(tied=True), lambda d, at: words(4, d.randint(30, 130), at), 0.4),
    "dropout": (lambda: Language(rate=0.2), lambda d, at: words(4, d.randint(30, 130), at), 0.35),
    "logits": (lambda: Language(both=True), lambda d, at: words(4, d.randint(30, 130), at), 0.5),
    "double": (lambda: Language().double(), lambda d, at: words(4, d.randint(30, 130), at), 0.35),
    "gated": (Gated, lambda d, at: values(d.randint(2, 5), d.randint(30, 99), 8, seed=at), 0.2),
    "images": (
        Convolutions,
        lambda d, at: values(d.randint(3, 6), 3, d.randint(20, 40), d.randint(20, 40), seed=at),
        0.6,
    ),
}


def gradients(model: nn.Module, run: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    returned = run(*inputs)
    (returned[0] if isinstance(returned, tuple) else returned).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def translated(monkeypatch: pytest.MonkeyPatch) -> list[RunnablePlan]:
    """List the plans that are made by those of sizes that are near."""
    plans: list[RunnablePlan] = []
    nearby = region_planner.plan_nearby

    def listed(*args: Any) -> RunnablePlan | None:
        planned = nearby(*args)
        plans.extend([planned] if planned is not None else [])
        return planned

    monkeypatch.setattr(region_planner, "plan_nearby", listed)
    return plans


@pytest.mark.parametrize("name", swept(MODELS, ["dropout"]))
def test_new_sizes_run_in_slices_within_the_budget_and_right(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, batch, share = MODELS[name]
    draw, steps = random.Random(1), 8
    batches = [batch(draw, at) for at in range(steps)]
    torch.manual_seed(0)
    eager = make()
    expected, most = [], 0
    for inputs in batches:
        with measure_peak() as peak:
            expected.append([each.clone() for each in gradients(eager, eager, inputs)])
        most = max(most, peak.peak_bytes)
    near = translated(monkeypatch)
    model, budget = copy.deepcopy(eager), int(share * most)
    run = remat.rematerialize(model, budget=budget, numerics="rounding", limit_seconds=0.1)
    tolerance = 1e-12 if name == "double" else 5e-6
    for inputs, wanted in zip(batches, expected, strict=True):
        with measure_peak() as peak:
            found = gradients(model, run, inputs)
        assert peak.peak_bytes <= budget, inputs[0].shape
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() <= tolerance * other.abs().max() + 1e-30
    assert len(near) >= steps // 4
    for planned in near:  # its graph was not made yet, where it is below a rehearsed size
        assert (planned.plan.whole_time is None) == (not planned.capture.sliced)
        simulated = simulate(planned.capture.graph, planned.plan.schedule)
        assert simulated.peak_bytes <= planned.executable.peak_bytes <= budget
    assert name == "images" or any(planned.capture.sliced for planned in near)


@pytest.mark.sweep
def test_code_of_slices_is_compiled_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = codegen._compiled

    def counted(source: str, owner: object) -> Any:
        compiled.append(source)
        return compile_(source, owner)

    monkeypatch.setattr(codegen, "_compiled", counted)
    near = translated(monkeypatch)
    torch.manual_seed(0)
    model = Language()
    run = remat.rematerialize(model, budget=4 * 2**20, numerics="rounding", limit_seconds=0.1)
    lengths = [90, 128, 120, 110, 101, 115, 93]
    for at, length in enumerate(lengths):
        if at == 5:
            compiled.clear()
        gradients(model, run, words(4, length, at))
    assert not compiled
    assert len(near) == len(lengths) - 3
    assert all(planned.capture.sliced for planned in near)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("numerics", "fraction"),
    [(None, 0.96), ("rounding", 0.6)],
)
def test_a_fraction_is_of_more_for_a_larger_size_which_nothing_is_solved_for(
    numerics: str | None, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = translated(monkeypatch)
    torch.manual_seed(0)
    model = Language()
    run = remat.rematerialize(model, budget=fraction, numerics=numerics, limit_seconds=0.2)
    budgets = []
    for at, length in enumerate((90, 70, 100, 108, 104, 118, 110)):
        before, inputs = len(near), words(4, length, at)
        with measure_peak() as peak:
            gradients(model, run, inputs)
        assert peak.peak_bytes <= run.plan.budget_bytes
        if at >= 3:
            budgets.append(run.plan.budget_bytes)
            assert len(near) == before + 1
    assert budgets == sorted(budgets)
    assert len(set(budgets)) == 2
    larger = [planned.plan for planned in near if planned.plan.plain_peak_bytes is not None]
    assert [plan.budget_bytes for plan in larger] == [
        int(fraction * (plan.plain_peak_bytes or 0)) for plan in larger
    ]
    assert len(larger) == 2


@pytest.mark.sweep
@pytest.mark.parametrize(("mebibytes", "differentiated"), [(4, False), (6, True)])
def test_an_output_of_a_size_that_was_read_off_is_made_when_it_is_read(
    mebibytes: int,
    differentiated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that a gradient comes to after all."""
    passes: list[str] = []

    def counted(owner: Any, name: str) -> None:
        run = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (passes.append(name), run(*args))[1])

    near = translated(monkeypatch)
    torch.manual_seed(0)
    model = Language(both=True)
    eager = copy.deepcopy(model)
    budget = mebibytes * 2**20
    run = remat.rematerialize(model, budget=budget, numerics="rounding", limit_seconds=0.1)
    for at, length in enumerate((90, 128, 120, 110, 101)):
        if at == 4:
            counted(SizedRegion, "evaluated")
            counted(ways, "cuts_of")
        gradients(model, run, words(4, length, at))
    assert not passes
    inputs = words(4, 119, 7)

    def step(module: nn.Module, net: nn.Module) -> list[torch.Tensor]:
        net.zero_grad()
        loss, logits = module(*inputs)
        loss = loss + logits.square().mean() if differentiated else loss
        loss.backward()
        own = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        return [logits.detach().clone(), *own]

    over = pytest.warns(remat.BudgetWarning, match="would take")
    with over if differentiated else contextlib.nullcontext():
        found = step(run, model)
    for one, other in zip(found, step(eager, eager), strict=True):
        assert (one - other).abs().max() <= 5e-6 * other.abs().max()
    assert not passes
    last = near[-1]
    assert last.plan.measured_peak_bytes is None
    assert last.capture.program.deferred
    assert bool(last.capture.sliced) == (not differentiated)


@pytest.mark.sweep
@pytest.mark.parametrize("numerics", [None, "rounding"])
def test_labels_may_be_of_another_shape_than_words(
    numerics: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that torch says of them is that they are as many, so sizes are read off equal ones."""
    near = translated(monkeypatch)
    torch.manual_seed(0)
    model = Language()
    eager = copy.deepcopy(model)
    run = remat.rematerialize(model, budget=8 * 2**20, numerics=numerics, limit_seconds=0.1)
    for at, length in enumerate((60, 80, 72, 66, 75, 64, 75, 50, 64)):
        ids, labels = words(360 // length, length, at)
        if at >= 6:
            labels = labels.reshape(len(labels) * 2, -1) if length % 2 == 0 else labels.T
        inputs = ids, labels.contiguous()
        if at == 6:
            near_before = len(near)
        for one, other in zip(
            gradients(model, run, inputs), gradients(eager, eager, inputs), strict=True
        ):
            assert (one - other).abs().max() <= 5e-6 * other.abs().max() + 1e-30
    assert near_before >= 2
    assert len(near) == near_before


@pytest.mark.sweep
def test_a_size_runs_whole_where_that_fits_and_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first whole one has values that were in slices before: it is rehearsed."""
    near = translated(monkeypatch)
    torch.manual_seed(0)
    model = Language()
    run = remat.rematerialize(model, budget=4 * 2**20, numerics="rounding", limit_seconds=0.1)
    for at, length in enumerate((120, 128, 125, 40, 123, 36, 44, 20, 42)):
        gradients(model, run, words(4, length, at))
    most = 0
    for planned in near:
        plan, graph = planned.plan, planned.capture.without_alternatives().graph
        stored = simulate(graph, store_all(graph))
        if planned.capture.sliced:
            assert stored.peak_bytes > plan.budget_bytes - 64 or stored.time >= plan.time
            continue
        assert stored.peak_bytes <= plan.budget_bytes
        bytes_ = sum(value.size_bytes for value in graph.values)
        assert (plan.measured_peak_bytes is not None) == (bytes_ > most)
        most = max(most, bytes_)
