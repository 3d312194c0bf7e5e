"""Schedules that ranks hand to each other by a store, here one that two of them share in a process.

Two processes that train: `stacks/test_ranks.py`.
"""

import base64
import json
import logging
import zlib
from threading import Event

import numpy as np
import pytest
import torch
from torch import distributed, nn

import remat
from remat.planning import planner, ranks
from remat.session import step_planner
from remat_graph import Compute, Graph, Op, Schedule, Stage, Value, encode
from remat_solvers import smallest_budget, store_all
from remat_solvers.toolkit import Wiring, expand


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
    as_a_rank(monkeypatch, lambda: kept)
    return kept


def as_a_rank(monkeypatch, store):
    state = ranks._GroupState()
    monkeypatch.setattr(ranks, "_store", store)
    monkeypatch.setattr(ranks, "_group_state", lambda: state)


@pytest.fixture
def next_rank(monkeypatch, store):
    """Count from the beginning, as another rank does."""
    return lambda: as_a_rank(monkeypatch, lambda: store)


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


class Fake:
    """A store that answers by a function."""

    def __init__(self, answer):
        self.clone, self.compare_set = lambda: self, lambda *_: answer()


def of_ops(*names):
    return encode(Schedule(tuple(map(Compute, names)))).decode()


def packed(text):
    return base64.b85encode(zlib.compress(text.encode()))


@pytest.mark.parametrize(
    "said",
    [
        b"nothing",
        packed("[["),
        packed("[0]"),
        packed(json.dumps([[0, encode(chain("o")).decode()]])),
        packed(json.dumps([[9, of_ops("o0")]])),
        packed(json.dumps([[0, of_ops("p0")]])),
        packed(json.dumps([[0, of_ops("o0", "o3")]])),
    ],
    ids=[
        "not packed",
        "cut off",
        "of another kind",
        "a graph",
        "of no graph",
        "of another graph",
        "illegal",
    ],
)
def test_a_store_that_says_something_else_leaves_each_rank_its_own(monkeypatch, caplog, said):
    as_a_rank(monkeypatch, lambda: Fake(lambda: said))
    graph = chain("p")
    mine = [(0, again(graph))]
    with caplog.at_level(logging.WARNING, "remat"):
        assert ranks.of_first_rank("asked", [graph], mine) == mine
    assert "not shared with other ranks" in caplog.text


@pytest.mark.parametrize("reason", ["Broken pipe", "not implemented"])
def test_a_store_that_cannot_leaves_each_rank_its_own(monkeypatch, caplog, reason):
    def fail():
        raise RuntimeError(reason)

    as_a_rank(monkeypatch, lambda: Fake(fail))
    graph = chain("p")
    mine = [(0, again(graph))]
    with caplog.at_level(logging.WARNING, "remat"):
        assert ranks.of_first_rank("asked", [graph], mine) == mine
    assert reason in caplog.text


def test_a_silent_store_is_waited_for_once(monkeypatch, caplog):
    asked, end = [], Event()

    def silent():
        asked.append(True)
        end.wait()

    as_a_rank(monkeypatch, lambda: Fake(silent))
    monkeypatch.setattr(ranks, "_WAIT_SECONDS", 0.1)
    graph = chain("p")
    mine = [(0, again(graph))]
    with caplog.at_level(logging.WARNING, "remat"):
        for _ in range(2):
            assert ranks.of_first_rank("asked", [graph], mine) == mine
    assert len(asked) == 1
    assert "silent" in caplog.text
    end.set()


def test_a_plan_that_a_store_cannot_take_is_not_sent(monkeypatch, caplog):
    monkeypatch.setattr(ranks, "_MOST_BYTES", 10)
    as_a_rank(monkeypatch, lambda: pytest.fail("sent"))
    graph = chain("p")
    mine = [(0, again(graph))]
    with caplog.at_level(logging.WARNING, "remat"):
        assert ranks.of_first_rank("asked", [graph], mine) == mine
    assert "bytes" in caplog.text


def trained_beside(monkeypatch, schedule, **options):
    """Train three steps where another rank hands over what `schedule` makes of each graph."""
    asked = []

    def of_first_rank(text, graphs, chosen):
        asked.append(text)
        return [(which, schedule(graphs[which])) for which, _ in chosen]

    for module in (planner, step_planner):
        monkeypatch.setattr(module, "has_other_ranks", lambda: True)
    for module in (ranks, step_planner):
        monkeypatch.setattr(module, "of_first_rank", of_first_rank)
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3))
    model = remat.rematerialize(nn.Sequential(*layers), **options)
    for _ in range(3):
        x = torch.randn(64, 16)  # there before the step
        with remat.measure_peak() as peak:
            model(x).square().mean().backward()
    assert asked
    assert peak.peak_bytes <= model.plan.budget_bytes
    return model.plan


@pytest.mark.parametrize("regions", [None, pytest.param("[0-9]", marks=pytest.mark.sweep)])
def test_what_does_not_fit_here_is_not_taken(monkeypatch, regions):
    """Storing everything is faster, but over the budget."""
    plan = trained_beside(monkeypatch, store_all, budget=0.7, regions=regions)
    assert plan.recomputations


@pytest.mark.parametrize("regions", [pytest.param(None, marks=pytest.mark.sweep), "[0-9]"])
@pytest.mark.parametrize("most_times", [1.05, 100.0])
def test_what_is_much_slower_is_not_taken(monkeypatch, regions, most_times):
    """The minimal peak needs recomputation, for which there is no need here."""
    for module in (ranks, step_planner):
        monkeypatch.setattr(module, "MOST_TIMES", most_times)

    def lowest(graph):
        return smallest_budget(graph, limit_seconds=0.1).schedule

    plan = trained_beside(monkeypatch, lowest, budget="1MiB", regions=regions)
    assert (plan.recomputations > 0) == (most_times > 2)
