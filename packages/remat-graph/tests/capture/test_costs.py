"""What ops cost: measured, or estimated for a device by its rates."""

import inspect

import pytest
import torch
from graph_cases.captured import Block, batch, captured
from torch import nn

from remat_graph.torch import DEVICES, CaptureError, DeviceSpec, capture
from remat_graph.torch.cost import devices


@pytest.mark.parametrize("costs", ["measure", "estimate"])
def test_costs_are_there_for_every_op_and_not_negative(costs):
    module = nn.Sequential(Block(), nn.Dropout(), nn.BatchNorm1d(8))
    graph = capture(module, (torch.rand(5, 8),), costs=costs).graph
    assert graph.time > 0
    for op in graph.ops:
        assert op.time >= 0
        assert op.workspace_bytes >= 0
        if op.name not in ("loss",) and not op.name.startswith("write_"):
            assert op.time > 0


def test_equivalent_ops_cost_the_same(blocks):
    costs = {}
    for op in blocks.graph.ops:
        if op.equivalence is not None:
            costs.setdefault(op.equivalence, set()).add((op.time, op.workspace_bytes))
    assert all(len(found) == 1 for found in costs.values())


def test_a_faster_device_is_estimated_to_take_less_time():
    def time_on(factor):
        spec = DeviceSpec("x", factor * 1e9, factor * 2e9, factor * 1e9, 1e-6 / factor)
        return captured(lambda m, x: torch.tanh(m.layer(x)), batch(), costs=spec).graph.time

    assert time_on(10) < time_on(1) < time_on(0.1)


@pytest.mark.parametrize(
    ("name", "flops", "half_flops"),
    [
        ("h100", 0.776 * 132 * 128 * 2 * 1.98e9, 0.776 * 132 * 4096 * 1.83e9),
        ("a100", 108 * 64 * 2 * 1.41e9, 108 * 2048 * 1.41e9),
        ("l4", 7424 * 2 * 2.04e9, 4 * 7424 * 2 * 2.04e9),
        ("4090", 16384 * 2 * 2.52e9, 2 * 16384 * 2 * 2.52e9),
        ("mi300x", 304 * 256 * 2.1e9, 304 * 2048 * 2.1e9),
    ],
)
def test_the_rates_of_a_device_are_those_of_its_units_and_clock(name, flops, half_flops):
    spec = DEVICES[name]
    assert (spec.flops_per_second, spec.half_flops_per_second) == (
        pytest.approx(flops, rel=0.003),
        pytest.approx(half_flops, rel=0.003),
    )


def test_every_device_names_its_source():
    before, *rest = inspect.getsource(devices).partition("MappingProxyType(\n")[2].split("_spec(")
    told = [before, *rest[:-1]]
    assert len(told) == len(DEVICES)
    assert all("# https://" in text for text in told)


def test_halves_are_faster_where_the_device_is():
    def time_of(dtype):
        spec = DeviceSpec("x", 1.0, 100.0, 1e12, 0.0)
        layer = nn.Linear(4, 4).to(dtype)
        return captured(
            lambda m, x: m.layer(x), batch().to(dtype), layer=layer, costs=spec
        ).graph.time

    assert time_of(torch.bfloat16) == pytest.approx(time_of(torch.float32) / 100, rel=1e-3)


def test_attention_is_as_fast_as_its_multiplications():
    def attend(module, x):
        return nn.functional.scaled_dot_product_attention(module.layer(x), x, x)

    spec = DeviceSpec("multiplies", 1.0, 1.0, bytes_per_second=1e30, launch_seconds=0.0)
    x = torch.rand(2, 4, 32, 16)
    graph = captured(attend, x, layer=nn.Linear(16, 16), costs=spec).graph
    times = [op.time for op in graph.ops if "attention" in op.name]
    product = 2 * 2 * 4 * 32 * 32 * 16
    assert times == [2 * product, 5 * product]


@pytest.mark.parametrize("rate", ["flops_per_second", "bytes_per_second"])
def test_a_device_without_speed_is_refused(rate):
    rates = dict.fromkeys(("flops_per_second", "half_flops_per_second", "bytes_per_second"), 1.0)
    with pytest.raises(CaptureError, match=f"{rate}=0"):
        DeviceSpec("x", **(rates | {rate: 0}), launch_seconds=0.0)


def test_estimating_takes_a_model_on_the_meta_device():
    with torch.device("meta"):
        module, x = nn.Sequential(Block(1024), nn.Linear(1024, 10)), torch.rand(64, 1024)
    graph = capture(module, (x,), costs="estimate").graph
    real = capture(
        nn.Sequential(Block(8), nn.Linear(8, 10)), (torch.rand(64, 8),), costs="estimate"
    )
    assert [op.name for op in graph.ops] == [op.name for op in real.graph.ops]
    assert max(value.size_bytes for value in graph.values) == 4 * 1024 * 1024
