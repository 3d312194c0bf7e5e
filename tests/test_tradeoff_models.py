"""`remat.tradeoff` on a captured model: its budgets are those of `plan`."""

import re

import pytest
import torch

import remat
import zoo
from remat.planning import model_curves
from remat_graph import Status, simulate
from remat_graph.torch import CaptureError
from remat_solvers import InvalidProblem

NAME = "gpt2-no-dropout"


@pytest.fixture(scope="module")
def example():
    return zoo.build(NAME)


@pytest.mark.sweep
def test_a_curve_of_a_model_is_what_plan_says_at_its_budgets(example):
    before = {name: tensor.clone() for name, tensor in example.model.state_dict().items()}
    call = (example.model, example.args, example.kwargs)
    curve = remat.tradeoff(*call, points=3, costs="estimate", limit_seconds=0.3)
    first, middle, last = curve.points
    assert last.budget_bytes == curve.store_all_peak_bytes
    assert last.status is Status.OPTIMAL
    assert last.solution.time == curve.store_all_time <= middle.solution.time
    for point in (first, middle):
        assert point.lower_bound <= point.solution.time
        assert point.solution.peak_bytes < point.budget_bytes
    plan = remat.plan(*call, budget=last.budget_bytes, costs="estimate")
    assert plan.solution.time == curve.store_all_time
    at_middle = remat.plan(*call, budget=middle.budget_bytes, costs="estimate", limit_seconds=0.3)
    assert bool(at_middle.kinds[0].deferred) is (plan.graph.ops != at_middle.graph.ops)
    assert simulate(at_middle.graph, middle.solution.schedule).time == middle.solution.time
    tighter = remat.plan(*call, budget=last.budget_bytes - 1, costs="estimate", limit_seconds=0.3)
    assert tighter.solution.solver != "store-all"
    with pytest.raises(remat.BudgetTooSmall):
        remat.plan(*call, budget=curve.least_bytes - 1, costs="estimate", limit_seconds=0.3)
    assert all(torch.equal(before[k], v) for k, v in example.model.state_dict().items())


def test_measured_with_a_loss_and_fractions_of_plain():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)), torch.nn.Tanh())
    batch = torch.randn(256, 64)

    def loss(output):
        return (output - 1).square().mean()

    def curve(**options):
        return remat.tradeoff(model, batch, limit_seconds=0.5, **options)

    with_loss = curve(budgets=[0.9, "1.0 GiB"], loss=loss)
    plan = remat.plan(model, batch, budget=0.9, loss=loss, limit_seconds=0.3)
    assert with_loss.points[0].budget_bytes == pytest.approx(plan.budget_bytes, rel=0.02)
    assert with_loss.points[1].budget_bytes == 2**30
    assert with_loss.points[1].status is Status.OPTIMAL


def test_what_is_refused(example):
    graph = remat.plan(torch.nn.Linear(2, 2), torch.ones(1, 2), budget="1GiB").graph
    assert remat.tradeoff(graph, budgets=["50%", 1.0]).points[-1].status is Status.OPTIMAL
    for extra in ({"args": ()}, {"costs": "estimate"}, {"loss": abs}, {"kwargs": {"x": 1}}):
        with pytest.raises(remat.RematError, match="are for a model"):
            remat.tradeoff(graph, **extra)
    with pytest.raises(remat.BudgetError, match="no point of a curve"):
        remat.tradeoff(example.model, example.args, example.kwargs, budgets=["auto"])
    with pytest.raises(remat.BudgetError, match="budget=-1"):
        remat.tradeoff(graph, budgets=[-1])
    with pytest.raises(InvalidProblem, match="budgets="):
        remat.tradeoff(graph, budgets=[])
    with pytest.raises(remat.SolverError, match="no solver is called"):
        remat.tradeoff(example.model, example.args, example.kwargs, solver="none")
    with pytest.raises(CaptureError):
        remat.tradeoff(Decides(), torch.ones(2))


def never(*args, **kwargs):
    raise AssertionError("the model was captured")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"points": 1}, "points=1"),
        ({"points": "8"}, "points='8'"),
        ({"budgets": []}, "budgets="),
        ({"budgets": "50%"}, "budgets='50%'"),
        ({"budgets": 0.5}, "budgets=0.5"),
        ({"budgets": [0.5, "8"]}, "budget='8'"),
        ({"limit_seconds": -1}, "limit_seconds=-1"),
        ({"limit_seconds": "1"}, "limit_seconds='1'"),
        ({"executor": 4}, "executor=4"),
        ({"progress": True}, "progress=True"),
        ({"solver": None}, "solver=None"),
        ({"solver": "none"}, "no solver is called"),
        ({"loss": 3}, "loss=3"),
        ({"kwargs": 5}, "kwargs=5"),
        ({"model": "model"}, "model='model' is a str"),
    ],
    ids=repr,
)
def test_arguments_are_checked_before_the_capture(wrong, message, monkeypatch):
    monkeypatch.setattr(model_curves, "plan_module", never)
    call = {"model": torch.nn.Linear(2, 2), "args": torch.ones(1, 2), **wrong}
    with pytest.raises((remat.RematError, remat.SolverError), match=re.escape(message)):
        remat.tradeoff(**call)


class Decides(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x
