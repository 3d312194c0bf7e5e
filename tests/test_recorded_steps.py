"""Recorded steps of several regions: told of, planned by, refused, or not judged at all."""

import copy
import re

import pytest
import torch
from integration_cases.between import Between, planned_between, told_by
from integration_cases.one_step import X, peak_of, run
from torch import nn

import remat

pytestmark = pytest.mark.usefixtures("_no_record_stays")


def test_a_step_over_its_budget_is_told_with_its_bytes_and_planned_anew():
    model, budget = planned_between()
    model.taken = int(0.5 * budget)  # in the step that is measured
    run(model)
    with pytest.warns(remat.BudgetWarning, match=r"step 2 took .* bytes, .* more than the budget"):
        run(model)
    assert model.plan.predicted_peak_bytes <= budget
    run(model)
    assert peak_of(model) <= budget


def test_code_between_regions_that_takes_more_than_there_is_is_refused():
    model, budget = planned_between()
    model.taken = 2 * budget
    run(model)
    with pytest.raises(remat.BudgetTooSmall) as error:
        run(model)
    assert error.value.smallest_bytes > budget


def test_steps_of_several_plans_in_a_row_over_the_budget_are_refused(monkeypatch):
    monkeypatch.setattr("remat.session.judge._ATTEMPTS", 1)
    model, budget = planned_between()
    model.taken = int(0.5 * budget)
    run(model)
    with pytest.raises(remat.BudgetExceeded, match="raise the budget") as error:
        run(model)
    assert error.value.peak_bytes > error.value.budget_bytes == budget


class Keeps(Between):
    """Leaves what it takes behind, as what another thread lets go of seems to be."""

    def __init__(self):
        super().__init__()
        self.kept = []

    @torch.compiler.disable
    def take(self):
        self.kept.append(torch.empty(self.taken, dtype=torch.uint8))


def test_a_step_of_ranks_that_may_have_been_within_the_budget_is_judged_by_others(monkeypatch):
    monkeypatch.setattr("remat.session.judge.has_other_ranks", lambda: True)
    torch.manual_seed(0)
    original = Keeps()
    budget = int(0.9 * peak_of(original))
    model = remat.rematerialize(original, budget=budget, limit_seconds=0.05)
    run(model)
    for taken in (0, budget // 4, budget // 4, 0):  # a warning would be an error
        model.taken = taken
        run(model)
        model.kept.clear()
    assert model.plan.measured_peak_bytes <= budget
    model.taken = budget // 4
    told = []
    for _ in range(8):  # those that are recorded come to their end
        told += told_by(lambda: run(model))
        model.kept.clear()
    assert len(told) == 1
    assert "more than the budget" in told[0]


class Grows(Between):
    """Computes more at each step, so that a region is planned in each."""

    def __init__(self):
        super().__init__()
        self.by = 0

    def forward(self, x):
        self.by += 1
        x = self.enter(x)
        for _ in range(self.by):
            x = x.sin()
        torch._dynamo.graph_break()
        x = self.leave(x)
        self.take()
        return x.square().mean()


def test_steps_in_which_regions_are_planned_are_told_of_and_in_the_end_refused():
    torch.manual_seed(0)
    model = Grows()
    budget = int(0.9 * peak_of(model))
    model = remat.rematerialize(model, budget=budget, limit_seconds=0.05)
    told, refused = [], None

    def tried():
        nonlocal refused
        try:
            run(model)
        except remat.RematError as error:
            refused = error

    while refused is None:
        model.taken = (8 - len(told)) * budget
        told.append(told_by(tried))
    assert told[0] == told[-1] == []  # it is told of at the next forward
    assert all(len(one) == 1 and "no plan fits what it showed" in one[0] for one in told[1:-1])
    assert len(told) == 5
    assert isinstance(refused, remat.BudgetTooSmall)
    assert refused.smallest_bytes >= 8 * budget  # as the first of them needed


@pytest.mark.sweep
def test_a_share_is_known_once_the_second_step_has_run_plain_and_steps_after_it_are_told_of():
    """Where a region is planned in each step, too."""
    torch.manual_seed(0)
    model = remat.rematerialize(Grows(), budget=0.9, limit_seconds=0.05)
    told = []
    for taken in (0, 0, 4_000_000, 0):
        model.taken = taken
        told.append(told_by(lambda: run(model)))
    assert told[:3] == [[], [], []]
    assert "for which " in told[3][0]
    assert " bytes would do" in told[3][0]


def test_the_first_step_of_another_batch_size_is_told_of_if_it_is_over_the_budget():
    model, budget = planned_between()
    for _ in range(4):
        run(model)  # nothing is recorded any more

    def step(rows):
        model(torch.randn(rows, 32)).backward()

    step(3 * len(X))
    (told,) = told_by(lambda: run(model))
    assert f"more than the budget of {budget:,}" in told
    assert "recorded from the first of these on" in told
    model.taken = 0
    assert told_by(lambda: step(len(X) // 2)) == []
    assert told_by(lambda: run(model)) == []


class Settles(Between):
    """Reads other numbers in its first steps, so that regions are planned in these."""

    by = 0

    def forward(self, x):
        self.by += self.by < 3
        x = self.enter(x).roll(self.by, 0)
        torch._dynamo.graph_break()
        x = self.leave(x)
        self.take()
        return x.square().mean()


@pytest.mark.sweep
def test_a_step_over_its_plan_in_which_regions_were_planned_is_planned_anew():
    torch.manual_seed(0)
    original = Settles()
    budget = int(0.9 * peak_of(original))
    original.by = 0
    model = remat.rematerialize(original, budget=budget, limit_seconds=0.05)
    run(model)
    model.taken = int(0.6 * budget)
    told = [told_by(lambda: run(model)) for _ in range(6)]
    assert sum(map(len, told)) == 1
    assert "more than the budget" in told[1][0]
    assert model.plan.measured_peak_bytes <= budget
    assert peak_of(model) <= budget


@pytest.mark.sweep
def test_what_is_made_but_once_does_not_stay_in_the_plan():
    torch.manual_seed(0)
    original = Settles()
    budget = int(0.9 * peak_of(original))
    original.by = 0
    plans = []
    for once in (0, budget // 4):
        model = remat.rematerialize(copy.deepcopy(original), budget=budget, limit_seconds=0.05)
        model.taken = once
        for _ in range(6):
            run(model)
            model.taken = 0
        plans.append(model.plan)
    assert plans[0].predicted_peak_bytes == plans[1].predicted_peak_bytes


class Deep(nn.Module):
    """Calls one block as often as it is told to, a region each time."""

    def __init__(self):
        super().__init__()
        self.block, self.depth = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)), 2
        self.taken = 0

    def forward(self, x):
        for _ in range(self.depth):
            torch._dynamo.graph_break()
            x = self.block(x)
        self.take()
        return x.square().mean()

    @torch.compiler.disable
    def take(self):
        torch.empty(self.taken, dtype=torch.uint8)


def test_a_step_of_more_calls_than_were_planned_for_is_told_of():
    torch.manual_seed(0)
    model = remat.rematerialize(Deep(), budget=400_000, limit_seconds=0.05)
    for _ in range(5):
        run(model)
    for taken in (0, 300_000):
        model.depth, model.taken = 12, taken
        peak = peak_of(model)
        model.depth, model.taken = 2, 0
        (told,) = told_by(lambda: run(model))
        took = int(re.search(r"took ([\d,]+) bytes", told)[1].replace(",", ""))
        assert model.plan.budget_bytes < took <= peak
        assert not told_by(lambda: run(model))


def test_a_step_of_more_calls_than_were_planned_for_is_told_of_without_a_record():
    """A profiler of the user's keeps it from being recorded."""
    torch.manual_seed(0)
    model = remat.rematerialize(Deep(), budget=400_000, limit_seconds=0.05)
    for _ in range(5):
        run(model)
    model.depth = 12
    with torch.profiler.profile():
        (told,) = told_by(lambda: run(model))
    assert "what runs between them was not recorded" in told
    assert int(re.search(r"took ([\d,]+) bytes", told)[1].replace(",", "")) > 400_000
    model.depth = 2
    assert not told_by(lambda: run(model))


def test_a_share_of_more_calls_than_were_planned_for_is_one_of_what_plain_takes_for_them():
    torch.manual_seed(0)
    model = remat.rematerialize(Deep(), budget=0.95, limit_seconds=0.05)
    for _ in range(4):
        run(model)
    model.depth = 12
    assert not told_by(lambda: run(model))
    assert peak_of(model) > model.plan.budget_bytes  # of the steps of two calls
