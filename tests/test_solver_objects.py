"""Solvers and partitioners with settings of one's own, wherever a name may stand."""

import pytest
import torch
from exec_cases.training import assert_bitwise_equal, train
from torch import nn

import remat
from remat.cache import Store, cached_solution, keep_solution
from remat_graph.testing import unit_chain
from remat_partition.h_partition import HPartition
from remat_solvers import solve
from remat_solvers.published.checkmate import Checkmate
from remat_solvers.published.hierarchical.hilp import HILP
from remat_solvers.published.rotor import Rotor

LIMIT_SECONDS = 2.0
TREE = HILP(most_options=40)


class Noted(HPartition):
    """Notes how many graphs it cuts."""

    name = "noted"
    cut_graphs = 0

    def partition(self, graph):
        self.cut_graphs += 1
        return super().partition(graph)


class Net(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        torch.manual_seed(0)
        self.breaks = breaks
        self.first = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.Tanh())))
        self.second = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x):
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


def batch():
    return torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


def step(model):
    return train(model, lambda m, _: m(batch()), lambda output: output.square().mean(), steps=4)


@pytest.mark.parametrize(
    ("way", "breaks"),
    [
        pytest.param("rematerialize", False, marks=pytest.mark.sweep),
        ("rematerialize", True),
        pytest.param("compile", False, marks=pytest.mark.sweep),
    ],
)
def test_a_model_trains_by_objects(way, breaks):
    partitioner = Noted(max_top_ops=8)
    options = {"solver": TREE, "partitioner": partitioner, "limit_seconds": LIMIT_SECONDS}
    options["budget"] = "1MiB" if breaks else 0.75
    if way == "rematerialize":
        model = remat.rematerialize(Net(breaks), **options)
    else:
        model = torch.compile(Net(breaks), backend="remat", options=options)
    assert_bitwise_equal(step(model), step(Net(breaks)))
    assert partitioner.cut_graphs
    if way == "rematerialize" and not breaks:
        assert model.plan.solution.solver == "h-ilp(most_options=40)"
        assert "h-ilp(most_options=40)" in str(model.plan)


@pytest.mark.sweep
def test_plans_and_curves_by_objects(tmp_path):
    partitioner = Noted()
    options = {"solver": TREE, "partitioner": partitioner, "costs": "estimate"}
    plan = remat.plan(Net(), (batch(),), budget=0.75, limit_seconds=LIMIT_SECONDS, **options)
    plan.save(tmp_path / "plan.json")
    loaded = remat.rematerialize(Net(), (batch(),), plan=tmp_path / "plan.json").plan
    assert plan.solution.solver == loaded.solution.solver == "h-ilp(most_options=40)"
    curve = remat.tradeoff(Net(), (batch(),), points=2, limit_seconds=LIMIT_SECONDS, **options)
    assert curve.solver == "h-ilp(most_options=40)"
    assert partitioner.cut_graphs == 2


@pytest.mark.parametrize("ask", [remat.plan, remat.rematerialize, remat.tradeoff])
def test_a_partitioner_without_use_is_refused(ask):
    budget = {"budgets": [0.5]} if ask is remat.tradeoff else {"budget": 0.5}
    with pytest.raises(remat.RematError, match=r"solver='auto' takes the graph as it is; leave"):
        ask(Net(), (batch(),), partitioner="h-partition", **budget)
    with pytest.raises(remat.PartitionError, match="no partitioner is called 'nosuch'"):
        ask(Net(), (batch(),), solver="h-ilp", partitioner="nosuch", **budget)
    with pytest.raises(remat.SolverError, match=r"give an object: Checkmate\(\)"):
        ask(Net(), (batch(),), solver=Checkmate, **budget)


def test_what_is_cached_is_found_by_the_same_settings_only(tmp_path, monkeypatch):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path / "cache"))
    graph = unit_chain(6)
    keep_solution(graph, 5, Rotor(slots=40), None, solve(graph, 5, solver=Rotor(slots=40)))
    assert cached_solution(graph, 5, Rotor(slots=40), None).solver == "rotor(slots=40)"
    assert cached_solution(graph, 5, "rotor", None) is None
    assert cached_solution(graph, 5, Rotor(slots=41), None) is None
    keep_solution(graph, 5, "rotor", None, solve(graph, 5, solver="rotor"))
    assert cached_solution(graph, 5, Rotor(), None).solver == "rotor"

    kept = len(Store.here().entries())
    solution = solve(graph, 9, solver="store-all")
    keep_solution(graph, 9, TREE, None, solution, HPartition(max_top_ops=8))
    assert cached_solution(graph, 9, TREE, None, HPartition(max_top_ops=8)) is not None
    assert cached_solution(graph, 9, TREE, None, HPartition(max_top_ops=9)) is None
    assert cached_solution(graph, 9, TREE, None) is None

    class Mine(Rotor):
        """Its code may change from one process to the next."""

    keep_solution(graph, 5, Mine(), None, solution)
    keep_solution(graph, 9, TREE, None, solution, Noted())
    assert cached_solution(graph, 5, Mine(), None) is None
    assert len(Store.here().entries()) == kept + 1
