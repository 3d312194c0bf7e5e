"""A rematerialized model that nobody holds any more is gone, with its weights, graphs and plans."""

import gc
import weakref

import pytest
import torch
from torch import nn

import remat
from remat.session.region import Region


class Block(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.breaks = breaks

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.second(hidden)


class Net(nn.Module):
    """Its forward is code that outlives every model, and on code Dynamo keeps what it compiled."""

    def __init__(self, breaks=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def trained(model, **settings):
    """Train for a few steps; give weak references to all that should go with the model."""
    made = remat.rematerialize(model, **settings)
    for _ in range(3):
        made(torch.randn(256, 16)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())
    return [weakref.ref(each) for each in (model, made, *made.parameters())]


def regions():
    return [each for each in gc.get_objects() if isinstance(each, Region)]


@pytest.mark.parametrize(
    ("breaks", "settings"),
    [
        (False, {"budget": "1MiB"}),
        (False, {"budget": "auto", "optimizer": torch.optim.SGD}),
        (False, {"budget": 0.9, "loss": lambda out: out.square().mean()}),
        (False, {"budget": "2MiB", "regions": [Block]}),
        (True, {"budget": "2MiB"}),
    ],
    ids=["whole", "auto", "loss", "regions", "breaks"],
)
def test_nothing_of_a_model_is_left(breaks, settings):
    gc.collect()
    before = len(regions())
    references = trained(Net(breaks), **settings)
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert len(regions()) == before


def test_the_same_code_compiled_for_another_model_stays():
    model, other = Net(), Net()
    kept = remat.rematerialize(other, budget="1MiB")
    x = torch.randn(256, 16)
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    expected = [compiled(x).sum(), kept(x).sum()]
    trained(model, budget="1MiB")
    gc.collect()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert [compiled(x).sum(), kept(x).sum()] == expected


def test_a_backward_outlives_its_model():
    model = Net()
    made = remat.rematerialize(model, budget="1MiB")
    x = torch.randn(256, 16, requires_grad=True)
    loss = made(x).sum()
    made(x)
    del made
    gc.collect()
    loss.backward()
    reached = x.grad
    x.grad = None
    model(x).sum().backward()
    assert torch.equal(reached, x.grad)


def test_a_call_that_is_let_go_of_within_the_forward_is_no_break():
    class Routed(nn.Module):
        """A gate of which only the choice is used, in a loop that runs as it is."""

        def __init__(self):
            super().__init__()
            self.gate, self.body = nn.Linear(8, 2), nn.Linear(8, 8)

        def forward(self, x):
            chosen = self.gate(x).argmax(1)
            out = torch.zeros_like(x)
            for at in range(2):
                rows = (chosen == at).nonzero().squeeze(1)
                out = out.index_add(0, rows, self.body(x[rows]).tanh())
            return out

    model = remat.rematerialize(Routed(), budget="4MiB", limit_seconds=0.1)
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
    assert model.plan.breaks
    assert not any("StepState" in line for line in model.plan.breaks)
