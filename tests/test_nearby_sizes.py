"""Calls of ever new sizes: by the plans of sizes that are near, and few of them."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integration_cases.sized import MODELS, Attention, gradients, model_of, tokens
from integration_cases.sweeps import swept
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import remat
from remat.planning import planner
from remat.session import kind_finder, nearby_sizes, planned_patterns, recording
from remat.session.call_runner import CallRunner
from remat.session.kinds import CapturedRegion
from remat.session.planned_patterns import PlannedPattern, PlannedPatterns
from remat.session.step import StepState
from remat_exec import Executable, Peak, codegen, measure_peak
from remat_graph import Graph, Schedule, simulate
from remat_graph.torch.capturing import sizes
from remat_graph.torch.rewrites import attention
from remat_solvers.step import RegionOption


class Answering(nn.Module):
    """Gives a loss, and what it is of, which a loop may differentiate, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        answer = self.layers(x)
        return {"loss": answer.square().mean(), "answer": answer}


class Reading(nn.Module):
    """Attention from one sequence to another, of two lengths, which gives keys and values, too.

    Where these get no gradient, zeros of their sizes stand in the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        keys, values = self.keys(y).split(8, -1)
        mixed = scaled_dot_product_attention(self.query(x), keys.tanh(), values.tanh())
        return {"loss": mixed.square().mean(), "keys": keys.tanh(), "values": values}


class Warmed(nn.Module):
    """Reads numbers that are the same as others for many sizes and counters, not for all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        count = x.shape[0]
        hidden = torch.tanh(self.up(x)) * max(step - 5, 0) * max(count, 20)
        halves = hidden[: count // 2].square(), hidden[: (count - 1) // 2].exp()
        return sum(half.mean() for half in halves) + hidden.new_ones(abs(step) + 2).sum()


def test_numbers_that_are_equal_for_some_sizes_are_not_taken_for_one_another() -> None:
    """Those that are planned first have odd sizes, of more than 20, and steps that are above 5."""
    model = Warmed().double()
    eager = model_of(model)
    run = remat.rematerialize(model, budget=2**30, costs="estimate", limit_seconds=1.0)
    for count, step in [(31, 7), (33, 8), (35, 9), (37, 11), (39, 10), (30, 12), (33, 3), (14, -7)]:
        inputs = torch.randn(count, 8, dtype=torch.double), step
        found = gradients(model, run, inputs), gradients(model, eager, inputs)
        torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_zeros_for_gradients_that_do_not_come_are_of_the_size_of_the_call() -> None:
    torch.manual_seed(0)
    model = Reading()
    run = remat.rematerialize(model, budget=2**20, limit_seconds=0.1)
    eager = model_of(model)
    for step in range(8):
        x, y = torch.randn(2, 10 + step * 7 % 6, 8), torch.randn(2, 10 + step * 5 % 7, 8)
        both = []
        for each in (eager, run):
            model.zero_grad()
            each(x, y)["loss"].backward()
            both.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *both)), step


def test_many_sizes_run_by_few_plans(monkeypatch: pytest.MonkeyPatch, traces: list[str]) -> None:
    """One that is larger than all since sizes are symbols is rehearsed first, and no other.

    Before its step is recorded, no garbage is collected but what is young: all of it takes longer
    than many steps.
    """
    rehearsed: list[int] = []
    rehearse = planner.rehearsed
    collected: list[int] = []
    monkeypatch.setattr(recording.gc, "collect", lambda generation=2: collected.append(generation))

    def counted(executable: Executable, *rest: object) -> Peak:
        rehearsed.append(executable.peak_bytes)
        return rehearse(executable, *rest)

    monkeypatch.setattr(planner, "rehearsed", counted)
    monkeypatch.setattr(nearby_sizes, "rehearsed", counted)
    torch.manual_seed(0)
    model = Attention(0.2)
    run = remat.rematerialize(model, budget=0.8, limit_seconds=0.1)
    lengths = random.Random(0).choices(range(8, 64), k=20)
    for at, length in enumerate(lengths):
        model.zero_grad()
        ids, before = tokens(length), len(rehearsed)
        with measure_peak() as peak:
            collected.clear()
            run(*ids).backward()
        if at >= 3:
            is_larger = length not in lengths[:2] and length > max(lengths[2:at])
            assert (len(rehearsed) > before) == is_larger, length
            assert collected == [1] * is_larger, length
        assert peak.peak_bytes <= run.plan.budget_bytes
        found = gradients(model, run, tokens(length))
        expected = gradients(model, model_of(model), tokens(length))
        assert all(map(torch.equal, found, expected)), length
    assert traces == ["as it comes", "as it comes", "with symbols"]
    assert len(rehearsed) <= 10
    assert len(set(lengths)) >= 15


def test_a_smaller_size_is_planned_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made when the plan is read, and says what was planned."""
    made: list[object] = []
    scale = sizes.graph_costed_like

    def counted(*rest: Any) -> Graph:
        made.append(rest)
        return scale(*rest)

    monkeypatch.setattr(sizes, "graph_costed_like", counted)
    torch.manual_seed(0)
    model = Attention(0.2)
    run = remat.rematerialize(model, budget=0.6, limit_seconds=0.1)
    for length in (48, 52, 60, 58, 33):  # of the last two code is written
        gradients(model, run, tokens(length))
    run_again, peaks = set(), list[int]()
    for length in (59, 57, 54, 50, 46, 42, 35):
        made.clear()
        with measure_peak() as peak:
            found = gradients(model, run, tokens(length))
        assert not made, length
        plan = run.plan
        assert "kinds" not in vars(plan)
        budget, schedule, solver = plan.budget_bytes, plan.schedule, plan.solver
        seconds = plan.capture_seconds
        again = pickle.loads(pickle.dumps(plan))
        assert again == plan
        assert made
        assert (budget, schedule, solver) == (again.budget_bytes, again.schedule, again.solver)
        assert 0 < seconds == plan.capture_seconds  # not those until it was read
        assert "peak, measured       not measured" in str(plan)  # it ran, whatever is known of it
        assert plan.__getattr__("kinds") is plan.kinds  # as where another thread has just made it
        assert simulate(plan.graph, plan.schedule).peak_bytes <= budget
        assert plan.predicted_peak_bytes <= budget
        assert "kinds" in vars(plan)
        assert peak.peak_bytes <= budget
        peaks.append(peak.peak_bytes)
        run_again.add(plan.recomputations > 0)
        expected = gradients(model, model_of(model), tokens(length))
        assert all(map(torch.equal, found, expected)), length
    assert run_again == {True, False}  # what is small enough stores everything
    assert min(peaks) < 0.9 * max(peaks)


@pytest.mark.parametrize(
    "name", swept(["attention", "dropout", "graph", "images"], ["dropout", "images"])
)
def test_code_is_compiled_once_for_all_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_, make, inputs = codegen._compiled, MODELS[name][0], MODELS[name][1]

    def counted(source: str, owner: object) -> Any:
        compiled.append(source)
        return compile_(source, owner)

    monkeypatch.setattr(codegen, "_compiled", counted)
    torch.manual_seed(0)
    model = make()
    run = remat.rematerialize(model, budget=2**22, limit_seconds=0.1)
    lengths = [40, 60, 50, 57, 31, 44, 53, 26, 38, 49]
    sources = set()
    for at, length in enumerate(lengths):
        expected = gradients(model, model_of(model), inputs(length))
        assert all(map(torch.equal, gradients(model, run, inputs(length)), expected)), length
        if at == 4:
            compiled.clear()
        sources.add(run.plan.source)
    assert not compiled  # all store everything
    assert len(sources) == len(lengths)  # each says its sizes


def test_what_depends_on_a_number_alone_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, plans, recorded = Using(FLOATS["annealed"]), [], []
    record = StepState.record_call

    def counted(*args: Any, **options: Any) -> None:
        recorded.append(args)
        record(*args, **options)

    monkeypatch.setattr(StepState, "record_call", counted)
    run = remat.rematerialize(model, budget=0.9)
    for step in range(8):
        inputs: Any = torch.randn(16, 8), 0.35 + 0.11 * step
        expected = gradients(model, model_of(model), inputs)
        found = gradients(model, run, inputs)
        assert all(map(torch.equal, found, expected)), step
        plans.append(run.plan)
        if step == 3:
            recorded.clear()
    assert all(plan is plans[3] for plan in plans[4:])
    assert not recorded


def test_other_gradients_and_outputs_of_sizes_that_are_near() -> None:
    torch.manual_seed(0)
    model = Answering()
    run = remat.rematerialize(model, budget=2**20)
    eager = model_of(model)
    for at, rows in enumerate((40, 50, 60, 44, 47, 52, 57, 49, 55, 58, 41)):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
        both = []
        for each in (eager, run):
            model.zero_grad()
            torch.manual_seed(1)
            out = each(x)
            (out["loss"] + out["answer"].sum() * (at % 3 == 2)).backward()
            both.append([out["answer"].detach(), *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *both)), rows


class Reversed(torch.autograd.Function):
    """Hands the gradient back, turned round and scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * gradient, None


FLOATS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "scaled": lambda x, w: x * (2 * w + 0.1) / len(x),
    "chosen": lambda x, w: x * w if w > 0.75 else x + w,
    "annealed": lambda x, w: torch.where(x > w, x, w).softmax(-1) ** 2,
    "made": lambda x, w: x * torch.full_like(x, w) + torch.tensor(w),
    "drawn": lambda x, w: torch.nn.functional.gumbel_softmax(x, tau=w),
    "attention": lambda x, w: scaled_dot_product_attention(x[None], x[None], x[None], scale=w),
    "power": lambda x, w: (x.abs() + 1) ** w,
    "cut": lambda x, w: x[: int(10 * w)],
    "reversed": lambda x, w: x + Reversed.apply(x, w),
    "exponential": lambda x, w: x * math.exp(-w),
}


class Using(nn.Module):
    def __init__(self, use: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.use, self.count = nn.Linear(8, 8), use, 0

    def forward(self, x: torch.Tensor, weight: float) -> torch.Tensor:
        self.count += 1
        return self.use(self.layer(x), weight).square().sum()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # TorchDynamo does
@pytest.mark.parametrize(
    "case",
    swept(
        [(name, front) for name in FLOATS for front in ("rematerialize", "compile")],
        [*((name, "rematerialize") for name in FLOATS), ("drawn", "compile"), ("cut", "compile")],
    ),
)
def test_a_float_that_changes_at_each_step(case: tuple[str, str], traces: list[str]) -> None:
    name, front = case
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Using(FLOATS[name])
    if front == "compile":
        run: Any = torch.compile(model, backend="remat", options={"budget": 2**20})
    else:
        run = remat.rematerialize(model, budget=2**20)
    steps = 6 if front == "compile" else 8
    for step in range(steps):
        inputs: Any = torch.randn(16 + 2 * (step % 3), 8), 0.35 + 0.11 * step
        expected = gradients(model, model_of(model), inputs)
        found = gradients(model, run, inputs)
        assert all(map(torch.equal, found, expected)), step
    if front == "rematerialize" and name in ("scaled", "annealed", "made", "drawn", "reversed"):
        assert traces == ["as it comes", "as it comes", "with symbols"]
        assert run.count == steps


@torch.library.custom_op("remat_sizes::leaps", mutates_args=())
def leaps(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, with a workspace where it has 53 rows."""
    if len(x) == 53:
        x.new_empty(1 << 20)
    return x.clone()


@leaps.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


leaps.register_autograd(lambda _, gradient: gradient.clone())


class Leaping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return leaps(super().forward(x).tanh()).square().mean()


def test_a_size_that_takes_more_than_those_that_are_near_is_told() -> None:
    model = Leaping(16, 16)
    run = remat.rematerialize(model, budget=2**18)
    told = []
    for rows in (40, 50, 60, 47, 45, 54, 53, 44, 46):
        x = (torch.randn(rows, 16),)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = gradients(model, run, x)
        told += [rows for each in caught if issubclass(each.category, remat.BudgetWarning)]
        assert all(map(torch.equal, found, gradients(model, model_of(model), x)))
    assert told == [44]  # at the next forward
    with pytest.raises(remat.BudgetTooSmall):
        run(torch.randn(53, 16))


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
    patterns = PlannedPatterns([PlannedPattern(record, plan, options, held, (5, 6))])
    same, smaller = option(100, 300, 500), option(90, 200, 380)
    assert patterns.peak_alike((5,), [same]) == 1010
    assert patterns.peak_alike((5, 6), [same, smaller]) == 1010
    assert patterns.peak_alike((5, 6), [same, option(100, 210, 450)]) == 1010 + 50
    assert patterns.peak_alike((5, 6), [same, option(120, 200, 400)]) == 1010 + 20 + 2
    assert patterns.peak_alike((6,), [smaller]) is None
    assert patterns.peak_alike((5, 6, 6), [same, same, same]) is None


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


class Windowed(nn.Module):
    """Attention by a mask that is made of sizes: causal, and of a window if that is shorter."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.qkv, self.out, self.window = nn.Linear(8, 48), nn.Linear(16, 8), window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        behind = at[:, None] - at
        seen = (behind >= 0) & (behind < self.window)
        mask = torch.where(seen, 0.0, -math.inf)[None, None].expand(x.shape[0], 1, -1, -1)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2)).tanh().square().mean()


@pytest.mark.parametrize("window", [100, 30, 21])
def test_a_mask_that_is_causal_for_some_sizes_is_looked_at_for_each(
    window: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs of other sizes are read off where it is; else they go through all passes."""
    torch.manual_seed(0)
    model = Windowed(window)
    run = remat.rematerialize(model, budget=2**30, costs="estimate", limit_seconds=1.0)
    passes: list[bool] = []
    for length in (25, 20, 27, 22, 26, 60, 24, 31, 80, 28):
        x = torch.randn(2, length, 8)
        caplog.clear()
        with caplog.at_level("INFO", "remat_graph.torch.capturing.captures"):
            found = gradients(model, run, (x,))
        passes.append("captured" in caplog.text)
        expected = gradients(model, model_of(model), (x,))
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert window == 21 or passes[4:] == [False] + [
        window < length for length in (60, 24, 31, 80, 28)
    ]


def test_a_mask_that_is_too_large_to_be_computed_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where each size goes through all passes."""
    torch.manual_seed(0)
    model = Windowed(100)
    run = remat.rematerialize(model, budget=2**30, costs="estimate", limit_seconds=1.0)
    for length in (25, 20, 27, 26):
        gradients(model, run, (torch.randn(2, length, 8),))
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", 2 * 24 * 24)
    passes: list[bool] = []
    for length in (24, 23, 22):
        caplog.clear()
        with caplog.at_level("INFO", "remat_graph.torch.capturing.captures"):
            gradients(model, run, (torch.randn(2, length, 8),))
        passes.append("captured" in caplog.text)
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", 2 * 20 * 20)
    with caplog.at_level("INFO", "remat_graph.torch.capturing.captures"):
        gradients(model, run, (torch.randn(2, 21, 8),))
    assert passes == [False, False, False]
    assert "captured" in caplog.text
