"""A region that writes in place to what an earlier one made has eager's gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat
from remat_exec import measure_peak

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Writing(nn.Module):
    """Runs blocks after what `write` makes of the first ones."""

    def __init__(self, write):
        super().__init__()
        self.write, self.enter = write, nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        h = self.write(self, self.enter(x))
        for block in self.blocks[3:]:
            h = block(h)
        return h.square().mean()


def new_region():
    torch._dynamo.graph_break()


def rows_put_back(m, h):
    chosen = h.detach()[..., 0] > 0
    h[chosen] = m.blocks[0](h[chosen])
    return h


def residual(m, h):
    before = h
    h = m.blocks[0](h)
    new_region()
    h += before
    return m.blocks[1](h)


def scaled_twice(m, h):
    new_region()
    h *= 2
    h = m.blocks[0](h)
    new_region()
    h.add_(1)
    return h


def activated(m, h):
    h = m.blocks[0](h)
    new_region()
    return m.blocks[1](functional.relu(h, inplace=True))


def into_zeros(m, h):
    out = torch.zeros_like(h)
    h = m.blocks[0](h)
    new_region()
    out[:, :3] = m.blocks[1](h)[:, :3]
    h = m.blocks[2](h)
    new_region()
    return out + h


def without_gradients(m, h):
    new_region()
    with torch.no_grad():
        h.mul_(2)
    return m.blocks[0](h)


@torch.compiler.disable
def squared(part):
    return part.square()


def parts_in_one_memory(m, h):
    first, second = m.blocks[0](h).split([24, 8], -1)
    new_region()
    kept = squared(first)  # of which autograd sees a write to the memory of both
    h = m.blocks[1](torch.cat([second * 2] * 4, -1))
    new_region()
    return h + torch.cat([kept, second], -1)


PLANNED = [
    rows_put_back,
    residual,
    scaled_twice,
    activated,
    into_zeros,
    without_gradients,
    parts_in_one_memory,
]


def into_a_view(m, h):
    out = torch.zeros_like(h)
    part, h = out[:, :4], m.blocks[0](h)
    new_region()
    part[:, :3] = m.blocks[1](h)[:, :3]
    h = m.blocks[2](h)
    new_region()
    return h + out


def into_what_it_has_a_view_of(m, h):
    out = torch.zeros_like(h)
    part, h = out[:, :4], m.blocks[0](h)
    new_region()
    part[:, :3] = m.blocks[1](h)[:, :3]
    h = m.blocks[2](h) + out
    new_region()
    return h * 2


def a_view_returned(m, h):
    out, h = torch.zeros_like(h), m.blocks[0](h)
    new_region()
    out[:, :3] = m.blocks[1](h)[:, :3]
    flat, h = out.view(-1, WIDTH), m.blocks[2](h)
    new_region()
    return h + flat.view(h.shape) + out


def what_the_module_holds(m, h):
    m.mean.detach_()
    new_region()
    m.mean.mul_(0.5).add_(m.blocks[0](h).mean((0, 1)))
    h = m.blocks[1](h)
    new_region()
    return h + m.mean


def what_the_module_holds_and_nobody_reads(m, h):
    h = m.blocks[0](h)
    m.mean.mul_(0.5).add_(h.detach().mean((0, 1)))
    return h


RIGHT = [
    into_a_view,
    into_what_it_has_a_view_of,
    a_view_returned,
    what_the_module_holds,
    what_the_module_holds_and_nobody_reads,
]


def step(model, x):
    model.zero_grad()
    with measure_peak() as peak:
        model(x).backward()
    return peak.peak_bytes


def trained(write, share, **options):
    """Train beside eager; give the peaks of both, in bytes."""
    torch.manual_seed(0)
    plain = Writing(write)
    original, x = copy.deepcopy(plain), torch.randn(4, 20, 8)
    budget = int(share * step(copy.deepcopy(plain), x))
    options |= {"limit_seconds": 0.1, "costs": "estimate"}
    model = remat.rematerialize(original, budget=budget, **options)
    peaks = []
    for _ in range(5):
        step(plain, x)
        peaks.append(step(model, x))
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-5, atol=1e-7)
        assert torch.equal(original.mean, plain.mean)
    return peaks, budget


def mostly_swept(cases, *fast):
    marks = {case: () if case in fast else pytest.mark.sweep for case in cases}
    return [pytest.param(case, marks=mark) for case, mark in marks.items()]


@pytest.mark.parametrize("write", mostly_swept(PLANNED, into_zeros, parts_in_one_memory))
def test_it_is_planned(write):
    peaks, budget = trained(write, 0.7)
    assert max(peaks[3:]) <= budget


@pytest.mark.parametrize("write", mostly_swept(RIGHT, into_a_view, what_the_module_holds))
def test_it_is_right_where_it_runs_as_it_is(write):
    trained(write, 1.5)
