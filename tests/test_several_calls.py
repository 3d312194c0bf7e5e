"""Several calls before one backward, of a model, its parts or its methods, have one budget."""

import copy
import warnings

import pytest
import torch
from integration_cases.broken import Block, assert_same, pair
from torch import nn

import remat
from remat_exec import measure_peak


def test_two_forwards_before_their_backwards_are_one_step():
    original, plain, x, _ = pair()
    model = remat.rematerialize(original, budget=0.7)
    for seed in range(5):
        for each in (model, plain):
            each.zero_grad()
            torch.manual_seed(seed)
            (each(x).square().mean() + each(x + 1).square().mean()).backward()
        assert_same(model, plain)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


class Layers(nn.Module):
    """A class of ours: what TorchDynamo finds of `nn.Sequential.compile` runs in eager."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def layers(count=4):
    torch.manual_seed(0)
    return Layers(*(Layers(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(count)))


def called_twice(model):
    model.zero_grad()
    (model(ROWS).square().mean() + model(2 * ROWS).mean()).backward()


def called_once(model):
    model.zero_grad()
    model(ROWS).square().mean().backward()


ROWS = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


def test_a_forward_before_the_last_backward_is_expected_from_then_on():
    plain = layers()
    model = remat.rematerialize(copy.deepcopy(plain), (ROWS,), budget="1MiB", limit_seconds=0.5)
    told = []
    for each in (plain, model):
        waiting = []
        for step in range(12):
            waiting.append(each((1 + step) * ROWS).square().mean())
            if step:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    waiting.pop(0).backward()
                told += [step for one in caught if "were made before a backward" in str(one)]
    assert told == [1]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "how",
    [
        "rematerialized",
        pytest.param("compiled", marks=pytest.mark.sweep),
        pytest.param("compiled by blocks", marks=pytest.mark.sweep),
    ],
)
def test_several_calls_before_a_backward_have_one_budget(how):
    """Of a model that is one graph, or of blocks that are compiled each by itself."""
    torch.compiler.reset()
    step = called_once if how == "compiled by blocks" else called_twice
    plain, model = layers(), layers()
    step(plain)
    plain.zero_grad()
    with remat.measure_peak() as taken:
        step(plain)
    budget = int(0.7 * taken.peak_bytes)
    options = {"budget": budget, "limit_seconds": 0.1}
    if how == "rematerialized":
        model = remat.rematerialize(model, **options)
    parts = {"compiled": [model], "compiled by blocks": model.layers}
    for part in parts.get(how, ()):
        part.compile(backend="remat", options=options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", remat.BudgetWarning)
        for _ in range(4):
            step(model)
    if how == "rematerialized":
        assert [str(w.message)[:37] for w in told] == ["2 calls were made before a backward: "]
    model.zero_grad()
    with remat.measure_peak() as taken:
        step(model)
    assert taken.peak_bytes <= budget
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "how", ["backend", pytest.param("rematerialized", marks=pytest.mark.sweep)]
)
def test_a_compiled_function_may_hold_the_backward(how):
    torch.compiler.reset()
    plain, model = layers(2), layers(2)
    if how == "rematerialized":
        model = remat.rematerialize(model, budget="1MiB", limit_seconds=0.1)
        step = torch.compile(lambda: called_once(model), backend="eager")
    else:
        options = {"budget": "1MiB", "limit_seconds": 0.1}
        step = torch.compile(lambda: called_once(model), backend="remat", options=options)
    called_once(plain)
    for _ in range(3):
        step()
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


class Coder(nn.Module):
    """Is trained by its methods; nobody calls its forward."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.Sequential(*map(Block, (32, 32))) for _ in range(2))

    def encode(self, x):
        return torch.tanh(self.encoder(x))

    def decode(self, code):
        return self.decoder(code)


@pytest.mark.sweep
def test_regions_that_methods_beside_the_forward_call_are_planned_together():
    torch.manual_seed(0)
    original = Coder()
    plain, x = copy.deepcopy(original), torch.randn(256, 32)

    def coded(model):
        model.zero_grad()
        torch.manual_seed(1)
        (model.decode(model.encode(x)) - x).square().mean().backward()

    with measure_peak() as peak:
        coded(plain)
    budget = int(0.8 * peak.peak_bytes)
    model = remat.rematerialize(original, budget=budget, regions=["encoder", "decoder"])
    for _ in range(5):
        with measure_peak() as peak:
            coded(model)
        assert_same(model, plain)
        assert peak.peak_bytes <= budget
    assert len(model.plan.calls) == 2
    assert model.plan.recomputations
