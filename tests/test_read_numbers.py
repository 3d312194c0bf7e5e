"""Whole numbers that a forward reads out of its inputs: they are known before the graph runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import remat

SIZES = (5, 7, 9, 4, 11, 11)


class Pooled(nn.Module):
    """Rows that are added up by the graph that each is of; `count` says how many there are."""

    def __init__(self, count: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.layer, self.leave, self.count = nn.Linear(8, 8), nn.Linear(8, 1), count
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("most", torch.tensor([2**31 - 3], dtype=torch.int32))
        self.kept: int | None = None

    def forward(self, x: Tensor, graph: Tensor, same: Tensor) -> Tensor:
        rows = self.layer(x).tanh()
        self.same = same
        sums = rows.new_zeros(self.count(self, graph), 8).index_add(0, graph, rows)
        loss: Tensor = self.leave(sums).square().mean()
        return loss


def of_empty(model: Pooled, graph: Tensor) -> int:
    return int(graph.max()) + 1 if graph.numel() else 1


def of_writes(model: Pooled, graph: Tensor) -> int:
    graph += 1
    return int(graph.max()) + 1


def of_writes_to_the_same(model: Pooled, graph: Tensor) -> int:
    model.same += 1
    return int(graph.max()) + 1


def of_counted_steps(model: Pooled, graph: Tensor) -> int:
    model.steps += 1
    return int(graph.max()) + model.steps.item()


def of_clamped(model: Pooled, graph: Tensor) -> int:
    last = graph.max()
    last.clamp_(min=8)
    return int(last) + 1


def of_data(model: Pooled, graph: Tensor) -> int:
    graph.data.add_(1)
    return int(graph.max()) + 1


def of_several(model: Pooled, graph: Tensor) -> int:
    torch._foreach_add_([graph], 1)
    return int(graph.max()) + 1


def of_small_numbers(model: Pooled, graph: Tensor) -> int:
    return int(model.most.max() + 7) % 100 + 20  # in 32 bits


def of_kept(model: Pooled, graph: Tensor) -> int:
    model.kept = model.steps.item()
    model.steps += 1
    return int(graph.max()) + 1


def of_kept_over_a_break(model: Pooled, graph: Tensor) -> int:
    before = model.steps.item()
    model.steps += 1
    torch._dynamo.graph_break()
    model.kept = before
    return int(graph.max()) + 1 + before


def of_many(model: Pooled, graph: Tensor) -> int:
    return sum(graph[at].item() for at in range(4)) + 12


def of_steps_before(model: Pooled, graph: Tensor) -> int:
    before = model.steps.item()
    model.steps += 1
    return int(graph.max()) + 1 + before


READ = {
    "maximum": lambda model, graph: int(graph.max()) + 1,
    "function": lambda model, graph: torch.max(graph).item() + 1,
    "last": lambda model, graph: graph[-1].item() + 1,
    "one more": lambda model, graph: int((graph.max() + 1).item()),
    "sum": lambda model, graph: graph.sum().item() + 1,
    "branch": lambda model, graph: 20 if graph.max().item() > 8 else 15,
    "empty": of_empty,
    "before": of_steps_before,
    "kept": of_kept,
}
CHANGED = {
    "written": of_writes,
    "written elsewhere": of_writes_to_the_same,
    "counted": of_counted_steps,
    "clamped": of_clamped,
    "data": of_data,
    "several": of_several,
    "too large": of_small_numbers,
    "over a break": of_kept_over_a_break,
    "many": of_many,
}
FAST = "last", "one more", "kept", "written", "clamped"


def batches(*, with_none: bool) -> list[tuple[Tensor, ...]]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for at, graphs in enumerate(SIZES):
        graph = torch.arange(graphs).repeat_interleave(3)
        if with_none and at == len(SIZES) - 2:
            graph = graph[:0]
        found.append((torch.randn(len(graph), 8, generator=draw), graph))
    return found


def breaks_of(count: Callable[[Pooled, Tensor], int], *, with_none: bool = False) -> int:
    """Train over sizes that change, compare every bit; give how often Dynamo broke a graph."""
    torch.manual_seed(0)
    model = Pooled(count)
    planned = remat.rematerialize(copy.deepcopy(model), budget="1GiB", limit_seconds=0.1)
    before = sum(counters["graph_break"].values())
    for x, graph in batches(with_none=with_none):
        found = []
        for each in (planned, model):
            each.zero_grad()
            own = graph.clone()
            loss = each(x, own, own.view(-1))
            loss.backward()
            slopes = [parameter.grad for parameter in each.parameters()]
            found.append([loss.detach(), own, each.steps.clone(), *slopes])
        assert all(map(torch.equal, *found))
        assert model.kept == planned.kept
    return sum(counters["graph_break"].values()) - before


def in_part(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=() if n in FAST else pytest.mark.sweep) for n in names]


@pytest.mark.parametrize("name", in_part(READ))
def test_a_number_that_is_read_out_of_an_input_breaks_no_graph(name):
    assert breaks_of(READ[name], with_none=name == "empty") == 0


@pytest.mark.parametrize("name", in_part(CHANGED))
def test_one_that_may_have_changed_before_is_read_where_it_is(name):
    assert breaks_of(CHANGED[name])
