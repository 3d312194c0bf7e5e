"""Schedules of a graph begin the search for one that has nearly the same ops."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import remat
from remat.planning.near_graphs import carried_over
from remat.session import kind_finder
from remat_graph import Compute, Graph, Schedule, simulate
from remat_graph.testing import random_training, unit_chain
from remat_solvers import smallest_budget, store_all


def runs(schedule: Schedule) -> Counter[str]:
    return Counter(step.op for step in schedule if isinstance(step, Compute))


def without_last(graph: Graph) -> Graph:
    """Leave out the last op, and number the others anew."""
    *ops, last = graph.ops
    names = {op.name: f"{op.name[0]}{at}" for at, op in enumerate(ops)}
    left = [
        replace(op, name=names[op.name], twin=None if op.twin is None else names[op.twin])
        for op in ops
    ]
    values = tuple(value for value in graph.values if value.name not in last.outputs)
    made = {value for op in left for value in op.outputs if op.stage is last.stage}
    results = graph.results.difference(last.outputs) | {list(made)[-1]}
    boundary = None if graph.boundary is None else names[graph.boundary]
    return Graph(values, tuple(left), graph.resident, results & made, boundary)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_schedules_are_carried_over_to_a_graph_of_an_op_less(seed: int) -> None:
    graph = random_training(Random(seed), most_depth=24)
    assume(len(graph.ops) >= 24)
    less = without_last(graph)
    lowest = smallest_budget(graph, limit_seconds=0.05).schedule
    schedules = [store_all(graph), lowest]
    there = carried_over(schedules, graph, less)
    assert len(there) == 2
    assert there[0] == store_all(less)
    of_less = simulate(less, there[1])
    assert of_less.peak_bytes <= max(
        simulate(graph, lowest).peak_bytes, simulate(less, there[0]).peak_bytes
    )
    assert runs(there[1]).total() <= runs(lowest).total() - 1
    back = carried_over(there, less, graph)
    assert len(back) == 2
    assert back[0] == store_all(graph)
    assert runs(back[1]).total() >= len(graph.ops)


def test_none_are_carried_over_to_another_graph() -> None:
    graph, other = unit_chain(20), unit_chain(24)
    assert carried_over([store_all(graph)], graph, graph) == [store_all(graph)]
    assert carried_over([store_all(other)], other, graph) == []
    not_legal = Schedule(tuple(reversed(store_all(graph).steps)))
    assert carried_over([not_legal], graph, graph) == []
    of_a_kind = [replace(op, name=f"{op.name[0]}x", twin=None) for op in graph.ops[:1]]
    unlike = replace(graph, ops=(*of_a_kind, *(replace(op, twin=None) for op in graph.ops[1:])))
    assert carried_over([store_all(graph)], graph, unlike) == [store_all(unlike)]


class Two(nn.Module):
    """Two regions; of the first, one output gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sigmoid()
        score = x.sum()
        torch._dynamo.graph_break()
        return x.square().mean() + (score > 0)


def test_a_region_for_fewer_gradients_is_solved_from_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[tuple[int, int, float]] = []
    front = kind_finder.region_front

    def noted(graph: Graph, **options: Any) -> Any:
        solved.append((len(graph.ops), len(options["known"]), options["limit_seconds"]))
        return front(graph, **options)

    monkeypatch.setattr(kind_finder, "region_front", noted)
    torch.manual_seed(0)
    model = Two()
    run = remat.rematerialize(model, budget=0.7)
    for _ in range(3):
        run(torch.randn(256, 32)).backward()
    (ops, known, seconds), *_, (fewer, of_known, share) = [e for e in solved if e[0] > 10]
    assert fewer < ops
    assert known == 0
    assert of_known > 1
    assert share < seconds / 2
