"""Operators that a plan runs once: those of others, those that decide, those of many ranks."""

import pytest
import torch
from torch import library

import remat
from remat_graph.torch import CaptureError, capture, recomputing

runs = []


def give_something_else(x: torch.Tensor) -> torch.Tensor:
    """Give something else at each run, as an operator with a generator of its own does."""
    runs.append(len(runs))
    return x * (1 + 0.5 * len(runs))


drift = library.custom_op("remat_tests::drift", give_something_else, mutates_args=())


@drift.register_fake
def _(x):
    return torch.empty_like(x)


drift.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output / (inputs[0] + 10)),
)


class Drifting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            h = layer(x)
            x = torch.tanh(drift(h) + drift(h).sigmoid())
        return x.sum()


class Routed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(32, 8)
        self.experts = torch.nn.Parameter(torch.randn(8, 32, 32))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        best = self.router(x).argmax(-1)
        made = torch.einsum("bi,bkij->bkj", x, self.experts[chosen])
        return (made * weights[..., None]).sum() + self.experts[best].sum()


@pytest.fixture
def forgotten(monkeypatch):
    monkeypatch.setattr(recomputing, "_allowed", set())


def ops_of(graph, name):
    return [op for op in graph.ops if name in op.name]


def train(model, x):
    runs.clear()
    model.zero_grad()
    model(x).backward()
    return len(runs), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.sweep
def test_an_operator_of_another_library_runs_as_often_as_in_eager():
    torch.manual_seed(0)
    model, x = Drifting(), torch.randn(512, 64)
    expected = train(model, x)
    planned = remat.rematerialize(model, x, budget=0.6, limit_seconds=10)
    assert planned.plan.recomputations > 0
    count, gradients = train(planned, x)
    assert count == expected[0] == 12
    assert all(map(torch.equal, gradients, expected[1]))


@pytest.mark.usefixtures("forgotten")
def test_an_operator_may_be_declared_deterministic():
    model, x = Drifting(), torch.randn(8, 64)
    before = capture(model, (x,), costs="estimate").graph
    assert not any(op.replayable for op in ops_of(before, "drift"))
    remat.allow_recompute("remat_tests::drift")
    after = capture(model, (x,), costs="estimate").graph
    assert all(op.replayable for op in ops_of(after, "drift"))
    assert len(ops_of(after, "drift")) < len(ops_of(before, "drift"))  # equal calls are one


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    "name",
    [
        *("scan", "", "::", "mylib::", None, "_c10d_functional::wait_tensor"),
        *("remat_tests::nowhere", "aten::add.Nowhere", "higher_order::nowhere"),
    ],
)
def test_what_cannot_be_declared_is_refused(name):
    with pytest.raises(CaptureError, match=r"allow_recompute|collective|registered"):
        remat.allow_recompute(name)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", ["aten::add", "aten::add.Tensor", "higher_order::flex_attention"])
def test_what_is_registered_can_be_declared(name):
    remat.allow_recompute(name)


def test_what_chooses_is_kept():
    graph = capture(Routed(), (torch.randn(4, 32),), costs="estimate").graph
    assert [op.replayable for op in ops_of(graph, "topk")] == [False]
    assert [op.replayable for op in ops_of(graph, "argmax")] == [False]
    assert all(op.replayable for op in ops_of(graph, "softmax"))
