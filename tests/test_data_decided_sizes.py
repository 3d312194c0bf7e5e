"""Regions whose sizes the data decide: planned, within the budget, or refused once it is known."""

import copy
import gc
import random
import warnings

import pytest
import torch
from integration_cases.searches import repeat_searches
from torch import nn

import remat
from remat.session import kind_finder
from remat.session.call_runner import CallRunner
from remat_exec import measure_peak


@pytest.fixture(autouse=True)
def nothing_stays():
    """End what is recorded of last steps: a model goes when what it compiled went before it."""
    yield
    for _ in range(2):
        gc.collect()


class Chosen(nn.Module):
    """Goes on with the rows that the data choose, as detectors and experts do."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        self.enter, self.leave = (
            nn.Sequential(
                *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
            )
            for _ in range(2)
        )

    def forward(self, x):
        x = self.enter(x)[x[:, 0] > 0]
        return self.leave(x)


def batches(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(256, 64, generator=generator) for _ in range(count)]


def step(model, x):
    model.zero_grad()
    with measure_peak() as peak:
        model(x).square().mean().backward()
    return peak.peak_bytes


def pair():
    torch.manual_seed(0)
    plain = Chosen()
    return copy.deepcopy(plain), plain, max(step(plain, x) for x in batches(6))


@pytest.mark.parametrize("budget", ["bytes", pytest.param(0.7, marks=pytest.mark.sweep)])
def test_each_step_has_other_sizes_and_all_are_planned(budget):
    original, plain, most = pair()
    budget = int(0.7 * most) if budget == "bytes" else budget
    model = remat.rematerialize(original, budget=budget, limit_seconds=0.1)
    peaks = []
    for at, x in enumerate(batches(6)):
        step(plain, x)
        with warnings.catch_warnings():
            if at < 3:  # told of what is not planned for
                warnings.simplefilter("ignore", remat.BudgetWarning)
            peaks.append(step(model, x))
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got.grad, expected.grad)
    # a fraction is of the most that plain takes: the next step knows what a larger size is of
    assert max(peaks[3:]) <= model.plan.budget_bytes
    assert model.plan.budget_bytes == pytest.approx(0.7 * most, rel=0.1)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(4))
def test_a_step_of_new_sizes_takes_no_more_than_its_bound_whatever_option_is_taken(
    monkeypatch, seed
):
    draw, bounds = random.Random(seed), []

    def any_that_fits(self, calls, kind):
        planner, kinds = self._step.planner, (*calls, kind)
        so_far = [option for _, option in self._step.calls]
        fitting = []
        for option in planner.kinds[kind].options if planner.room is not None else ():
            sizes = planner.families(kinds), [*so_far, option], planner.stored(kinds)
            bound = self._step.patterns.peak_alike(*sizes)
            if bound is not None and bound <= planner.room:
                fitting.append((bound, option))
        bound, option = draw.choice(fitting) if fitting else (None, None)
        bounds.append(bound)  # of the calls so far
        return option

    monkeypatch.setattr(CallRunner, "_fitting", any_that_fits)
    original, *_ = pair()
    budget = draw.uniform(0.65, 0.85)  # with room for what a short search finds
    model = remat.rematerialize(original, budget=budget, limit_seconds=0.2, costs="estimate")
    checked = 0
    for x in batches(12):
        bounds.append(None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.BudgetWarning)
            peak = step(model, x)
        if bounds[-1] is not None:
            assert peak <= bounds[-1]
            checked += 1
    assert checked >= 5


@pytest.mark.sweep
def test_later_sizes_are_not_solved_for(monkeypatch):
    solved = []
    front = kind_finder.region_front

    def seen(graph, **options):
        solved.append(graph)
        return front(graph, **options)

    monkeypatch.setattr(kind_finder, "region_front", seen)
    original, _, most = pair()
    model = remat.rematerialize(original, budget=most, limit_seconds=0.2)
    for x in batches(6):
        step(model, x)
    assert len(solved) == 4  # once the first, three times the second region


OPTIONS = {"limit_seconds": 0.1, "costs": "estimate"}


def refused(original, budget):
    """Train until a budget is refused; give what is told of it."""
    model = remat.rematerialize(original, budget=budget, **OPTIONS)
    first, second, third = batches(3)
    step(model, first)
    with pytest.warns(remat.BudgetWarning, match="for which .* bytes would do") as told:
        step(model, second)
    assert len(told) == 1
    with pytest.raises(remat.BudgetTooSmall) as error:
        step(model, third)
    return error.value.smallest_bytes, error.value.least_bytes


@pytest.mark.sweep
@pytest.mark.filterwarnings(
    "ignore:step [0-9]+ took:remat.BudgetWarning"
)  # of sizes not planned for
def test_a_budget_that_cannot_be_had_is_told_once_and_refused_at_the_third_step(monkeypatch):
    repeat_searches(monkeypatch)
    original, _, most = pair()
    smallest, least = refused(original, most // 8)
    enough = int(1.2 * smallest)  # a later batch chooses more rows
    model = remat.rematerialize(original, budget=enough, **OPTIONS)
    for x in batches(6):
        peak = step(model, x)
    assert least <= peak <= enough


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Experts(nn.Module):
    """Sends each row to one of three experts, and adds up what they give."""

    def __init__(self, width=32):
        super().__init__()
        self.enter, *experts = (Block(width) for _ in range(4))
        self.gate, self.experts = nn.Linear(width, 3), nn.ModuleList(experts)

    def forward(self, x):
        x = self.enter(x)
        choice, out = self.gate(x).argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


@pytest.mark.sweep
def test_what_code_between_regions_holds_counts_for_other_sizes_too():
    """Each step's calls are new; options by those of other sizes leave room for what stands by."""
    torch.manual_seed(0)
    plain = Experts()
    model = remat.rematerialize(copy.deepcopy(plain), budget=0.85, limit_seconds=0.2)
    for at in range(8):
        x = torch.randn(512, 32)
        with warnings.catch_warnings():
            if at < 4:  # told of what is not planned for
                warnings.simplefilter("ignore", remat.BudgetWarning)
            peak = step(model, x)
        step(plain, x)
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert expected.grad is None or torch.equal(got.grad, expected.grad)
        assert at < 4 or peak <= model.plan.budget_bytes


class PutBack(Chosen):
    """Puts what it made of the chosen rows back among the others, as experts do."""

    def forward(self, x):
        chosen, x = x[:, 0] > 0, self.enter(x)
        return self.leave(torch.index_put(x, (chosen,), x[chosen].sin()))


@pytest.mark.parametrize("of_other_lengths", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_rows_that_are_put_back_where_they_were_train_right(of_other_lengths):
    """The gradient of the rows is of a size that data decide within the graph."""
    torch.manual_seed(0)
    plain = PutBack(depth=1)
    model = remat.rematerialize(copy.deepcopy(plain), budget="1GiB", limit_seconds=0.1)
    for at, x in enumerate(batches(5)):
        for each in (plain, model):
            step(each, x[at * 9 :] if of_other_lengths else x)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
