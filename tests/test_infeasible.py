"""A call, or a step of several regions, that no plan can keep within the budget."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import remat
from remat.planning import solving
from remat.planning.infeasible import warn_infeasible
from remat_graph import Status


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Tanh(nn.Module):
    """Linear layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Broken(Tanh):
    """The same with breaks between them."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def step(model, rows):
    model.zero_grad()
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def made(broken, **options):
    torch.manual_seed(0)
    plain = Broken() if broken else Tanh()
    return remat.rematerialize(copy.deepcopy(plain), budget="100kB", **options), plain


@pytest.mark.parametrize("broken", [False, True])
def test_what_does_not_fit_is_refused_unless_asked_otherwise(broken):
    model, _ = made(broken)
    told = pytest.warns(remat.BudgetWarning, match="step 1") if broken else nullcontext()
    with told, pytest.raises(remat.BudgetTooSmall):  # noqa: PT012
        for _ in range(4):
            step(model, 512)


@pytest.mark.parametrize("broken", [False, True])
def test_what_does_not_fit_runs_plain_and_is_warned_of_once(broken):
    model, plain = made(broken, on_infeasible="plain")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(6):
            for ours, theirs in zip(step(model, 512), step(plain, 512), strict=True):
                assert torch.equal(ours, theirs)
    texts = [str(w.message) for w in told if w.category is remat.BudgetWarning]
    assert sum("runs without a plan" in text for text in texts) == 1
    assert "budget 97.7 KiB is below" in texts[-1]
    assert "runs without a plan" in str(model.plan)
    for _ in range(4):  # another kind of call fits, and is planned for
        for ours, theirs in zip(step(model, 8), step(plain, 8), strict=True):
            assert torch.equal(ours, theirs)
    assert model.plan.budget_bytes == 100_000
    assert model.plan.measured_peak_bytes <= 100_000
    if not broken:
        step(model, 512)
        assert "runs without a plan" in str(model.plan)


def test_the_back_end_of_torch_compile_takes_it_too():
    options = {"budget": "100kB", "on_infeasible": "plain"}
    model = torch.compile(Tanh(), backend="remat", options=options)
    with pytest.warns(remat.BudgetWarning, match="runs without a plan"):
        step(model, 512)


def test_an_unknown_on_infeasible_is_refused():
    with pytest.raises(remat.RematError, match="give 'raise' or 'plain'"):
        made(False, on_infeasible="split")


class Scored(nn.Module):
    """Scores of many words, and a loss of them: slices are spoken of in a refusal."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 4000)

    def forward(self, x):
        scores = self.head(torch.tanh(self.first(x)))
        return {"loss": torch.logsumexp(scores, -1).sum(), "scores": scores}


@pytest.mark.parametrize("limit", [None, 0.5])
def test_what_a_refusal_says_besides_is_looked_for_briefly(limit, monkeypatch):
    limits, solve = [], solving.solve

    def noted(*args, limit_seconds, **options):
        limits.append(limit_seconds)
        return solve(*args, limit_seconds=limit_seconds, **options)

    monkeypatch.setattr(solving, "solve", noted)
    with pytest.raises(remat.BudgetTooSmall) as refused:
        remat.plan(Scored(), (torch.randn(64, 32),), budget="1MiB", limit_seconds=limit)
    (note,) = refused.value.__notes__
    assert "in slices" in note
    assert limits == [limit, limit, limit or 5]  # with all outputs made, and without


def test_the_warning_says_what_would_help():
    error = remat.BudgetTooSmall(1, 2, 0, None, Status.LIMIT)
    error.add_note("With outputs='loss' less is enough.")
    with pytest.warns(remat.BudgetWarning, match="\nWith outputs='loss' less is enough"):
        warn_infeasible("a call", error)
