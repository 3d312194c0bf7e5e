"""Sizes that change from call to call: one trace for all, held against eager and other traces."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from integration_cases.sized import (
    MODELS,
    GraphNet,
    Recurrent,
    gradients,
    graph,
    graphs_of,
    model_of,
    sequence,
)
from integration_cases.sweeps import swept
from torch import nn

import remat
from remat_graph.torch import OtherSizes, capture_region, trace_sizes
from remat_graph.torch.capturing import sized_trace


@pytest.mark.parametrize("name", swept(MODELS, ["graph"]))
def test_one_trace_serves_all_sizes(name: str, traces: list[str]) -> None:
    make, inputs, lengths = MODELS[name]
    torch.manual_seed(0)
    model = make()
    run = remat.rematerialize(model, budget=2**22 if name == "images" else 0.9)
    for length in lengths:
        expected = gradients(model, model_of(model), inputs(length))
        assert all(map(torch.equal, gradients(model, run, inputs(length)), expected)), length
    assert traces == ["as it comes", "as it comes", "with symbols"]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["attention", "graph", "images"])
def test_an_evaluated_graph_is_that_of_a_trace_of_its_own(name: str) -> None:
    make, inputs, lengths = MODELS[name]
    torch.manual_seed(0)
    found = graphs_of(make(), *map(inputs, lengths))
    module, calls = found[1]
    assert len(found) == 2
    assert len(calls) == len(lengths) - 1 - lengths[1:].count(lengths[0])
    sized = trace_sizes(module, calls[0])
    first = sized.capture(calls[0], costs="estimate")
    for call in calls:
        capture = sized.capture(call, costs="estimate")
        evaluated = capture.program
        sizes_of_call = sized.sizes_of(call)
        read_off = None if sizes_of_call is None else first.at(sizes_of_call)
        assert read_off is not None
        sizes = [value.size_bytes for value in capture.graph.values]
        assert read_off.sizes_of(first.graph) == sizes
        assert [read_off.size_of(value.name) for value in first.graph.values] == sizes
        assert read_off.outline is first.graph  # its own is made when it is read
        assert read_off.program == evaluated
        assert read_off.program.equivalence == evaluated.equivalence
        assert read_off.graph.values == capture.graph.values
        traced = capture_region(module, call, costs="estimate").program
        assert evaluated.calls == traced.calls
        assert evaluated.views == traced.views
        assert evaluated.facts == traced.facts
        assert evaluated.equivalence == traced.equivalence
        assert evaluated.outputs == traced.outputs


def test_sizes_for_which_a_trace_does_not_hold_are_traced_again(traces: list[str]) -> None:
    class Choosing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return (y.view(x.shape[0] // 2, 2, 4) if x.shape[0] % 2 == 0 else y).square().mean()

    model = Choosing(4, 4)
    run = remat.rematerialize(model, budget=2**20)
    for rows in (6, 8, 10, 12, 7, 9, 14, 11, 16):
        x = (torch.randn(rows, 4),)
        expected = gradients(model, model_of(model), x)
        assert all(map(torch.equal, gradients(model, run, x), expected))
    assert traces.count("with symbols") == 2


@pytest.mark.sweep
def test_a_loop_over_time_is_traced_for_each_length(traces: list[str]) -> None:
    model = Recurrent()
    run = remat.rematerialize(model, budget=2**22)
    for length in (3, 5, 4, 7):
        expected = gradients(model, model_of(model), sequence(length))
        found = gradients(model, run, sequence(length))
        assert all(map(torch.allclose, found, expected))
    assert traces == ["as it comes"] * 4


def test_what_torch_cannot_trace_with_symbols_is_traced_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> object:
        raise RuntimeError("no symbols today")

    monkeypatch.setattr(sized_trace, "trace_region", fails)
    model = GraphNet()
    run = remat.rematerialize(model, budget=0.9)
    with caplog.at_level(logging.WARNING, "remat"):
        for nodes in (30, 41, 25, 60):
            expected = gradients(model, model_of(model), graph(nodes))
            assert all(map(torch.equal, gradients(model, run, graph(nodes)), expected))
    (told,) = [r.getMessage() for r in caplog.records if "each new size" in r.getMessage()]
    assert "no symbols today" in told


def test_a_size_outside_the_range_of_its_symbol_is_refused() -> None:
    found: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(module)
        return module

    torch._dynamo.reset()
    layer = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: layer(x).square().mean(), backend=backend)
    compiled(torch.randn(5, 4))
    compiled(torch.randn(7, 4))
    values = {"x": torch.randn(7, 4), "weight": layer.weight, "bias": layer.bias}

    def call(rows: int) -> list[object]:
        inputs: list[object] = []
        for node in found[1].graph.find_nodes(op="placeholder"):
            example = node.meta["example_value"]
            if isinstance(example, torch.SymInt):
                inputs.append(rows)
            elif isinstance(example.shape[0], torch.SymInt):
                inputs.append(torch.randn(rows, 4))
            else:
                inputs.append(values["weight" if example.dim() == 2 else "bias"])
        return inputs

    sized = trace_sizes(found[1], call(7))
    assert sized.capture(call(9), costs="estimate").program.calls
    with pytest.raises(OtherSizes):
        sized.capture(call(1), costs="estimate")
    mixed = call(9)
    mixed[[isinstance(item, int) for item in mixed].index(True)] = 8
    with pytest.raises(OtherSizes):
        sized.capture(mixed, costs="estimate")
