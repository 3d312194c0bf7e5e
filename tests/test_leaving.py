"""Gradients that hooks let go of at once: seen in the first step, or told."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import remat
from remat.errors import BudgetWarning
from remat_exec import measure_peak
from remat_graph import (
    Compute,
    Free,
    Graph,
    Op,
    Schedule,
    Stage,
    Value,
    leave_late,
    put_in_leaves,
    reads_after_leaving,
    simulate,
    without_leaves,
)
from remat_solvers import BudgetTooSmall, smallest_budget, store_all

WIDTH, DEPTH = 256, 6
HELD = DEPTH * (WIDTH + 1) * WIDTH * 4  # by all gradients
TIGHT = HELD * 2 // 3


def chain():
    torch.manual_seed(0)
    layers = [each for _ in range(DEPTH) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(32, WIDTH)


def hook_all(module, optimizer=torch.optim.SGD, *, keeps=False):
    for parameter in module.parameters():
        own = optimizer([parameter], lr=0.01)

        def hook(p, own=own):
            if not keeps:
                own.step()
                p.grad = None

        parameter.register_post_accumulate_grad_hook(hook)


def step(model, x):
    model(x).square().sum().backward()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_what_no_plan_with_all_gradients_reaches_is_reached(optimizer):
    module, x = chain()
    eager = copy.deepcopy(module)
    for each in (eager, module):
        hook_all(each, optimizer)
    model = remat.rematerialize(module, budget=TIGHT, limit_seconds=0.2)
    for at in range(4):
        step(eager, x)
        with measure_peak() as peak:
            step(model, x)
        if optimizer is torch.optim.SGD or at:  # Adam allocates its state in the first step
            assert peak.peak_bytes <= TIGHT
        for expected, given in zip(eager.parameters(), module.parameters(), strict=True):
            assert torch.equal(expected, given)
    assert "gradients leave" in str(model.plan)


def test_a_first_step_shows_that_gradients_leave():
    module, x = chain()
    hook_all(module)
    model = remat.rematerialize(module, budget=4 * HELD)
    step(model, x)
    assert "gradients leave" not in str(model.plan)
    assert model.plan.predicted_peak_bytes > HELD
    step(model, x)
    assert "gradients leave" in str(model.plan)
    assert model.plan.predicted_peak_bytes < HELD


def test_hooks_that_keep_gradients_change_nothing():
    module, x = chain()
    hook_all(module, keeps=True)
    model = remat.rematerialize(module, budget=4 * HELD)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for _ in range(3):
            step(model, x)
            model.zero_grad()
    assert "gradients leave" not in str(model.plan)


def test_gradients_that_stay_against_a_plan_are_told_of_and_planned_for():
    module, x = chain()
    hook_all(module, keeps=True)
    model = remat.rematerialize(module, budget=TIGHT, limit_seconds=0.2)
    with pytest.warns(BudgetWarning, match="gradients stayed"):
        step(model, x)
    model.zero_grad()
    with pytest.raises(BudgetTooSmall):
        step(model, x)


def test_gradients_that_are_asked_for_are_those_of_eager():
    module, x = chain()
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    hook_all(module)
    model = remat.rematerialize(module, budget=TIGHT, limit_seconds=0.2)
    with pytest.warns(BudgetWarning, match="gradients stay"):
        given = torch.autograd.grad(model(x).square().sum(), list(module.parameters()))
    assert all(map(torch.equal, expected, given))


def test_a_plan_that_was_told_is_saved_and_used(tmp_path):
    module, x = chain()
    told = remat.plan(module, (x,), budget=TIGHT, limit_seconds=0.2, optimizer_in_backward=True)
    assert "gradients leave" in str(told)
    with pytest.raises(BudgetTooSmall):
        remat.plan(module, (x,), budget=TIGHT, limit_seconds=0.2)
    told.save(tmp_path / "plan.json")
    hook_all(module)
    model = remat.rematerialize(module, plan=tmp_path / "plan.json")
    with measure_peak() as peak:
        step(model, x)
    assert model.plan.predicted_peak_bytes == told.predicted_peak_bytes
    assert peak.peak_bytes <= TIGHT


def test_a_curve_and_a_plan_count_gradients_that_leave_alike():
    module, x = chain()
    options = {"costs": "estimate", "limit_seconds": 4}
    kept, left = (
        remat.tradeoff(module, (x,), budgets=[TIGHT], optimizer_in_backward=leave, **options)
        for leave in (False, True)
    )
    planned = remat.plan(module, (x,), budget=TIGHT, optimizer_in_backward=True, **options)
    assert kept.points[0].solution is None
    schedule = left.points[0].solution.schedule
    assert reads_after_leaving(planned.graph, schedule) is None
    assert simulate(planned.graph, schedule).peak_bytes <= TIGHT
    with pytest.raises(remat.RematError, match="optimizer_in_backward"):
        remat.tradeoff(planned.graph, optimizer_in_backward=True)


@pytest.mark.sweep
@pytest.mark.parametrize("batch", [55, 63])
def test_what_fits_with_gradients_held_fits_where_they_leave(batch):
    """Solvers let a gradient leave early and read its parameter again: put right, that is more."""
    torch.manual_seed(0)
    layers = [each for _ in range(2) for each in (nn.Linear(64, 64), nn.GELU())]
    module, x = nn.Sequential(*layers), torch.randn(batch, 64)
    options = {"costs": "estimate", "limit_seconds": 1}
    for leave in (False, True):
        planned = remat.plan(module, (x,), budget="80KiB", optimizer_in_backward=leave, **options)
        assert planned.predicted_peak_bytes <= 80 * 1024
        curve = remat.tradeoff(
            module, (x,), budgets=["80KiB"], optimizer_in_backward=leave, **options
        )
        assert curve.points[0].solution is not None
    refusals = []
    for leave in (False, True):
        with pytest.raises(BudgetTooSmall) as refused:
            remat.plan(module, (x,), budget="20KiB", optimizer_in_backward=leave, **options)
        refusals.append(refused.value)
    held, left = refusals
    assert left.smallest_bytes <= held.smallest_bytes
    enough = remat.plan(
        module, (x,), budget=left.smallest_bytes, optimizer_in_backward=True, **options
    )
    assert reads_after_leaving(enough.graph, enough.schedule) is None


def test_a_schedule_that_holds_gradients_takes_less_when_they_leave():
    module, x = chain()
    left = remat.plan(module, (x,), budget="1GiB", costs="estimate", optimizer_in_backward=True)
    held = without_leaves(left.graph)
    assert without_leaves(held) is held
    for schedule in (store_all(held), smallest_budget(held, limit_seconds=0.2).schedule):
        late = put_in_leaves(left.graph, schedule)
        assert reads_after_leaving(left.graph, late) is None
        assert simulate(left.graph, late).peak_bytes < simulate(held, schedule).peak_bytes


def test_points_of_a_curve_have_only_what_leaves_late(monkeypatch):
    """A solver that lets each gradient leave at once, and reads the parameters again later."""
    ops = (
        Op("f", ("x", "w"), ("y",), 1.0),
        Op("g", ("x", "y"), ("d",), 1.0, stage=Stage.BACKWARD),
        Op("leave@w", ("d", "w"), (), 0.0, stage=Stage.BACKWARD),
        Op("k", ("x",), ("e",), 1.0, stage=Stage.BACKWARD),
        Op("h", ("x", "y", "e"), ("z",), 1.0, stage=Stage.BACKWARD),
    )
    values = (*(Value(name, 10) for name in ("x", "w", "y", "d", "e")), Value("z", 1))
    graph = Graph(values, ops, frozenset({"x", "w"}), frozenset({"z"}), "g")
    steps = [Compute("f"), Compute("g"), Free("y"), Compute("leave@w"), Free("d")]
    again = [Compute("k"), Compute("f"), Compute("h"), Free("y"), Free("e")]
    early = Schedule((*steps, *again))
    peak = simulate(graph, early).peak_bytes
    curve = remat.tradeoff(graph, budgets=[1.0])
    solution = replace(curve.points[0].solution, schedule=early, peak_bytes=peak)
    points = tuple(replace(curve.points[0], budget_bytes=b, solution=solution) for b in (peak, 90))
    solved = replace(curve, points=points, smallest_bytes=peak)
    monkeypatch.setattr("remat_solvers.tradeoff", lambda *args, **options: solved)
    assert reads_after_leaving(graph, early)
    late = leave_late(graph, early)
    assert simulate(graph, late).peak_bytes > peak
    for point in remat.tradeoff(graph, budgets=[peak, 90]).points:
        schedule = point.solution.schedule
        assert schedule != early
        assert reads_after_leaving(graph, schedule) is None
        assert simulate(graph, schedule).peak_bytes == point.solution.peak_bytes
        assert point.solution.peak_bytes <= point.budget_bytes


@pytest.mark.parametrize("budget", [TIGHT, 4 * HELD])
def test_a_hook_that_changes_a_parameter_still_to_be_read_is_refused(budget):
    """Eager raises as well, as it keeps the weight."""
    module, x = chain()
    hook_all(module)

    def change_another(_):
        with torch.no_grad():
            module[2].weight.mul_(0.5)

    module[6].weight.register_post_accumulate_grad_hook(change_another)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(module, x)
    module.zero_grad()
    model = remat.rematerialize(module, budget=budget, limit_seconds=0.2)
    with pytest.raises(remat.BackwardError, match="own gradient was there"):
        step(model, x)
