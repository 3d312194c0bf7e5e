"""Several threads that train one model: each is within a step of its own, and none disturbs it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from integration_cases.sweeps import swept
from torch import nn

import remat
from remat.session.session import Session

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, in a thread

OPTIONS = {"budget": "64KiB", "limit_seconds": 0.1}
WAYS = {
    "rematerialize": lambda model: remat.rematerialize(model, **OPTIONS),
    "compile": lambda model: torch.compile(model, backend="remat", options=OPTIONS),
}
TOLD = "two threads run steps of one model at the same time"
between = threading.local()


@torch.compiler.disable
def pause(x):
    """Do what this thread is to do half-way through a forward."""
    getattr(between, "does", int)()
    return x


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 4)

    def forward(self, x):
        return self.second(pause(self.first(x).tanh()).sin())


class Whole(Broken):
    def forward(self, x):
        return self.second(self.first(x).tanh().sin())


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gradients(model, seed, half_way=int):
    """Give a step's gradients, which go nowhere else; do something before its backward."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    loss = model(x).square().mean()
    half_way()
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_right(got, seed):
    for found, expected in zip(got, gradients(Whole(), seed), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("rematerialize", Broken),
        ("compile", Whole),
        pytest.param("rematerialize", Whole, marks=pytest.mark.sweep),
        pytest.param("compile", Broken, marks=pytest.mark.sweep),
    ],
)
def test_a_thread_runs_whole_steps_while_another_is_half_way(way, kind):
    model = WAYS[way](kind())
    with ThreadPoolExecutor(1) as pool:

        def other():
            assert_right(pool.submit(gradients, model, 1).result(60), 1)

        def steps():
            for within_forward in (False, True, False, True):
                between.does = other if within_forward else int
                assert_right(gradients(model, 0, int if within_forward else other), 0)
            del between.does

        with pytest.warns(remat.BudgetWarning, match=TOLD) as told:
            steps()
    assert len(told) == 1
    for seed in range(3):
        assert_right(gradients(model, seed), seed)


@pytest.mark.parametrize("way", swept(WAYS, ["rematerialize"]))
def test_a_thread_that_fails_half_way_leaves_the_model_usable(way):
    model = WAYS[way](Broken())

    def stop():
        raise ZeroDivisionError

    def stopped():
        between.does = stop
        gradients(model, 1)

    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(stopped).exception(), ZeroDivisionError)
    for seed in range(3):
        assert_right(gradients(model, seed), seed)


@pytest.mark.parametrize("way", swept(WAYS, ["rematerialize"]))
def test_a_thread_that_runs_no_backward_and_is_gone_leaves_the_model_usable(way):
    model = WAYS[way](Broken())
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(model, torch.ones(16, 8)).result()
    with pytest.warns(remat.BudgetWarning, match=TOLD):
        assert_right(gradients(model, 0), 0)
    del kept
    for seed in range(3):
        assert_right(gradients(model, seed), seed)


@pytest.mark.parametrize("way", swept(WAYS, ["rematerialize"]))
def test_a_thread_that_only_evaluates_is_in_no_step(way):
    """It has no budget to be told of, and leaves the record of another's step alone."""
    model = WAYS[way](Broken())

    def evaluated():
        with torch.no_grad():
            return model(torch.ones(16, 8))

    with ThreadPoolExecutor(1) as pool:

        def evaluate():
            assert torch.equal(pool.submit(evaluated).result(60), Broken()(torch.ones(16, 8)))

        for _ in range(3):
            assert_right(gradients(model, 0, evaluate), 0)


class WithLogits(nn.Module):
    """Returns a loss and what it is of."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        logits = self.layer(x)
        return logits.square().mean(), logits


def test_code_that_is_compiled_anew_where_outputs_are_named_is_planned(monkeypatch):
    """Of two threads that compile at once, torch may lose what one has compiled."""
    named = Session._rebuilt

    def lost(session, returned):
        torch._dynamo.reset_code(WithLogits.forward.__code__)
        return named(session, returned)

    monkeypatch.setattr(Session, "_rebuilt", lost)
    plain, x = WithLogits(), torch.randn(8, 16)
    model = remat.rematerialize(WithLogits(), budget="1MiB", outputs=0, limit_seconds=0.1)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(x)[0].backward()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)
