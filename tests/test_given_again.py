"""Plans of groups that give out again, in the backward, what products read of the forward."""

import copy
import functools

import pytest
import torch
from torch import nn

import remat
from remat_exec import measure_peak
from remat_graph.torch.capturing.ways import Ways

WIDTH = 32


pytestmark = pytest.mark.usefixtures("kernels_compiled_here")


class Perceptrons(nn.Module):
    """Residual layers with a gate whose activation is written out."""

    def __init__(self, depth=3):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(depth))
        self.gate = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x):
        for up, gate, down in zip(self.up, self.gate, self.down, strict=True):
            a = gate(x)
            x = x + down(0.5 * a * (1 + torch.tanh(0.8 * (a + 0.04 * a**3))) * up(x))
        return x.square().mean()


def planned(model, x, budget, **options):
    return remat.rematerialize(
        model, x, budget=budget, kernels="inductor", wait=True, costs="estimate",
        limit_seconds=0.1, **options,
    )  # fmt: skip


def assert_eagers(ours, plain, x):
    for model in (ours, plain):
        model.zero_grad()
        model(x).backward()
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-14)


def sized(rows):
    return torch.randn(rows, WIDTH, dtype=torch.double)


@pytest.fixture(scope="module")
def tight():
    """A model whose groups give again, the one that it came from, and the budget."""
    torch.manual_seed(0)
    plain = Perceptrons().double()
    everything = planned(copy.deepcopy(plain), sized(64), "1GiB").plan
    assert not everything.kinds[0].gives_again
    budget = int(0.8 * everything.measured_peak_bytes)
    return planned(copy.deepcopy(plain), sized(64), budget), plain, budget


@pytest.mark.sweep
def test_less_is_stored_at_hardly_any_cost(tight, tmp_path, monkeypatch):
    ours, plain, budget = tight
    x = sized(64)
    assert ours.plan.kinds[0].gives_again
    for _ in range(3):
        assert_eagers(ours, plain, x)
    ours.zero_grad()
    with measure_peak() as peak:
        ours(x).backward()
    assert peak.peak_bytes <= budget

    path = tmp_path / "plan.json"
    ours.plan.save(path)
    assert remat.Plan.load(path).kinds[0].gives_again
    again = planned(copy.deepcopy(plain), x, budget, plan=path)
    assert again.plan.schedule == ours.plan.schedule
    assert_eagers(again, plain, x)

    monkeypatch.setattr("remat.planning.slices.Capture.giving_again", lambda self: self)
    before = planned(copy.deepcopy(plain), x, budget).plan
    assert ours.plan.predicted_overhead < before.predicted_overhead


@pytest.mark.sweep
def test_other_sizes_take_the_groups_of_known_plans(tight):
    ours, plain, _ = tight
    for rows in (60, 40, 64):
        assert_eagers(ours, plain, sized(rows))


class Apart(nn.Module):
    """The gradient of what a product reads comes from another output than that of its weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a = self.up(x)
        hidden = 0.5 * a * (1 + torch.tanh(0.8 * (a + 0.04 * a**3)))
        return self.down(hidden.detach()), hidden * 2


@pytest.mark.sweep
def test_what_is_given_again_is_there_though_no_gradient_comes_to_its_group(monkeypatch):
    monkeypatch.setattr(
        "remat.planning.slices.Capture.in_groups",
        functools.partialmethod(Ways.in_groups, give_again=True),
    )
    torch.manual_seed(0)
    plain, x = Apart().double(), torch.randn(64, WIDTH, dtype=torch.double)
    ours = planned(copy.deepcopy(plain), x, "1GiB")
    assert ours.plan.kinds[0].gives_again
    assert any(value.name.endswith("__again") for value in ours.plan.graph.values)
    for pick in ((0, 1), (0,), (1,), (0,)):
        for model in (ours, plain):
            model.zero_grad()
            outputs = model(x)
            sum(outputs[at].square().sum() for at in pick).backward()
        for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if two.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-14)


class Joined(nn.Module):
    """A group of the backward joins the gradients of two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return hidden * hidden, self.norm(hidden)


def test_what_no_gradient_comes_to_gets_none_within_a_group():
    torch.manual_seed(0)
    plain, x = Joined().double(), torch.randn(8, WIDTH, dtype=torch.double)
    ours = planned(copy.deepcopy(plain), x, "1MiB")
    for pick in (0, 1, 0):
        for model in (ours, plain):
            model.zero_grad()
            model(x)[pick].sum().backward()
        for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if two.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-14)
