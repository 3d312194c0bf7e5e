"""Calls of ever new sizes: by the plans of sizes that are near, and few of them."""

from __future__ import annotations

import math
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from integration_cases.sized import MODELS, Attention, gradients, model_of, tokens
from integration_cases.sweeps import swept
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import remat
from remat.planning import planner
from remat.session import nearby_sizes, recording
from remat.session.step import StepState
from remat_exec import Executable, Peak, codegen, measure_peak
from remat_graph import Graph, simulate
from remat_graph.torch.capturing import sizes
from remat_graph.torch.tracing.joint_of_sizes import JointOfSizes


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


class Weighed(nn.Module):
    """What a layer gives, weighed by numbers of the call."""

    def __init__(self, weigh: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.up, self.weigh = nn.Linear(8, 8), weigh

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        return self.weigh(torch.tanh(self.up(x)), step)


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


@pytest.mark.parametrize(
    "weigh",
    [
        lambda x, step: (x * step).sum() * (step * 0.5),
        lambda x, step: x.sum() / x.shape[0] ** 0.5 * math.sqrt(x.shape[0]),
        lambda x, step: (x * float(step)).sum() * (step * 1.0) * (1.0 if step == 9 else 2.0),
        lambda x, step: x.sum() / (x.shape[0] * 1.0) * 0.99**step,
        lambda x, step: x.sum() * math.acos(1 - (13 - step) / 20) * x.shape[0],
        lambda x, step: x.sum() * (2 / (1 + math.exp(-10 * step / 40)) - 1) * math.log(len(x)),
    ],
    ids=[
        "counter and half",
        "roots of a size",
        "one float by two ways",
        "powers",
        "least angle",
        "logistic",
    ],
)
def test_floats_that_are_whole_numbers_are_no_sizes(
    weigh: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So there are sizes that all differ, and each new size is read off them: no pass runs."""
    model = Weighed(weigh)
    eager = model_of(model)
    run = remat.rematerialize(model, budget=2**30, costs="estimate", limit_seconds=1.0)
    passed: list[Any] = []
    at = JointOfSizes.at
    counts = 31, 33, 35, 37, 30, 29, 36, 25, 23, 27, 28
    for at_call, step in enumerate([9, 8, 13, 4, 5, 6, 7, 10, 11, 12, 3]):
        if at_call == 4:
            monkeypatch.setattr(
                JointOfSizes, "at", lambda *given: passed.append(given) or at(*given)
            )
        inputs = torch.randn(counts[at_call], 8), step
        found, expected = gradients(model, run, inputs), gradients(model, eager, inputs)
        assert all(map(torch.equal, found, expected)), step
    assert not passed


@pytest.mark.sweep
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
    model = Attention(0.2, depth=1)
    run = remat.rematerialize(model, budget=0.8, limit_seconds=0.1)
    lengths = random.Random(0).choices(range(8, 64), k=14)
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
    assert len(rehearsed) <= 7
    assert len(set(lengths)) >= 12


@pytest.mark.sweep
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


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["attention", "dropout", "graph", "images"])
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
    "exponential": lambda x, w: x * math.exp(-w) * max(0.5, math.log(w + 1)),
}
INPUTS = ("scaled", "annealed", "made", "drawn", "reversed", "exponential")


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
        [(name, "rematerialize") for name in ("annealed", "reversed", "exponential")],
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
    if front == "rematerialize" and name in INPUTS:
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
