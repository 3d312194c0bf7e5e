"""What a model returns may be changed in place by the loop, as where eager returned it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat


class Model(nn.Module):
    """Gives what is made of a linear layer of three dimensions, which torch makes by a view."""

    def __init__(self, last):
        super().__init__()
        self.last, self.broken = last, False
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        h = self.last(self.down(torch.tanh(self.up(x))), x)
        if self.broken:
            torch._dynamo.graph_break()
            h = functional.hardtanh(h, inplace=True) + self.down(self.up(x).tanh())
        return h


LAST = {
    "itself": lambda h, x: h,
    "scaled": lambda h, x: h * 2,
    "added": lambda h, x: h * 0.5 + x,
    "one of two": lambda h, x: (h - x).chunk(2, -1)[0] * 3,
    "normalised": lambda h, x: functional.layer_norm(h, (8,)) / 2,
}
CHANGES = {
    "scaled": lambda out: out.mul_(0.7),
    "masked": lambda out: out.masked_fill_(out > 0.5, 0.0),
    "a part": lambda out: out[..., -1].zero_(),
    "its data": lambda out: out.detach().clamp_(-1, 1),
}


def gradients(model, run, x, change):
    model.zero_grad()
    out = run(x)
    assert not out._is_view() or model.last is LAST["itself"]
    change(out)
    out.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("last", "change"),
    [  # each with one of the others; with all in a sweep
        pytest.param(
            last, change, marks=() if last == "added" or change == "a part" else pytest.mark.sweep
        )
        for last in LAST
        for change in CHANGES
    ],
)
def test_an_output_is_changed_in_place(last, change):
    torch.manual_seed(0)
    model, x = Model(LAST[last]), torch.randn(6, 5, 8)
    run = remat.rematerialize(model, (x,), budget=2**20, limit_seconds=0.1, costs="estimate")
    plain = Model(LAST[last])
    plain.load_state_dict(model.state_dict())
    expected = gradients(plain, plain, x, CHANGES[change])
    found = gradients(model, run, x, CHANGES[change])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("last", ["scaled", pytest.param("added", marks=pytest.mark.sweep)])
def test_what_a_region_returns_is_changed_in_place_in_the_next(last):
    torch.manual_seed(0)
    model, x = Model(LAST[last]), torch.randn(6, 5, 8)
    plain = Model(LAST[last])
    plain.load_state_dict(model.state_dict())
    model.broken = plain.broken = True
    run = remat.rematerialize(model, budget=2**20, limit_seconds=0.1, costs="estimate")
    for _ in range(3):
        expected = gradients(plain, plain, x, CHANGES["scaled"])
        found = gradients(model, run, x, CHANGES["scaled"])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
