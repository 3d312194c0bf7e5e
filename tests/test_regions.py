"""Models with graph breaks: several regions of one step, exact and within one budget."""

import pytest
import torch
from integration_cases.broken import assert_same, pair
from integration_cases.searches import repeat_searches
from integration_cases.sweeps import swept
from torch import nn

import remat
from remat_exec import measure_peak


def step(model, x, y):
    nn.functional.cross_entropy(model(x), y).backward()


def peak_of_a_step(model, x, y):
    model.zero_grad()
    with measure_peak() as peak:
        step(model, x, y)
    return peak.peak_bytes


@pytest.mark.parametrize("share", swept([0.7, 0.5, 0.35], [0.5]))
def test_a_model_with_breaks_trains_exactly_and_within_the_budget(share):
    original, plain, x, y = pair()
    budget = int(share * peak_of_a_step(plain, x, y))
    model = remat.rematerialize(original, budget=budget)
    for seed in range(5):
        model.zero_grad(), plain.zero_grad()
        torch.manual_seed(seed)
        step(model, x, y)
        torch.manual_seed(seed)
        step(plain, x, y)
        assert_same(model, plain)
    assert model.plan.measured_peak_bytes <= budget
    assert model.plan.recomputations > 0
    assert 0 <= model.plan.bound_overhead <= model.plan.predicted_overhead + 1e-9
    assert peak_of_a_step(model, x, y) <= budget
    assert "break" in str(model.plan)


@pytest.mark.sweep
def test_a_pattern_that_changes_stays_within_the_budget_at_every_step():
    original, plain, x, y = pair(blocks=8, left_out=0.3)
    plain.left_out = 0.0
    budget = int(0.6 * peak_of_a_step(plain, x, y))
    plain.left_out = 0.3
    model = remat.rematerialize(original, budget=budget)
    peaks = []
    for seed in range(50):
        model.zero_grad(), plain.zero_grad()
        torch.manual_seed(seed)
        if seed < 6:
            step(model, x, y)
        else:
            peaks.append(peak_of_a_step(model, x, y))
        torch.manual_seed(seed)
        step(plain, x, y)
        assert_same(model, plain)
    assert max(peaks) <= budget


def test_a_budget_that_the_regions_cannot_reach_is_refused_with_one_that_they_can(monkeypatch):
    repeat_searches(monkeypatch)
    original, plain, x, y = pair()
    too_little = int(0.1 * peak_of_a_step(plain, x, y))
    model = remat.rematerialize(original, budget=too_little, costs="estimate")
    step(model, x, y)
    with pytest.warns(remat.BudgetWarning, match="step 1 took .* is made but once"):
        step(model, x, y)  # recorded, with what keeps the least
    with pytest.raises(remat.BudgetTooSmall) as error:
        step(model, x, y)
    assert "Broken.forward at " in error.value.__notes__[0]  # why there are several regions
    enough = int(1.25 * error.value.smallest_bytes)  # what is held beside varies as much, so small
    model = remat.rematerialize(original, budget=enough, costs="estimate")
    for _ in range(4):
        step(model, x, y)
    assert peak_of_a_step(model, x, y) <= enough


class Sized(nn.Module):
    """After a break, a size depends on data: that part runs as it is, in each shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 5)

    def forward(self, x):
        hidden, size = torch.relu(self.up(x)), (x > 0).sum() % 5 + 2
        torch._dynamo.graph_break()
        return self.down(hidden * (hidden.new_zeros(size).sum() + 1))


def test_what_runs_as_it_is_is_warned_of_once(caplog):
    model = remat.rematerialize(Sized(), budget="1MiB")
    for size in (64, 96, 64):
        step(model, torch.randn(size, 32), torch.randint(0, 5, (size,)))
    assert [record.levelname for record in caplog.records if "as it is" in record.message] == [
        "WARNING"
    ]
