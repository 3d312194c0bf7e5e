"""Where TorchDynamo fails, the forward runs as it is, and torch's log says nothing of it."""

import pytest
import torch
from torch import nn
from torch._dynamo import guards
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError

import remat
from remat.dynamo.reasons import failure


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.factor = 2

    def forward(self, x):
        return super().forward(x) * self.factor


def test_a_guard_that_cannot_be_made(monkeypatch, capfd):
    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(guards.GuardBuilder, "CONSTANT_MATCH", refuse)
    model, x = Scaled(), torch.ones(2, 4)
    made = remat.rematerialize(model, budget="1GiB")(x)
    assert torch.equal(made, model(x))
    assert "Error while creating guard" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AssertionError(), "TorchDynamo fails to make a graph of it (AssertionError)"),
        (AssertionError("no\nway"), "TorchDynamo fails to make a graph of it (AssertionError: no)"),
        (InternalTorchDynamoError("KeyError: 7\n\nfrom"),
         "TorchDynamo fails to make a graph of it (KeyError: 7)"),
        (TorchRuntimeError("sizes 2 and 3 do not fit"), "sizes 2 and 3 do not fit"),
    ],
)  # fmt: skip
def test_a_failure_is_told_as_one_of_torch_dynamo(error, told):
    assert failure(error) == told


def test_what_breaks_a_loop_is_named():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x):
            for at in range(2):
                x = torch.tanh(self.layers[at](x))
                torch._dynamo.graph_break()
            return x

    made = remat.rematerialize(Layers(), budget="1MiB", costs="estimate", limit_seconds=0.1)
    for _ in range(3):
        made(torch.ones(4, 16)).sum().backward()
    assert any("a graph break in a loop: Call to `torch" in each for each in made.plan.breaks)
