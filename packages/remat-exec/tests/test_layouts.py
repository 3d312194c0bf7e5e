"""Ops in channels_last compute the same up to rounding, in the memory that was predicted."""

import copy
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from exec_cases.models import BRANCHES, Case
from exec_cases.schedules import halved_schedule, random_schedule
from exec_cases.training import assert_bitwise_equal, assert_close, assert_same_gradients_by, train
from torch import nn

from remat_exec import Executable
from remat_graph import Compute, Numerics
from remat_graph.torch import capture
from remat_graph.torch.capturing import ways
from remat_graph.torch.ways.layouts import choose_layouts
from remat_solvers import store_all

SLACK_BYTES = 256


class Net(nn.Module):
    """Down and up again, with a norm, a pooling, a skip that is concatenated, and a 1x1 head."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.SiLU())
        self.rise = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.up = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.leave = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.entry(x)
        y = torch.cat([x, self.rise(self.down(x))], dim=1)
        return self.leave(self.up(y) + x).flatten(1)


def favouring(share, copied):
    """Times of ops: a second each, in channels_last a share of it; of copies between, `copied`."""

    def times_of(program):
        laid = {op: "channels_last" in str(call) for op, call in program.calls.items()}
        return {
            op: copied if op.endswith("__copy") else share if laid[op] else 1.0
            for op in program.calls
        }

    return times_of


def laid_out(model, args, times_of, numerics=Numerics.ROUNDING):
    choose = lambda program, _: choose_layouts(program, times_of)  # noqa: E731
    with mock.patch.object(ways, "choose_layouts", choose):
        return capture(model, args).with_alternatives(numerics)


NET = Case("net", Net, lambda: (torch.randn(4, 3, 12, 16),), lambda output: output.square().mean())


def test_everything_in_channels_last_trains_the_same_in_the_memory_that_was_predicted():
    expected = train(NET.model(), lambda module, _: module(*NET.args()), NET.loss, 2)
    captured = laid_out(NET.model(), NET.args(), favouring(0.1, 0.01))
    made = [name for call in captured.program.calls.values() for name in call.results]
    assert sum(name is not None and name.endswith("__channels_last") for name in made) > 20
    assert any(name.endswith("__channels_last") for name in captured.program.views)
    copies = [op for op in captured.graph.ops if op.name.endswith("__copy")]
    assert copies
    assert all(op.provenance is not None for op in copies)
    schedule = store_all(captured.graph.without_alternatives())
    case = replace(NET, numerics=Numerics.ROUNDING)
    case.__dict__["captured"] = captured
    assert_close(train(*_runnable(case, schedule)), expected, rtol=1e-3)
    for seed in range(4):
        any_schedule = random_schedule(captured.graph, random.Random(seed))
        assert_close(train(*_runnable(case, any_schedule)), expected, rtol=1e-3)
        executable = Executable(captured, any_schedule)
        measured = executable.rehearse(case.model(), list(case.args())).peak_bytes
        assert measured <= executable.peak_bytes + SLACK_BYTES


def _runnable(case, schedule):
    return case.remat(schedule), lambda module, _: module(*case.args()), case.loss, 2


def test_a_stretch_is_laid_out_where_no_op_alone_would_gain():
    convolutions = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)]
    model, args = nn.Sequential(*convolutions), (torch.randn(2, 4, 8, 8),)
    single = nn.Sequential(convolutions[0])
    times = favouring(0.8, 0.15)
    names = [set(laid_out(m, args, times).program.facts) for m in (model, single)]
    laid = [sum(name.endswith("__channels_last") for name in each) for each in names]
    assert laid[0] > 10
    assert laid[1] == 0
    none = laid_out(model, args, favouring(1.1, 0.15)).program
    assert not any(name.endswith("__channels_last") for name in none.facts)


@pytest.mark.parametrize("planned", [(), (0,), (1,)], ids=str)
def test_a_backward_over_other_outputs_than_planned_for_in_layouts(planned):
    whole = laid_out(BRANCHES.model(), BRANCHES.args(), favouring(0.1, 0.01))
    captured = whole.variant(frozenset(planned))
    assert any(op.endswith("__copy") for op in captured.program.calls)
    for seed, used in enumerate(("left", "right", "both")):
        schedule = random_schedule(captured.graph, random.Random(seed))
        assert_same_gradients_by(captured, BRANCHES, schedule, used)


def _beside_copies_in_16_bits(case):
    """Train by storing everything in channels_last, and with all copies in 16 bits that can be."""
    captured = laid_out(case.model(), case.args(), favouring(0.1, 0.01), Numerics.LOSSY)
    case = replace(case, numerics=Numerics.LOSSY)
    case.__dict__["captured"] = captured
    halved = halved_schedule(captured.graph)
    unpacked = [s.op for s in halved if isinstance(s, Compute) and s.op.endswith("__single")]
    assert any(op.endswith("__channels_last__single") for op in unpacked)
    schedules = (store_all(captured.graph.without_alternatives()), halved)
    return [train(case.remat(s), lambda m, _: m(*case.args()), case.loss, 1) for s in schedules]


def test_16_bit_copies_in_channels_last_are_read():
    plain, halved = _beside_copies_in_16_bits(NET)
    for name, tensor in plain.tensors.items():
        if name.startswith("gradient") and tensor.ndim == 4:
            assert 0 < (halved.tensors[name] - tensor).norm() < 0.02 * tensor.norm(), name
        elif name.startswith(("output", "loss", "buffer")):
            assert torch.equal(tensor, halved.tensors[name]), name


def test_16_bit_copies_of_what_is_read_for_its_signs_change_no_bit():
    convolution = nn.Conv2d(3, 8, 3, padding=1)
    convolution.weight.requires_grad_(False)  # its gradient reads the images themselves
    model = nn.Sequential(convolution, nn.ReLU(), nn.AvgPool2d(2))
    args = NET.args()
    signs = Case("signs", lambda: copy.deepcopy(model), lambda: args, NET.loss)
    assert_bitwise_equal(*_beside_copies_in_16_bits(signs))


class Attending(nn.Module):
    """Attends to what batch norm makes of a transposed input, which lies as no trace says."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x):
        keys = self.norm(x.transpose(1, 2)).transpose(1, 2)
        query = self.layer(x)[:, None]
        return nn.functional.scaled_dot_product_attention(query, keys[:, None], query)


def test_attention_reads_rows_that_lie_otherwise_than_was_traced():
    case = Case("attending", Attending, lambda: (torch.randn(4, 6, 8),), lambda y: y.square().sum())
    found = []
    for model in (case.remat(), case.model()):
        output = model(*case.args())
        output.square().sum().backward()
        module = getattr(model, "module", model)
        found.append([output.detach(), *(parameter.grad for parameter in module.parameters())])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
