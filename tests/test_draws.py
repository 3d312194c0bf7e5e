"""Numbers drawn in place come in the order of memory, as in eager."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import remat
from remat_exec import Executable
from remat_graph.torch import capture
from remat_solvers import store_all

CALLS = {
    "dropout": lambda x: F.dropout(x, 0.3, True, True),
    "dropout of a part": lambda x: F.dropout(x[:2], 0.3, True, True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_ of what is known": lambda x: x * torch.ones_like(x).bernoulli_(0.4),
    "bernoulli, in order": lambda x: x * torch.bernoulli(x.detach(), 0.4),
}
LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 3, 5, 2),
    "transposed": lambda: torch.randn(4, 3, 5, 2).transpose(0, 2),
    "channels last": lambda: torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(8, 3, 5, 2)[::2].transpose(1, 3),
    "of one row": lambda: torch.randn(4, 1, 5, 1).transpose(0, 3),
}


class Drawing(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.call(x * self.scale).tanh()


@pytest.mark.parametrize(
    ("call", "layout"),
    [  # each layout for every second way to draw, and the other way round
        pytest.param(call, layout, marks=() if (number + at) % 2 == 0 else pytest.mark.sweep)
        for number, call in enumerate(CALLS)
        for at, layout in enumerate(LAYOUTS)
    ],
)
def test_in_every_layout_the_draws_are_those_of_eager(call, layout):
    torch.manual_seed(0)
    model, x = Drawing(CALLS[call]), LAYOUTS[layout]()
    captured = capture(model, (x,), costs="estimate")
    planned = Executable(captured, store_all(captured.graph))
    torch.manual_seed(1)
    (ours,) = planned(model, [x])
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(ours, model(x))
    assert torch.equal(state, torch.get_rng_state())


class AfterNorm(nn.Module):
    """Fake batch norms of transposed inputs lie otherwise than real ones on the CPU."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16, track_running_stats=False)
        self.dropout = nn.Dropout(0.2, inplace=True)

    def forward(self, x):
        return self.dropout(self.norm(x.t()))


class ReturnsMask(nn.Module):
    def forward(self, x):
        x = x.t()
        mask = torch.empty_like(x).bernoulli_(0.4)
        return (x * mask).tanh(), mask


@pytest.mark.parametrize("costs", ["measure", "estimate"])
@pytest.mark.parametrize("model", [AfterNorm(), ReturnsMask()], ids=lambda m: type(m).__name__)
def test_the_order_is_that_in_which_tensors_really_lie(model, costs):
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    x.requires_grad_()
    planned = remat.rematerialize(model, (x,), budget="1MiB", costs=costs)
    torch.manual_seed(1)
    ours = planned(x)
    torch.manual_seed(1)
    theirs = model(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert all(a.stride() == b.stride() for a, b in zip(_all(ours), _all(theirs), strict=True))


def _all(output):
    return output if isinstance(output, tuple) else (output,)


class Writing(nn.Module):
    """Writes to what a dropout gives that drops nothing, which is what it was given."""

    def __init__(self, p):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop, self.act = nn.Linear(4, 4), nn.Dropout(p), nn.ReLU(inplace=True)

    def forward(self, x):
        dropped = self.drop(x)
        dropped += 1
        h = self.layer(x)
        return self.act(self.drop(h)).sum() + (3 * h).sum()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_what_a_dropout_gives_that_drops_nothing_is_what_it_was_given(p):
    results = []
    for wrap in (lambda m: m, lambda m: remat.rematerialize(m, budget="1MiB", limit_seconds=0.1)):
        model, x = wrap(Writing(p)).train(p == 0), torch.randn(3, 4, generator=torch.Generator())
        for _ in range(2):
            loss = model(x)
            loss.backward()
        results.append((loss.detach(), x, model.layer.weight.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)
