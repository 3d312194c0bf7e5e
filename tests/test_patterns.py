"""Steps that differ: regions that run again, in another order or not at all; steps off their plan.

The models are those of benchmarks/patterns.py, which trains each for 50 steps.
"""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import remat
from pattern_models import PATTERNS, seed_everything
from remat.steps.choosing import StepChooser
from remat.steps.recording import is_part
from remat.steps.region_calls import RegionCall
from remat.steps.runner import StepRunner
from remat.steps.step_planner import StepPlanner
from remat_exec import measure_peak


def train(name, budget, steps, plans=None):
    """Train beside eager with the same batches; every gradient must have the same bits."""
    pattern = PATTERNS[name]
    seed_everything(0)
    plain = pattern.build()
    model = remat.rematerialize(copy.deepcopy(plain), budget=budget, limit_seconds=0.2)
    for step in steps:
        losses = []
        for each in (plain, model):
            each.zero_grad()
            seed_everything(1000 + step)
            loss = each(**pattern.batch(step)).loss
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            assert (theirs.grad is None) == (ours.grad is None)
            assert theirs.grad is None or torch.equal(theirs.grad, ours.grad)
    return model


def count_plans(monkeypatch):
    made, plan = [], StepChooser.plan
    monkeypatch.setattr(
        StepChooser, "plan", lambda self, record, of: made.append(record) or plan(self, record, of)
    )
    return made


@pytest.mark.parametrize("name", ["two-heads", "early-exit"])
def test_patterns_that_come_in_turn_are_planned_once_each(name, monkeypatch):
    made = count_plans(monkeypatch)
    train(name, "2.2MiB", [step for step in range(15) if step % 7])
    patterns = {record.pattern for record in made}
    assert sum(not record.provisional for record in made) <= len(patterns) + 1
    assert 1 <= len(made) <= 2 * len(patterns)  # once more by what a first step showed


def test_steps_before_the_first_plan_are_within_a_budget_that_can_be_kept():
    """The region that keeps least takes more than the budget to compute it all again."""
    train("loop", "2.2MiB", [1, 2, 3, 4])  # a step over the budget would warn


class Changing(nn.Module):
    """The last of three parts changes in place what the second was given; eager keeps a copy."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(32, 32), nn.Linear(64, 32)

    def forward(self, x):
        x = self.enter(x)
        torch._dynamo.graph_break()
        y = self.leave(torch.cat([x, x.roll(1, 0)], 1)).tanh()
        self.change(x)
        return (y + x).square().mean()

    @torch.compiler.disable
    def change(self, x):
        x[3] = 0


def test_an_input_of_a_region_that_later_code_changes_in_place_is_copied():
    torch.manual_seed(0)
    plain = Changing()
    model = remat.rematerialize(copy.deepcopy(plain), budget="1MiB", limit_seconds=0.2)
    for _ in range(5):
        run(plain)
        run(model)
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


class ChangesARow(nn.Module):
    """Writes to a row of an expanded tensor after a region has read it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, 32))

    def forward(self, x):
        y = nn.functional.normalize(x, dim=-1) * self.scale
        torch._dynamo.graph_break()
        x[0] += y[-1]
        return y.square().mean()


def test_an_expanded_input_that_later_code_changes_in_place_is_copied():
    plain = ChangesARow()
    model = remat.rematerialize(copy.deepcopy(plain), budget="1MiB", limit_seconds=0.2)
    for _ in range(5):
        for each in (plain, model):
            each.zero_grad()
            each(X[:1].clone().expand(256, 32)).backward()
        assert torch.equal(plain.scale.grad, model.scale.grad)


class ChangesAnOutput(nn.Module):
    """Changes in place what a region returned, and computed more from, and eager would not keep."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.enter(x).roll(1, 0)
        y = x.cumsum(1).tanh().sin()
        self.change(x)
        return (self.leave(y) + x).square().mean()

    @torch.compiler.disable
    def change(self, x):
        x.masked_fill_(x > 1, 0.5)


def test_an_output_of_a_region_that_later_code_changes_in_place_is_copied():
    torch.manual_seed(0)
    plain = ChangesAnOutput()
    model = remat.rematerialize(copy.deepcopy(plain), budget="1MiB", limit_seconds=0.2)
    for _ in range(5):
        run(plain)
        run(model)
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(theirs.grad, ours.grad)
    assert model.plan.calls


def test_a_call_without_a_backward_goes_with_its_outputs():
    """What is watched of its outputs does not hold it."""
    model = remat.rematerialize(ChangesAnOutput(), budget="1MiB", limit_seconds=0.2)
    gc.collect()
    gc.disable()
    try:
        loss = model(X)
        live = vars(model)["forward"]._machine[0].together.live
        assert len(live) == 2
        del loss
        assert not live
    finally:
        gc.enable()


class Between(nn.Module):
    """Two regions, and code after them that takes memory."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = (
            nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32), nn.Tanh())
            for _ in range(2)
        )
        self.taken = 0

    def forward(self, x):
        x = self.enter(x)
        torch._dynamo.graph_break()
        x = self.leave(x)
        self.take()
        return x.square().mean()

    @torch.compiler.disable
    def take(self):
        torch.empty(self.taken, dtype=torch.uint8)


X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


def run(model):
    model.zero_grad()
    model(X).backward()


def peak_of(model):
    model.zero_grad()
    with measure_peak() as peak:
        model(X).backward()
    return peak.peak_bytes


def planned_between(budget=None, **options):
    torch.manual_seed(0)
    model = Between()
    budget = budget or int(0.9 * peak_of(model))
    model = remat.rematerialize(model, budget=budget, limit_seconds=0.2, **options)
    run(model)  # captured and recorded; the next step is planned, and recorded, too
    return model, budget


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
    monkeypatch.setattr("remat.steps.step_planner._ATTEMPTS", 1)
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
    monkeypatch.setattr("remat.steps.step_planner._has_other_ranks", lambda: True)
    torch.manual_seed(0)
    original = Keeps()
    budget = int(0.9 * peak_of(original))
    model = remat.rematerialize(original, budget=budget, limit_seconds=0.2)
    run(model)
    for taken in (0, budget // 4, budget // 4, 0):  # a warning would be an error
        model.taken = taken
        run(model)
        model.kept.clear()
    assert model.plan.measured_peak_bytes <= budget
    model.taken = budget // 4
    told = []
    for _ in range(8):  # those that are recorded come to their end
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", remat.BudgetWarning)
            run(model)
        model.kept.clear()
        told += [str(w.message) for w in found if w.category is remat.BudgetWarning]
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
    model = remat.rematerialize(model, budget=budget, limit_seconds=0.2)
    told, refused = [], None
    while refused is None:
        model.taken = (8 - len(told)) * budget
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", remat.BudgetWarning)
            try:
                run(model)
            except remat.RematError as error:
                refused = error
        told.append([str(w.message) for w in found if w.category is remat.BudgetWarning])
    assert told[0] == told[-1] == []  # it is told of at the next forward
    assert all(len(one) == 1 and "regions were planned in it" in one[0] for one in told[1:-1])
    assert len(told) == 5
    assert isinstance(refused, remat.BudgetTooSmall)
    assert refused.smallest_bytes >= 8 * budget  # as the first of them needed


class Deep(nn.Module):
    """As many regions as are asked for."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32), nn.Tanh())
            for _ in range(5)
        )
        self.depth = 2

    def forward(self, x):
        for part in self.parts[: self.depth]:
            x = part(x)
            torch._dynamo.graph_break()
        return x.square().mean()


def test_what_others_held_is_known_from_a_step_in_which_calls_gave_memory_back(monkeypatch):
    gave, go_lean, records, recorded = [], RegionCall.go_lean, [], StepRunner._recorded

    def noted(self):
        gave.append(len(records))
        go_lean(self)

    def kept(self):
        records.append(recorded(self))
        return records[-1]

    monkeypatch.setattr(RegionCall, "go_lean", noted)
    monkeypatch.setattr(StepRunner, "_recorded", kept)
    torch.manual_seed(0)
    model = remat.rematerialize(Deep(), budget="800kB", limit_seconds=0.2)
    for depth in (2, 2, 2, 2, 5, 5, 5, 5):
        model.depth = depth
        run(model)
    pressed, planned = records[-2:]
    assert len(pressed.pattern) == len(planned.pattern) == 5
    assert len(records) - 2 in gave
    assert len(records) - 1 not in gave
    assert is_part(planned.moments, pressed.moments)  # which has more: where memory is given back


def test_two_models_in_one_step_are_both_planned():
    """Each records its steps, which overlap."""
    torch.manual_seed(0)
    plain = [Deep(), Deep()]
    models = [
        remat.rematerialize(copy.deepcopy(model), budget="900kB", limit_seconds=0.2)
        for model in plain
    ]
    for _ in range(4):
        for first, second in (plain, models):
            first.zero_grad()
            second.zero_grad()
            (first(X) * second(X)).backward()
            second(X).backward()
        for theirs, ours in zip(plain, models, strict=True):
            for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None)
                assert one.grad is None or torch.equal(one.grad, other.grad)
    assert all(model.plan.calls for model in models)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
        return x.square().mean()


def test_a_step_after_a_backward_in_another_autocast_is_recorded(monkeypatch):
    """Its products work in another type, whose casts no earlier step has shown."""
    taken, take = [], StepPlanner.take
    monkeypatch.setattr(
        StepPlanner, "take", lambda self, *found: taken.append(found) or take(self, *found)
    )
    model = remat.rematerialize(Broken(), budget="8MiB", limit_seconds=0.2)
    counts = []
    for step in range(12):
        loss = model(torch.randn(8, 32))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step > 7):
            loss.backward()
        counts.append(len(taken))
    assert counts[6] == counts[8] < counts[10] == counts[11], str(counts)
