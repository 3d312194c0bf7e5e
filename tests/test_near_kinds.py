"""Regions of ever new sizes, in steps of several: weighed by what is known of near sizes."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.session import near_kinds, region
from remat.session.near_kinds import NearKind
from remat_exec import measure_peak
from remat_graph.torch import Program, SizedCapture, SizedRegion
from remat_solvers.step import measure_option


class Layers(nn.Module):
    """Two regions; a dropout draws in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Sigmoid())
        self.second = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.first(x)
        torch._dynamo.graph_break()
        return self.second(states).square().mean()


def step(model: nn.Module, rows: int) -> list[torch.Tensor | None]:
    torch.manual_seed(rows)
    model.zero_grad()
    model(torch.randn(rows, 8)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, nn.Module, list[int]]:
    """A model that knows three sizes of its regions, eager's, and how many graphs were made."""
    graphs: list[int] = []
    make = Program.graph

    def counted(program: Program, *args: Any) -> Any:
        graphs.append(len(program.order))
        return make(program, *args)

    monkeypatch.setattr(Program, "graph", counted)
    eager = Layers()
    run = remat.rematerialize(copy.deepcopy(eager), budget=0.7, limit_seconds=0.1)
    for rows in (80, 100, 90, 70, 84, 96, 76, 88, 92, 81, 99, 73, 85, 71, 97):
        assert all(map(torch.equal, step(run, rows), step(eager, rows))), rows
    return run, eager, graphs


def near_kinds_there() -> list[NearKind]:
    gc.collect()
    return [item for item in gc.get_objects() if isinstance(item, NearKind)]


def test_no_graph_is_made_for_a_size_that_is_near(
    trained: tuple[nn.Module, nn.Module, list[int]],
) -> None:
    run, eager, graphs = trained
    known = run.plan.budget_bytes
    graphs.clear()
    for rows in (82, 98, 74, 86, 72, 95):
        with measure_peak() as peak:
            found = step(run, rows)
        assert all(map(torch.equal, found, step(eager, rows))), rows
        assert peak.peak_bytes <= max(known, run.plan.budget_bytes)
    assert not graphs


@pytest.fixture(params=["read off", "through all passes"])
def _by_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "through all passes":
        monkeypatch.setattr(SizedRegion, "program_of_sizes", lambda *_: None)


@pytest.mark.usefixtures("_by_way", "trained")
def test_what_is_weighed_is_what_the_simulator_says() -> None:
    kinds = near_kinds_there()
    assert len(kinds) >= 6
    for kind in kinds:
        graph = kind.front.graph
        for option in (*kind.options, kind.everything):
            measured = measure_option(graph, option.schedule)
            for name in ("kept_bytes", "forward_bytes", "backward_bytes"):
                assert getattr(option, name) == getattr(measured, name)
            assert option.time == pytest.approx(measured.time)
        assert kind.incoming_bytes == near_kinds.RegionKind.incoming_bytes.fget(kind)


def test_of_sizes_without_end_few_kinds_are_kept(
    monkeypatch: pytest.MonkeyPatch, trained: tuple[nn.Module, nn.Module, list[int]]
) -> None:
    run, eager, _ = trained
    monkeypatch.setattr(region, "_MOST_NUMBERS", 4)
    for kinds in [item for item in gc.get_objects() if isinstance(item, near_kinds.Kinds)]:
        monkeypatch.setattr(kinds, "_last", type(kinds._last)(kinds._last, maxlen=4))
    draw = random.Random(0)
    for rows in (draw.randint(64, 120) for _ in range(40)):
        assert all(map(torch.equal, step(run, rows), step(eager, rows))), rows
    assert len(near_kinds_there()) <= 48


def test_a_size_that_comes_again_runs_as_before(
    monkeypatch: pytest.MonkeyPatch, trained: tuple[nn.Module, nn.Module, list[int]]
) -> None:
    """Also where another size that was measured since is nearer: its program may be another."""
    run, eager, _ = trained
    before = {kind.number: kind.near.capture for kind in near_kinds_there()}
    for item in [item for item in gc.get_objects() if isinstance(item, region.Region)]:
        item.shared.clear()
    asked: list[Any] = []
    costed = SizedCapture.costed_like

    def noted(capture: SizedCapture, other: SizedCapture) -> SizedCapture:
        asked.append(other)
        return costed(capture, other)

    monkeypatch.setattr(SizedCapture, "costed_like", noted)
    monkeypatch.setattr(SizedCapture, "nearest", lambda _, others: others[0])
    for rows in (96, 76, 88, 92, 81, 99, 73, 85, 71, 97):
        assert all(map(torch.equal, step(run, rows), step(eager, rows))), rows
    assert {kind.number for kind in near_kinds_there()} == before.keys()
    assert {id(other) for other in asked} == {id(other) for other in before.values()}
