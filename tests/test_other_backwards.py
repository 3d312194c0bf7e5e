"""Backwards over other outputs than the first plan takes for the loss: no loop is refused."""

import warnings

import pytest
import torch
from torch import nn

import remat

DEPTH, BATCH = 12, torch.randn(256, 64)
SECONDS = 0.5  # for each plan


class Penalized(nn.Module):
    """A deep net that returns a scalar beside its output, taken after some of its layers."""

    def __init__(self, after):
        super().__init__()
        torch.manual_seed(0)
        self.after = after
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(DEPTH))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == self.after:
                penalty = x.abs().mean()
        return x, penalty


def loss_of(returned):
    output, penalty = returned
    return output.sum() + penalty


def planned(model, budget, way):
    if way == "example":
        return remat.rematerialize(model, BATCH, budget=budget, limit_seconds=SECONDS)
    if way == "later":
        return remat.rematerialize(model, budget=budget, limit_seconds=SECONDS)
    torch._dynamo.reset()
    options = {"budget": budget, "limit_seconds": SECONDS}
    return torch.compile(model, backend="remat", options=options)


def gradients(model, call):
    """Run a step; give the gradients and the texts of the warnings of budgets."""
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        returned = call(BATCH)
        loss = loss_of(returned)
        del returned
        loss.backward()
    told = [str(each.message) for each in caught if each.category is remat.BudgetWarning]
    return [parameter.grad for parameter in model.parameters()], told


@pytest.fixture(scope="module")
def budget():
    """A share of what plain takes when all outputs are differentiated."""
    with remat.measure_peak() as peak:
        loss_of(Penalized(0)(BATCH)).backward()
    return int(0.75 * peak.peak_bytes)


@pytest.mark.parametrize(
    "way",
    [
        "example",
        pytest.param("later", marks=pytest.mark.sweep),
        pytest.param("compiled", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize(
    ("after", "told_of"), [pytest.param(DEPTH // 2, 0, marks=pytest.mark.sweep), (DEPTH - 1, 1)]
)
def test_a_scalar_beside_the_outputs_is_not_the_loss(after, told_of, way, budget):
    model, plain = Penalized(after), Penalized(after)
    call = planned(model, budget, way)
    expected, _ = gradients(plain, plain)
    all_told = []
    for _ in range(4):
        found, told = gradients(model, call)
        all_told += told
        assert all(map(torch.equal, found, expected))
    assert len(all_told) == told_of
    assert all("over other outputs" in each for each in all_told)
    with remat.measure_peak() as peak:
        loss_of(call(BATCH)).backward()
    assert peak.peak_bytes <= budget


@pytest.mark.sweep
def test_a_plan_for_all_outputs_that_does_not_fit_is_not_needed():
    model, plain = Penalized(2), Penalized(2)
    call = remat.rematerialize(model, BATCH, budget="300KiB")
    for each, run in ((model, call), (plain, plain)):
        run(BATCH)[1].backward()
        assert each.layers[2].weight.grad is not None
        assert each.layers[3].weight.grad is None
    assert torch.equal(model.layers[0].weight.grad, plain.layers[0].weight.grad)


class Labelled(nn.Module):
    """Returns its loss, and outputs that are larger than all that the backward needs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.head = nn.Linear(64, 1024)

    def forward(self, x):
        output = self.head(self.layers(x))
        return output.logsumexp(-1).mean(), output


def test_outputs_that_are_held_only_now_and_then_are_told_of_once():
    with pytest.raises(remat.BudgetTooSmall) as refused:
        remat.rematerialize(Labelled(), BATCH, budget=1, outputs=[0, 1])
    model = remat.rematerialize(Labelled(), BATCH, budget=int(1.05 * refused.value.smallest_bytes))
    all_told = []
    for step in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss, output = model(BATCH)
            if step % 3 != 2:
                del output
            loss.backward()
        all_told += [(step, str(each.message)) for each in caught]
    ((step, told),) = all_told
    assert step == 2
    assert "outputs are held" in told
