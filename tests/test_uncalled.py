"""A model that is trained by other methods than its forward, which nothing plans, is told of."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import remat

X = torch.randn(4, 8)


class Judged(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.layer(x))

    def loss(self, x):
        return self.layer(x).square().sum()


def step(model, loss, *others):
    optimizer = torch.optim.SGD([*model.parameters(), *others], 0.1)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    "came", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_steps_without_a_call_are_told_of_once(came):
    model = came(remat.rematerialize(Judged(), budget="1GiB"))
    with torch.no_grad():
        model(X)
    with pytest.warns(remat.BudgetWarning, match="steps parameters of Judged.*regions="):
        step(model, model.loss(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error", remat.BudgetWarning)
        step(model, model.loss(X))


def test_planning_for_an_example_is_no_call():
    model = remat.rematerialize(Judged(), X, budget="1GiB")
    with pytest.warns(remat.BudgetWarning, match="steps parameters of Judged"):
        step(model, model.loss(X))


@pytest.mark.parametrize("options", [{}, {"regions": "layer"}])
def test_a_call_before_is_enough(options):
    model = remat.rematerialize(Judged(), budget="1GiB", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", remat.BudgetWarning)
        step(model, model.loss(X) if options else model(X).sum())


class Later:
    """Computes when it is read, as a distribution or a lazy kernel does."""

    def __init__(self, model, x):
        self.model, self.x = model, x

    def sum(self):
        return self.model.layer(self.x).sum()


class Lazy(Judged):
    def forward(self, x):
        return Later(self, x)


def test_a_forward_whose_result_computes_later_is_told_of():
    model = remat.rematerialize(Lazy(), budget="1GiB")
    with pytest.warns(remat.BudgetWarning, match="steps parameters of Lazy.*as a distribution"):
        step(model, model(X).sum())
    model = remat.rematerialize(Lazy(), budget="1GiB", regions="layer")
    with warnings.catch_warnings():
        warnings.simplefilter("error", remat.BudgetWarning)
        for _ in range(3):
            step(model, model(X).sum())
    assert model.plan.budget_bytes == 2**30


def test_steps_of_other_models_say_nothing():
    model, other = remat.rematerialize(Judged(), budget="1GiB"), Judged()
    with warnings.catch_warnings():
        warnings.simplefilter("error", remat.BudgetWarning)
        step(other, other.loss(X))
        step(other, other.loss(X), *model.parameters())  # which have no gradients


@pytest.mark.parametrize("first", [True, False])
def test_one_that_shares_its_parameters_may_be_called_in_its_place(first):
    original = Judged()
    unused = remat.rematerialize(original, budget="1GiB") if first else None
    model = remat.rematerialize(nn.Sequential(original), budget="1GiB")
    loss = model(X).sum()
    unused = unused or remat.rematerialize(original, budget="2GiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error", remat.BudgetWarning)
        step(unused, loss)


def test_the_original_in_its_place_is_told_of():
    original = Judged()
    unused = remat.rematerialize(original, budget="1GiB")
    with pytest.warns(remat.BudgetWarning, match="The original"):
        step(unused, original(X).sum())
