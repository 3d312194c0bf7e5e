"""A budget that a refusal names as enough is enough when it is asked for."""

import importlib
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from exec_cases.training import assert_bitwise_equal, train
from torch import nn
from torch.nn.utils import parametrizations

import remat
from remat.cache import Store, keep_smallest, smallest, smallest_known
from remat_exec import measure_peak
from remat_graph import Solution, Status, simulate
from remat_graph.testing import unit_chain
from remat_solvers import BudgetTooSmall, SmallestBudget, solve, store_all

solve_module = importlib.import_module("remat_solvers.solve")

BATCH = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))


@dataclass
class FindsNothing:
    """A solver that runs out of time, as any does on a machine that is busy enough."""

    name: ClassVar[str] = "finds-nothing"
    exact: ClassVar[bool] = False
    needs_hierarchy: ClassVar[bool] = False
    takes_alternatives: ClassVar[bool] = False
    citation: ClassVar[str] = "none"

    def can_solve(self, problem):
        return None

    def solve(self, problem, limit, report):
        return Solution(Status.LIMIT, None, float("inf"), 0, None, self.name, 0.0)


def in_another_process(monkeypatch):
    monkeypatch.setattr(smallest, "_kept", {})


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    in_another_process(monkeypatch)


def mlp(blocks=6):
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(blocks) for m in (nn.Linear(64, 64), nn.GELU())))


def rematerialized(budget, blocks=6):
    return remat.rematerialize(mlp(blocks), BATCH, budget=budget, limit_seconds=0.3)


@pytest.fixture
def busier(monkeypatch):
    """Call it, and from then on `auto` finds nothing but storing everything."""

    def finds_little(graph, **_):
        everything = store_all(graph)
        return SmallestBudget(simulate(graph, everything).peak_bytes, everything, 1, None)

    def begin():
        monkeypatch.setattr(solve_module, "_PORTFOLIO", ("store-all",))
        monkeypatch.setattr(solve_module, "smallest_budget", finds_little)

    return begin


def refused(budget=1000, blocks=6):
    with pytest.raises(BudgetTooSmall) as caught:
        rematerialized(budget, blocks)
    return caught.value.smallest_bytes


@pytest.mark.parametrize(
    "cached",
    [pytest.param(False, marks=pytest.mark.sweep), True],
    ids=["this process", "another process"],
)
def test_what_is_named_is_enough_whatever_a_later_search_finds(
    cached, tmp_path, monkeypatch, busier
):
    if cached:
        monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    named = refused()
    if cached:
        in_another_process(monkeypatch)
    busier()
    model = rematerialized(named)
    assert model.plan.measured_peak_bytes <= named == model.plan.budget_bytes
    assert model.plan.recomputations > 0

    def step(model):
        return train(model, lambda m, _: m(BATCH), lambda output: output.sum(), steps=2)

    assert_bitwise_equal(step(model), step(mlp()))


@pytest.mark.sweep
def test_no_more_is_named_than_before(busier):
    named = refused()
    busier()
    assert refused() == named < refused(blocks=7)


class Orthogonal(nn.Module):
    """Decomposing a matrix, or each of a batch, takes workspace that no estimate knows of."""

    def __init__(self, over_batch):
        super().__init__()
        linear = parametrizations.orthogonal(nn.Linear(32, 32))
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32) if over_batch else linear
        self.over_batch = over_batch

    def forward(self, x):
        x = torch.tanh(self.first(x)).sigmoid()
        if self.over_batch:
            x = torch.linalg.qr(x.view(-1, 32, 32) + torch.eye(32))[0].reshape(-1, 32)
        return self.last(x * x.sin())


@pytest.mark.parametrize("over_batch", [pytest.param(False, marks=pytest.mark.sweep), True])
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.sweep), 0.01, 0.8], ids=str)
@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.sweep)])
def test_what_is_named_by_estimates_was_measured(share, over_batch, kernels):
    x = torch.randn(128, 32, generator=torch.Generator().manual_seed(1))
    options = {"costs": "estimate", "limit_seconds": 0.2, "kernels": kernels}
    options["wait"] = kernels == "inductor"

    def rematerialized(budget):
        torch.manual_seed(0)
        return remat.rematerialize(Orthogonal(over_batch), x, budget=budget, **options)

    with measure_peak("cpu") as plain:
        Orthogonal(over_batch)(x).sum().backward()
    named = int(share * plain.peak_bytes) or 1
    try:
        model = rematerialized(named)
    except BudgetTooSmall as error:
        named = error.smallest_bytes
        model = rematerialized(named)
    assert model.plan.measured_peak_bytes <= named
    with measure_peak("cpu") as taken:
        model(x).sum().backward()
    assert taken.peak_bytes <= named


@pytest.mark.sweep
def test_a_solver_that_is_named_answers_for_itself(busier):
    named = refused()
    busier()
    with pytest.raises(BudgetTooSmall, match="was not met by this solver") as caught:
        remat.rematerialize(mlp(), BATCH, budget=named, solver=FindsNothing(), limit_seconds=0.3)
    assert caught.value.smallest_bytes == named
    assert rematerialized(named).plan.recomputations > 0


def test_a_schedule_goes_with_what_is_named():
    graph = unit_chain(8)
    with pytest.raises(BudgetTooSmall) as caught:
        solve(graph, 1, solver=FindsNothing(), limit_seconds=0.3)
    error = caught.value
    assert simulate(graph, error.schedule).peak_bytes == error.smallest_bytes
    found = solve(graph, error.smallest_bytes, solver=FindsNothing(), start=error.schedule)
    assert found.peak_bytes == error.smallest_bytes


def test_only_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(smallest, "_MOST_KEPT", 2)
    chains = [unit_chain(length) for length in (3, 4, 5)]
    for chain in chains:
        keep_smallest(chain, store_all(chain))
    assert [smallest_known(chain) is None for chain in chains] == [True, False, False]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: re.sub('"o1"', '"__import__"', text),
        lambda text: re.sub(r'\["compute","o1"\],', "", text),
    ],
)
def test_a_damaged_entry_is_named_and_left_out(damage, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    graph = unit_chain(4)
    keep_smallest(graph, store_all(graph))
    in_another_process(monkeypatch)
    assert smallest_known(graph) == store_all(graph)
    (entry,) = Store.here().entries()
    assert entry.kind == "smallest"
    text = entry.path.read_text()
    entry.path.write_text(damage(text))
    assert entry.path.read_text() != text
    assert smallest_known(graph) is None
    assert str(entry.path) in caplog.text
