"""Steps of ever new sizes and counts: of several regions, of what data decide, by few plans."""

from __future__ import annotations

import copy
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integration_cases.sized import gradients, model_of
from torch import nn
from torch.nn.functional import cross_entropy

import remat
from remat.session import kind_finder, planned_patterns
from remat.session.call_runner import CallRunner
from remat.session.kinds import CapturedRegion
from remat.session.planned_patterns import PlannedPattern, PlannedPatterns
from remat_exec import measure_peak
from remat_graph import Schedule
from remat_solvers.step import RegionOption


class Masked(nn.Module):
    """A masked language model whose head is on the masked tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))

    def forward(self, ids: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        states = self.body(self.tokens(ids))
        return cross_entropy(self.head(states[masked]), ids[masked])


def masked_tokens(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (8, 32), generator=generator)
    return ids, torch.rand(8, 32, generator=generator) < 0.3


@pytest.mark.sweep
def test_a_count_that_the_data_decide(monkeypatch: pytest.MonkeyPatch, traces: list[str]) -> None:
    solved: list[object] = []
    front = kind_finder.region_front

    def counted(*args: object, **options: Any) -> object:
        solved.append(args)
        return front(*args, **options)

    monkeypatch.setattr(kind_finder, "region_front", counted)
    torch.manual_seed(0)
    model = Masked()
    most = 0
    for seed in range(16):
        with measure_peak() as peak:
            gradients(model, model_of(model), masked_tokens(seed))
        most = max(most, peak.peak_bytes)
    budget = int(0.9 * most)
    run = remat.rematerialize(model, budget=budget, limit_seconds=0.1)
    over = 0
    for seed in range(16):
        inputs = masked_tokens(seed)
        expected = gradients(model, model_of(model), inputs)
        model.zero_grad()
        with measure_peak() as peak, warnings.catch_warnings():
            warnings.simplefilter("ignore" if seed < 4 else "error", remat.BudgetWarning)
            run(*inputs).backward()
        over += peak.peak_bytes > budget and seed >= 4
        found = [parameter.grad for parameter in model.parameters()]
        assert all(map(torch.equal, found, expected[1:])), seed
    assert not over
    assert traces.count("with symbols") <= 3
    assert len(traces) <= 10
    assert len(solved) <= 8


def test_a_step_of_other_counts_takes_what_a_planned_one_does_and_what_its_calls_add() -> None:
    def option(kept: int, forward: int, backward: int) -> RegionOption:
        return RegionOption(Schedule(()), kept, forward, backward, 1.0, None)

    record: Any = SimpleNamespace(pattern=(0, 1), left_bytes=0)
    plan: Any = SimpleNamespace(predicted_peak_bytes=1000, measured_peak_bytes=1010)
    options = option(100, 300, 500), option(100, 200, 400)
    held = {"forward": 10, "backward": 20}
    patterns = PlannedPatterns(
        [PlannedPattern(record, plan, options, held, (5, 6), (400, 100), 30)]
    )

    def bound(options: list[RegionOption], *stored: int) -> int | None:
        return patterns.peak_alike((5, 6, 6)[: len(options)], options, stored)

    same, smaller = option(100, 300, 500), option(90, 200, 380)
    assert bound([same], 400) == 1010
    assert bound([same, smaller], 400, 90) == 1010
    assert bound([same, option(100, 210, 450)], 400, 100) == 1010 + 50
    assert bound([same, option(120, 200, 400)], 400, 100) == 1010 + 20
    # one half takes more and the other less: the larger of both would not show it
    assert bound([option(100, 400, 400)], 400) == bound([option(100, 200, 600)], 400) == 1010 + 100
    # by the same schedules, what is held beside them is that of larger sizes
    assert bound([same, same], 400, 150) == 1010 + 100 + 25
    assert bound([same, smaller], 403, 200) == 1010 + 50
    assert bound([same, smaller], 200, 102) == 1010 + 1
    patterns.planned[0].stored = (400, 10)
    assert bound([same, smaller], 400, 18) == 1010 + 8  # no more than all that is stored
    patterns.planned[0].held = {"forward": 10, "backward": 4070}  # or in proportion to that
    assert bound([same, smaller], 400, 11) == 1010 + 10
    assert bound([same, smaller], 440, 11) == 1010 + 410
    patterns.planned[0].held = held
    assert bound([same, same, same], 400, 10, 10) is None
    assert patterns.peak_alike((6,), [smaller], (100,)) is None
    patterns.planned.append(PlannedPattern(record, plan, options[::-1], held, (5, 6), (400, 100)))
    offered = [
        RegionOption(Schedule(()), kept, forward, backward, time, None)
        for kept, forward, backward, time in itertools.product(
            (90, 130), (180, 330), (390, 520), (1.0, 3.0, 2.0)
        )
    ]
    sizes = (5, 6), [same], (400, 120), offered
    for room in range(1000, 1400, 10):
        fitting = [
            each.time
            for each in offered
            if patterns.peak_alike((5, 6), [same, each], (400, 120)) <= room  # type: ignore[operator]
        ]
        found = patterns.fastest_fitting(*sizes, room)
        assert (None if found is None else found.time) == min(fitting, default=None)


def test_ranks_plan_as_many_sizes_as_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(measured_peak_bytes=1000)

    def record(kind: int) -> Any:
        return SimpleNamespace(pattern=(kind,), left_bytes=0, provisional=False, peak_bytes=900)

    def planned_in(steps: int) -> int:
        patterns, count = PlannedPatterns(), 0
        for kind in range(steps):
            if not patterns.serve(record(kind), (5,), 1000):
                patterns.add(PlannedPattern(record(kind), plan, (), {}, (5,)))
                count += 1
        return count

    assert planned_in(20) == 3
    monkeypatch.setattr(planned_patterns, "has_other_ranks", lambda: True)
    assert planned_in(20) == 8


class InTwo(nn.Module):
    """A graph that breaks between two layers, each of which recomputes well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())
        self.second = copy.deepcopy(self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.mark.sweep
def test_smaller_steps_of_several_regions_store_what_larger_ones_compute_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once three sizes have plans, others run by the fastest options that surely fit."""
    again: list[bool] = []
    choose = CallRunner._next_option

    def seen(self: CallRunner, calls: tuple[int, ...], plan: CapturedRegion) -> RegionOption:
        option = choose(self, calls, plan)
        again.append(option.time > plan.everything.time)
        return option

    monkeypatch.setattr(CallRunner, "_next_option", seen)
    torch.manual_seed(0)
    model = InTwo()
    run = remat.rematerialize(model, budget=0.7, limit_seconds=0.1)
    for length in (60, 400, 380, 360, 340, 390, 370, 350, 330, 395, 385, 375):
        gradients(model, run, (torch.randn(length, 16),))
    computed_again = {}
    for length in (398, 120, 60, 377):
        again.clear()
        x = torch.randn(length, 16)
        with measure_peak() as peak:
            found = gradients(model, run, (x,))
        computed_again[length] = any(again)
        assert peak.peak_bytes <= run.plan.budget_bytes
        assert all(map(torch.equal, found, gradients(model, model_of(model), (x,))))
    assert computed_again == {398: True, 120: False, 60: False, 377: True}


class Jittered(nn.Module):
    """Changes what one region hands to the next in place, and reads it after that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.router, self.down = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).sin()
        torch._dynamo.graph_break()
        hidden *= torch.linspace(0.5, 1.5, 8)
        scores = self.router(hidden).softmax(-1)
        torch._dynamo.graph_break()
        return (scores * self.down(hidden)).square().sum()


def test_an_input_that_gets_a_gradient_and_is_changed_in_place_runs_as_it_is_for_any_size(
    traces: list[str],
) -> None:
    """The gradient of what it was is another; who reads it later does so through autograd.

    What was refused for the same at two sizes is not traced for others.
    """
    torch.manual_seed(0)
    eager = Jittered()
    model = remat.rematerialize(copy.deepcopy(eager), budget=2**20, limit_seconds=0.1)
    for rows in (16, 20, 24, 28, 16, 32, 36):
        if rows == 28:
            traces.clear()
        x, both = torch.randn(rows, 8), []
        for each in (model, eager):
            each.zero_grad()
            each(x).backward()
            both.append([parameter.grad for parameter in each.parameters()])
        assert all(map(torch.equal, *both)), rows
    assert not traces


class Looked(nn.Module):
    """Rows of a table, summed: of more of them a step takes hardly more."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(2000, 64), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.words(ids).sum(1)).tanh()
        torch._dynamo.graph_break()
        return x.sum()


def test_the_step_that_others_are_refused_for_is_told_of() -> None:
    torch.manual_seed(0)
    budget, over = 810_000, 0
    run = remat.rematerialize(Looked(), budget=budget, limit_seconds=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (400, 400, *range(420, 1000, 20)):
            run.zero_grad()
            ids = torch.randint(2000, (2, count))
            try:
                with measure_peak() as peak:
                    run(ids).backward()
            except remat.BudgetTooSmall as error:
                notes = error.__notes__
                break
            over += peak.peak_bytes > budget
        else:
            pytest.fail("no step is refused")
    told = sum("more than the budget" in text for text in (*map(str, caught), *notes))
    assert told == over >= 1


def test_where_steps_go_on_without_a_plan_none_is_said_to_be_refused() -> None:
    torch.manual_seed(0)
    run = remat.rematerialize(Looked(), budget=810_000, limit_seconds=0.1, on_infeasible="plain")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (400, 400, 700, 700, 700):
            run(torch.randint(2000, (2, count))).backward()
    told = [str(each.message) for each in caught]
    assert any("is below" in text for text in told)
    assert not any("refused" in text for text in told)
