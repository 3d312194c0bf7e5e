"""Steps of one call and steps of several before one backward, of a model that is one region."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat

LIMIT_SECONDS = 0.3
X = torch.randn(128, 16, generator=torch.Generator().manual_seed(0))
BATCHES = X, 2 * X  # made before a step, of which they are no part


def net():
    torch.manual_seed(0)
    layers = (
        layer for _ in range(4) for layer in (nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    )
    return nn.Sequential(*layers)


def several(model, count):
    """Run a step of so many calls before their backwards."""
    model.zero_grad()
    losses = [model(rows).square().mean() for rows in BATCHES[:count]]
    for loss in losses:
        loss.backward()


def peak_of(step, *args):
    step(*args)
    args[0].zero_grad()
    with remat.measure_peak() as peak:
        step(*args)
    return peak.peak_bytes


def steps(model, plain, counts, step=several):
    """Run steps of so many calls; give the peak, the plan and the warnings of each."""
    for count in counts:
        step(plain, count)
        model.zero_grad()
        with warnings.catch_warnings(record=True) as told, remat.measure_peak() as peak:
            warnings.simplefilter("always")
            step(model, count)
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        yield peak.peak_bytes, model.plan, [str(warning.message) for warning in told]


@pytest.fixture
def fitting():
    """A model whose steps of two calls are within the budget, too, if they are planned together."""
    plain = net()
    budget = peak_of(several, plain, 1)
    model = remat.rematerialize(net(), (X,), budget=budget, limit_seconds=LIMIT_SECONDS)
    several(model, 1)
    several(model, 1)  # the first has shown what the loop holds
    return model, plain, budget


@pytest.mark.sweep
def test_steps_in_turn_have_each_their_plan(fitting):
    model, plain, budget = fitting
    whole = model.plan
    seen = list(steps(model, plain, 6 * [1, 2]))
    assert "2 calls were made" in seen[1][2][0]
    assert all("2 calls were made" not in text for *_, told in seen[2:] for text in told)
    assert all(peak <= budget for peak, *_ in (*seen[::2], *seen[-6:]))
    assert [len(plan.calls) for _, plan, _ in seen[-4:]] == [1, 2, 1, 2]
    assert seen[-2][1] is whole


def test_a_forward_that_is_only_evaluated_is_no_step(fitting):
    """Nor is one in between without gradients; what stays without a backward is not in the next."""
    model, plain, _ = fitting
    whole = model.plan

    def step(model, _):
        model.zero_grad()
        loss = model(X).square().mean()
        with torch.no_grad():
            model(X)
        loss.backward()
        model(X)

    for _, plan, told in steps(model, plain, 4 * [1], step):
        assert plan is whole
        assert told == []


def test_accumulated_gradients_are_of_steps_of_one_call(fitting):
    model, plain, _ = fitting
    whole = model.plan

    def step(model, _):
        model.zero_grad()
        for factor in (1, 2):
            model(X * factor).square().mean().backward()

    for _, plan, told in steps(model, plain, 3 * [2], step):
        assert plan is whole
        assert told == []


def test_where_several_calls_do_not_fit_one_is_run_as_before():
    """Steps of several are refused at the second call, and no others."""
    plain = net()
    with pytest.raises(remat.BudgetTooSmall) as least:
        remat.plan(plain, (X,), budget=1, limit_seconds=LIMIT_SECONDS)
    budget = int(1.01 * least.value.smallest_bytes)
    model = remat.rematerialize(net(), (X,), budget=budget, limit_seconds=LIMIT_SECONDS)
    list(steps(model, plain, [1, 1]))
    whole = model.plan
    refused = 0
    for _ in range(6):
        try:
            list(steps(model, plain, [2]))
        except remat.BudgetTooSmall:
            refused += 1
    assert refused >= 2  # two records show that nothing fits
    told = [told for *_, told in steps(model, plain, 3 * [1])]
    assert told[1:] == [[], []]
    assert model.plan is whole
    with pytest.raises(remat.BudgetTooSmall):
        several(model, 2)
    ((peak, *_),) = steps(model, plain, [1])
    assert peak <= budget


class Words(nn.Module):
    """A model that returns its loss alone, of more words than anything else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(400, 16), nn.Linear(16, 400)

    def forward(self, x):
        return functional.cross_entropy(self.head(self.embedding(x)).flatten(0, 1), x.flatten())


@pytest.mark.sweep
def test_a_budget_that_only_slices_reach_serves_steps_of_one_call_after_one_of_two():
    plain, tokens = Words(), torch.arange(256).view(8, 32)
    options = {"numerics": "rounding", "limit_seconds": LIMIT_SECONDS}
    with pytest.raises(remat.BudgetTooSmall) as least:
        remat.plan(plain, (tokens,), budget=1, **options)
    budget = int(1.2 * least.value.smallest_bytes)
    model = remat.rematerialize(copy.deepcopy(plain), (tokens,), budget=budget, **options)

    def step(model, count):
        model.zero_grad()
        losses = [model(tokens) for _ in range(count)]
        for loss in losses:
            loss.backward()

    seen = list(steps(model, plain, [1, 1, 2], step))
    whole = model.plan
    assert whole.kinds[0].sliced
    assert "2 calls were made" in seen[2][2][0]
    for peak, _, told in steps(model, plain, 5 * [1], step):
        assert peak <= budget
        assert told == []
    assert model.plan is whole


@pytest.mark.sweep
def test_steps_of_ever_fewer_calls_in_turn_have_each_their_plan():
    """The one of most calls never follows a step of which the next is recorded."""
    plain = net()
    batches = [(at + 1) * X for at in range(4)]

    def step(model, count):
        model.zero_grad()
        for loss in [model(rows).square().mean() for rows in batches[:count]]:
            loss.backward()

    budget = int(0.7 * peak_of(step, plain, 4))
    model = remat.rematerialize(net(), budget=budget, limit_seconds=LIMIT_SECONDS)
    seen = list(steps(model, plain, 7 * [4, 3, 2, 1], step))
    assert "4 calls were made" in seen[0][2][0]
    assert all(peak <= budget and not told for peak, _, told in seen[-8:])
