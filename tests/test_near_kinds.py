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
from remat.session.near_kinds import NearKind, OtherSizes
from remat_exec import Executable, measure_peak
from remat_graph import Compute, Free, Schedule
from remat_graph.torch import Program, SizedCapture, SizedRegion, trace_sizes
from remat_solvers import store_all
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


ROWS = (80, 100, 90, 70, 84, 96, 76, 88, 92, 81, 99, 73, 85, 71, 97)


@pytest.fixture
def trained(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[nn.Module, nn.Module, list[int]]:
    """A model that knows three sizes of its regions, eager's, and how many graphs were made."""
    graphs: list[int] = []
    make = Program.graph

    def counted(program: Program, *args: Any) -> Any:
        graphs.append(len(program.order))
        return make(program, *args)

    monkeypatch.setattr(Program, "graph", counted)
    eager = Layers()
    run = remat.rematerialize(copy.deepcopy(eager), budget=0.7, limit_seconds=0.1)
    for rows in getattr(request, "param", ROWS):
        assert all(map(torch.equal, step(run, rows), step(eager, rows))), rows
    return run, eager, graphs


def near_kinds_there() -> list[NearKind]:
    gc.collect()
    return [item for item in gc.get_objects() if isinstance(item, NearKind)]


def code_there() -> int:
    """Count the schedules of which there is code for any size."""
    return sum(len(item.runnables) for item in gc.get_objects() if isinstance(item, OtherSizes))


@pytest.mark.sweep
def test_a_graph_is_made_for_a_schedule_that_is_new_and_for_no_size_that_is_near(
    trained: tuple[nn.Module, nn.Module, list[int]],
) -> None:
    run, eager, graphs = trained
    known, code = run.plan.budget_bytes, code_there()
    graphs.clear()
    for rows in (82, 98, 74, 86, 72, 95):
        with measure_peak() as peak:
            found = step(run, rows)
        assert all(map(torch.equal, found, step(eager, rows))), rows
        assert peak.peak_bytes <= max(known, run.plan.budget_bytes)
    assert len(graphs) == code_there() - code <= 2


@pytest.fixture(params=["read off", pytest.param("through all passes", marks=pytest.mark.sweep)])
def _by_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "through all passes":
        monkeypatch.setattr(SizedRegion, "program_of_sizes", lambda *_: None)


@pytest.mark.usefixtures("_by_way", "trained")
@pytest.mark.parametrize("trained", [ROWS[:9]], indirect=True, ids=["nine sizes"])
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


class Gated(nn.Module):
    """Two values that its backward reads, each of which can be kept without the other."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.state(x)) * torch.sigmoid(self.gate(x))


def test_of_other_sizes_a_call_goes_on_only_as_what_it_keeps_enough_for() -> None:
    """Which of the options keeps the least may be another one for each size."""
    found: list[tuple[torch.fx.GraphModule, list[tuple[Any, ...]]]] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Any:
        found.append((module, []))
        return lambda *inputs: (found[-1][1].append(inputs), module(*inputs))[1]

    torch._dynamo.reset()
    gated = Gated()
    compiled = torch.compile(gated, backend=backend)
    for rows in (5, 7, 9, 11):
        compiled(torch.randn(rows, 8))
    module, calls = found[-1]
    trace = trace_sizes(module, calls[0])
    first = trace.capture(calls[0], costs="estimate")
    small, large = (first.at(trace.sizes_of(call)) for call in calls[1:])
    everything = store_all(small.graph).steps
    at = everything.index(Compute("loss"))

    def without(*values: str) -> Schedule:
        made_of = {"tanh": "addmm", "sigmoid": "addmm_1"}
        steps = [*everything[:at], *map(Free, values), everything[at]]
        for value in values:
            steps += [Compute(made_of[value]), Compute(value), Free(made_of[value])]
        return Schedule((*steps, *everything[at + 1 :]))

    lean = Executable(small, without("tanh", "sigmoid"))
    run = Executable(small, without("sigmoid"), low_memory_plan=lean)
    assert run.low_memory_plan is lean
    tensors = [item for item in calls[-1] if isinstance(item, torch.Tensor)]
    for others in (("tanh", "sigmoid"), ("tanh",)):
        lean = Executable(large, without(*others))
        other = run.at(large, 0, low_memory_plan=lean)
        drops: list[Any] = []
        (output,) = other(module, tensors, droppable=drops.append)
        drops[0]()
        gated.zero_grad()
        output.sum().backward()
        gradients = [parameter.grad for parameter in gated.parameters()]
        gated.zero_grad()
        module(*calls[-1])[0].sum().backward()
        expected = [parameter.grad for parameter in gated.parameters()]
        assert all(map(torch.equal, gradients, expected)), others
