"""Schedules that ranks hand to each other by a store, here one that two of them share in a process.

Two processes that train: `stacks/test_ranks.py`.
"""

import base64
import logging
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from torch import distributed, nn

import remat
from remat.planning import planner, ranks
from remat.steps import choosing
from remat_graph import Graph, Op, Stage, Value
from remat_solvers.baselines.store_all import store_all
from remat_solvers.toolkit import Wiring, expand

BUDGET = 0.7


def chain(prefix, size=600, **costs):
    """Two ops forward and two backward; the first may run again."""
    x, a, b, g, h = names = [f"{prefix}{name}" for name in "xabgh"]
    ops = (
        Op(f"{prefix}0", (x,), (a,), 1.0, **costs),
        Op(f"{prefix}1", (a,), (b,), 1.0),
        Op(f"{prefix}2", (b,), (g,), 1.0, stage=Stage.BACKWARD),
        Op(f"{prefix}3", (g, a), (h,), 1.0, stage=Stage.BACKWARD),
    )
    values = tuple(Value(name, size) for name in names)
    return Graph(values, ops, frozenset({x}), frozenset({h}), f"{prefix}2")


def again(graph):
    """Run the first op twice."""
    return expand(Wiring.of(graph), np.array([0, 1, 2, 0, 3]))


@pytest.fixture
def store(monkeypatch):
    kept = distributed.HashStore()
    monkeypatch.setattr(ranks, "has_other_ranks", lambda: True)
    monkeypatch.setattr(ranks, "_store", lambda: kept)
    monkeypatch.setattr(ranks, "_made", Counter())
    return kept


@pytest.fixture
def next_rank(monkeypatch, store):
    """Count from the beginning, as another rank does."""
    return lambda: monkeypatch.setattr(ranks, "_made", Counter())


def test_the_first_hands_its_schedule_to_the_next_in_its_names(next_rank):
    mine, theirs = chain("p"), chain("q", workspace_bytes=9)
    first = [(0, again(mine))]
    assert ranks.of_first_rank("asked", [mine], first) == first
    next_rank()
    found = ranks.of_first_rank("asked", [theirs], [(0, store_all(theirs))])
    assert found == [(0, again(theirs))]


def test_a_second_plan_of_a_rank_is_not_its_first(store):
    graph = chain("p")
    for schedule in (again(graph), store_all(graph)):
        assert ranks.of_first_rank("asked", [graph], [(0, schedule)]) == [(0, schedule)]


@pytest.mark.parametrize(("asked", "size"), [("asked", 1200), ("otherwise", 600)])
def test_other_graphs_and_other_budgets_are_planned_apart(next_rank, asked, size):
    graph, other = chain("p"), chain("p", size=size)
    ranks.of_first_rank("asked", [graph], [(0, again(graph))])
    next_rank()
    mine = [(0, store_all(other))]
    assert ranks.of_first_rank(asked, [other], mine) == mine


def packed(text):
    return base64.b85encode(zlib.compress(text.encode()))


@pytest.mark.parametrize(
    "said",
    [b"nothing", packed("[["), packed("{}"), packed("[[9],[[0]]]"), packed("[[0],[[0,3]]]")],
    ids=["not packed", "cut off", "of another kind", "of another graph", "illegal"],
)
def test_a_store_that_says_something_else_leaves_each_rank_its_own(monkeypatch, caplog, said):
    class Other:
        def compare_set(self, *_):
            return said

    monkeypatch.setattr(ranks, "has_other_ranks", lambda: True)
    monkeypatch.setattr(ranks, "_store", Other)
    graph = chain("p")
    mine = [(0, again(graph))]
    with caplog.at_level(logging.WARNING, "remat"):
        assert ranks.of_first_rank("asked", [graph], mine) == mine
    assert "no plan is shared with other ranks" in caplog.text


def test_a_store_that_cannot_leaves_each_rank_its_own(monkeypatch, store, caplog):
    class Gone:
        def compare_set(self, *_):
            raise distributed.DistNetworkError("Broken pipe")

    monkeypatch.setattr(ranks, "_store", Gone)
    graph = chain("p")
    mine = [(0, again(graph))]
    with caplog.at_level(logging.WARNING, "remat"):
        assert ranks.of_first_rank("asked", [graph], mine) == mine
    assert "Broken pipe" in caplog.text


def test_a_plan_that_a_store_cannot_take_is_not_sent(monkeypatch, store):
    monkeypatch.setattr(ranks, "_MOST_BYTES", 10)
    monkeypatch.setattr(ranks, "_store", lambda: pytest.fail("sent"))
    graph = chain("p")
    mine = [(0, again(graph))]
    assert ranks.of_first_rank("asked", [graph], mine) == mine


@pytest.mark.parametrize("regions", [None, "[0-9]"])
def test_what_does_not_fit_here_is_not_taken(monkeypatch, regions):
    """The other rank stores everything, which is over the budget of this one."""
    asked = []

    def of_first_rank(text, graphs, chosen):
        asked.append(text)
        return [(which, store_all(graphs[which])) for which, _ in chosen]

    for module in (planner, choosing):
        monkeypatch.setattr(module, "has_other_ranks", lambda: True)
        monkeypatch.setattr(module, "of_first_rank", of_first_rank)
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3))
    model = remat.rematerialize(nn.Sequential(*layers), budget=BUDGET, regions=regions)
    for _ in range(3):
        with remat.measure_peak() as peak:
            model(torch.randn(64, 16)).square().mean().backward()
    assert asked
    assert model.plan.recomputations
    assert peak.peak_bytes <= model.plan.budget_bytes
