"""Batch norms in compiled groups: results, gradients and running statistics, run again or not."""

import copy
import itertools

import pytest
import torch
from integration_cases.kernels import compiled_here
from torch import nn

import remat
from remat_exec import Executable, measure_peak
from remat_graph import Compute, Numerics, simulate
from remat_graph.torch import capture
from remat_solvers import solve, store_all

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}
LAYOUTS = torch.contiguous_format, torch.channels_last
HOW = {}, {"track_running_stats": False}, {"momentum": 0.5, "eps": 1e-3}, {"affine": False}


def model_of(dtype, **how):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, **how), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, **how), nn.GELU(),
        nn.Conv2d(8, 4, 1), nn.Flatten(2), nn.BatchNorm1d(4, **how), nn.Sigmoid(),
    ).to(dtype)  # fmt: skip
    if dtype is torch.bfloat16:  # as under autocast
        for layer in layers:
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                layer.float()
    return layers


def step(run, model, x):
    for parameter in model.parameters():
        parameter.grad = None
    result = run(x)
    result.square().mean().backward()
    buffers = [buffer.clone().double() for buffer in model.buffers()]
    return [result.detach(), *(p.grad for p in model.parameters()), *buffers]


def assert_like(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        limit = tolerance * max(1e-3, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("dtype", "layout", "how"),
    [  # each way and layout in one precision, in turn; in the others in a sweep
        pytest.param(dtype, layout, how, marks=() if (number - at) % 3 == 0 else pytest.mark.sweep)
        for at, (how, layout) in enumerate(itertools.product(HOW, LAYOUTS))
        for number, dtype in enumerate(TOLERANCE)
    ],
    ids=str,
)
def test_steps_are_like_plain_ones(dtype, layout, how):
    if dtype is torch.bfloat16 and how.get("affine") is False:
        pytest.skip("torch keeps its statistics in 16 bits")
    model = model_of(dtype, **how)
    other = copy.deepcopy(model)
    x = torch.randn(4, 3, 12, 12).to(dtype).to(memory_format=layout)
    captured = capture(model, (x,), {}, costs="estimate")
    grouped = captured.with_alternatives(Numerics.ROUNDING).in_groups()
    calls = [call.name for call in grouped.program.calls.values()]
    has_statistics = how.get("track_running_stats", True)
    whole = 1 if layout is torch.channels_last else 0  # the last gives another layout than it reads
    assert calls.count("running_statistics") == (3 - whole if has_statistics else 0)
    assert sum("_legit" in name for name in calls) == (whole if has_statistics else 3)
    everything = store_all(grouped.graph)
    budget = simulate(grouped.graph, everything).peak_bytes * 3 // 4
    shorter = None if how else solve(grouped.graph, budget, limit_seconds=0.2)
    for schedule in (everything, *([shorter.schedule] if shorter else [])):
        executable = Executable(grouped, schedule)
        for _ in range(2):  # the second from other running statistics
            expected = step(other, other, x)
            found = step(lambda *x: executable(model, list(x))[0], model, x)  # noqa: B023
            assert_like(found, expected, TOLERANCE[dtype])


def test_statistics_in_16_bits_are_left_to_torch():
    model = model_of(torch.float32).bfloat16()
    x = torch.randn(4, 3, 12, 12, dtype=torch.bfloat16)
    able = capture(model, (x,), {}, costs="estimate").with_alternatives(Numerics.ROUNDING)
    calls = [call.name for call in able.in_groups().program.calls.values()]
    assert sum("_legit_functional" in name for name in calls) == 3


def test_what_is_in_no_group_is_one_op():
    model = model_of(torch.float32)
    captured = capture(model, (torch.randn(4, 3, 12, 12),), {}, costs="estimate")
    able = captured.with_alternatives(Numerics.ROUNDING)
    norms = [at for at, call in enumerate(captured.program.calls.values()) if "_legit" in call.name]
    calls = [call.name for call in able.in_groups(norms[:2]).program.calls.values()]
    assert sum("_legit_functional" in name for name in calls) == 2
    assert calls.count("running_statistics") == 1


@pytest.mark.sweep
def test_compiled_norms_run_again_within_a_budget():
    """Statistics of a batch are taken once, whatever is computed again."""
    model = model_of(torch.float64)[:6]
    other = copy.deepcopy(model)
    x = torch.randn(8, 3, 24, 24, dtype=torch.float64)

    def within(budget):
        return remat.rematerialize(
            model, (x,), budget=budget, loss=lambda y: y.square().mean(), numerics="rounding",
            kernels="inductor", wait=True, limit_seconds=0.3,
        )  # fmt: skip

    with compiled_here():
        try:
            planned = within(0.9)
        except remat.BudgetTooSmall as error:  # which groups are faster is measured
            planned = within(int(1.02 * error.smallest_bytes))
    for _ in range(3):
        expected = step(other, other, x)
        with measure_peak() as peak:
            found = step(planned, planned, x)
        assert_like(found, expected, 1e-12)
        assert peak.peak_bytes <= planned.plan.budget_bytes
    runs = [s.op for s in planned.plan.schedule if isinstance(s, Compute)]
    running = [op for op in runs if op.endswith("__running")]
    assert len(running) == len(set(running))
