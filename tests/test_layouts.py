"""Layouts are chosen for a fastest step; within a budget those that were traced may be faster."""

import pytest
import torch
from integration_cases.images import IMAGES, Images, choose_layouts

import remat
from remat.planning import solving


@pytest.fixture
def solved(monkeypatch):
    """Note the graphs that are solved."""
    graphs, solve = [], solving.solve

    def noted(graph, *args, **kwargs):
        graphs.append(graph)
        return solve(graph, *args, **kwargs)

    monkeypatch.setattr(solving, "solve", noted)
    return graphs


def planned(**options):
    return remat.rematerialize(Images(), IMAGES, numerics="rounding", limit_seconds=0.1, **options)


def test_layouts_that_cost_more_within_the_budget_are_not_taken(monkeypatch, solved):
    choose_layouts(monkeypatch, cost=100.0)
    model = planned(budget="8MiB")
    plan = model.plan
    assert solved == [plan.graph]  # the other program takes longer, whatever is stored
    assert plan.kinds[0].laid_out == ()
    assert plan.solution.lower_bound <= plan.solution.time
    plain = Images()
    for each in (model, plain):
        each(IMAGES).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_call_of_other_sizes_is_planned_in_the_layouts_that_were_taken(monkeypatch, solved):
    choose_layouts(monkeypatch, cost=100.0)
    model = planned(budget="8MiB")
    del solved[:]
    for count in (4, 8):
        model(torch.randn(count, *IMAGES.shape[1:])).sum().backward()
        assert model.plan.kinds[0].laid_out == ()
    assert not solved


def test_layouts_that_no_plan_without_can_beat_are_all_that_is_solved(monkeypatch, solved):
    choose_layouts(monkeypatch, cost=0.01)
    plan = planned(budget="8MiB").plan
    assert plan.kinds[0].laid_out
    assert solved == [plan.graph]


def test_a_budget_that_is_too_small_in_all_layouts(monkeypatch, solved):
    choose_layouts(monkeypatch)
    with pytest.raises(remat.BudgetTooSmall) as refused:
        planned(budget=1)
    assert len(solved) > 2  # in slices, too
    assert planned(budget=int(1.05 * refused.value.smallest_bytes)).plan
