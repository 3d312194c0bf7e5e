"""Gradients that a forward computes, in captures of whole modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remat_exec import Executable
from remat_graph import Compute, Schedule
from remat_graph.torch import CaptureError, capture


class Forces(nn.Module):
    """An energy of rows of which some are replaced by a mask, and its slope."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.enter, self.token = nn.Linear(3, 16), nn.Parameter(torch.randn(16))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(blocks))

    def forward(self, x):
        x = x.detach().requires_grad_()
        rows = self.enter(x).tanh().clone()
        rows[x.detach()[:, 0] > 0] = self.token * rows.mean(0)
        for block in self.blocks:
            rows = rows + block(rows).tanh()
        energy = rows.square().mean()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + slope.square().sum()


class Weighed(nn.Module):
    """A loss that is weighed by a gradient of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        loss = self.layer(x).square().mean()
        (slope,) = torch.autograd.grad(loss, self.layer.weight, retain_graph=True)
        return loss * slope.norm().detach()


@pytest.mark.parametrize("make", [Forces, lambda: Forces(blocks=12), Weighed])
def test_gradients_through_a_gradient_are_those_of_eager(make):
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(9, 3).double()
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    captured = capture(model, (x,))
    everything = Schedule(tuple(Compute(op.name) for op in captured.graph.ops))
    (loss,) = Executable(captured, everything)(model, [x])
    loss.backward()
    for mine, plain in zip((each.grad for each in model.parameters()), expected, strict=True):
        assert torch.equal(mine, plain)


def test_the_gradient_of_a_tensor_with_a_hook_is_refused():
    model, x = Weighed(), torch.randn(9, 3)
    model.layer.bias.register_hook(lambda slope: slope * 2)  # of which the forward asks nothing
    capture(model, (x,))
    model.layer.weight.register_hook(lambda slope: slope * 2)
    with pytest.raises(CaptureError, match=r"gradient of layer\.weight, which has a hook"):
        capture(model, (x,))
