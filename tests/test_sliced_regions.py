"""Models of several regions, the largest values of which are made in slices."""

import copy
import re

import pytest
import torch
from integration_cases.language import WORDS, Headed

import remat
from remat.report.words import mib
from remat.session import kind_finder
from remat_exec import measure_peak
from remat_graph import Numerics

IDS = torch.randint(WORDS, (2, 64), generator=torch.Generator().manual_seed(0))


def step(model):
    model.zero_grad()
    model(IDS).backward()
    return [each.grad for each in model.parameters()]


def test_slices_are_looked_for_when_a_step_is_refused_and_not_before(monkeypatch):
    looked, after_step = [], []
    find = kind_finder.in_finest_slices_alone
    monkeypatch.setattr(
        kind_finder, "in_finest_slices_alone", lambda each: (looked.append(each), find(each))[1]
    )
    plain = Headed()
    model = remat.rematerialize(plain, budget=budget_of(plain), limit_seconds=0.1)

    def steps():
        for _ in range(6):
            step(model)
            after_step.append(len(looked))

    with pytest.warns(remat.BudgetWarning), pytest.raises(remat.BudgetTooSmall):
        steps()
    assert not any(after_step)
    assert looked


def several_steps(model):
    for _ in range(5):
        step(model)


def reach_of(error):
    """What a refusal says that slices reach."""
    (found,) = re.findall(r"numerics='rounding' .* about (.*) are enough", str(error.__notes__))
    return found


def budget_of(plain):
    step(plain)
    plain.zero_grad()
    with measure_peak() as peak:
        step(plain)
    return int(0.45 * peak.peak_bytes)


@pytest.mark.parametrize(
    ("whole", "regions"),
    [(False, None), pytest.param(True, "head", marks=pytest.mark.sweep)],
    ids=["a graph break", "regions="],
)
def test_a_region_runs_in_slices_where_it_must(whole, regions, tmp_path):
    plain = Headed(whole)
    budget = budget_of(plain)
    options = {"budget": budget, "limit_seconds": 0.1, "regions": regions}
    refused = remat.rematerialize(copy.deepcopy(plain), **options)
    with pytest.warns(remat.BudgetWarning), pytest.raises(remat.BudgetTooSmall) as error:
        several_steps(refused)
    assert reach_of(error.value) == mib(budget)
    model = remat.rematerialize(copy.deepcopy(plain), numerics="rounding", **options)
    expected = step(plain)
    for _ in range(4):
        model.zero_grad()
        with measure_peak() as peak:
            found = step(model)
        assert peak.peak_bytes <= budget
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert not model.plan.is_one_region
    assert any(kind.sliced for kind in model.plan.kinds)
    assert model.plan.numerics is Numerics.ROUNDING
    assert model.plan.predicted_overhead > 0
    assert model.plan.lower_bound <= model.plan.time

    model.plan.save(tmp_path / "plan.json")
    planned = {"plan": tmp_path / "plan.json", "regions": regions, "limit_seconds": 0.1}
    again = remat.rematerialize(copy.deepcopy(plain), numerics="rounding", **planned)
    for _ in range(3):
        found = step(again)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert [kind.sliced for kind in again.plan.kinds] == [kind.sliced for kind in model.plan.kinds]
    with pytest.raises(remat.PlanMismatch, match="numerics="):
        step(remat.rematerialize(copy.deepcopy(plain), **planned))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("whole", "regions"),
    [(False, None), (True, "head")],
    ids=["a graph break", "regions="],
)
def test_a_refusal_says_what_slices_reach(whole, regions):
    plain = Headed(whole)
    options = {"limit_seconds": 0.1, "regions": regions}
    small = remat.rematerialize(copy.deepcopy(plain), budget=budget_of(plain) // 3, **options)
    with pytest.warns(remat.BudgetWarning), pytest.raises(remat.BudgetTooSmall) as error:
        several_steps(small)
    reach = int(1.03 * float(reach_of(error.value).removesuffix(" MiB")) * 2**20)  # as rounded
    assert budget_of(plain) // 3 < reach < error.value.smallest_bytes
    several_steps(
        remat.rematerialize(copy.deepcopy(plain), budget=reach, numerics="rounding", **options)
    )
    refused = remat.rematerialize(plain, budget=reach // 2, numerics="rounding", **options)
    with pytest.warns(remat.BudgetWarning), pytest.raises(remat.BudgetTooSmall) as error:
        several_steps(refused)
    assert "rounding" not in str(getattr(error.value, "__notes__", ""))


def test_a_region_is_left_whole_where_it_fits():
    plain = Headed()
    model = remat.rematerialize(plain, budget="64MiB", limit_seconds=0.1, numerics="rounding")
    for _ in range(3):
        step(model)
    assert not any(kind.sliced for kind in model.plan.kinds)
