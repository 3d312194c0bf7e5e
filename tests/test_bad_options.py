"""Options that cannot be what they are: refused at every door, and told as what they are."""

import inspect

import pytest
import torch
from torch import nn

import remat
from remat.front.backend import OPTIONS


def batch():
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def original():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))


WRONG = [
    {"limit_seconds": "3"}, {"limit_seconds": [3]}, {"limit_seconds": True},
    {"limit_seconds": float("nan")}, {"limit_seconds": -1}, {"progress": 3},
    {"budget": True}, {"outputs": b"loss"}, {"outputs": 1.5}, {"wait": "no"}, {"regions": 3},
    {"optimizer_in_backward": "no"},
]  # fmt: skip
DOORS = {
    "rematerialize": lambda model, **options: remat.rematerialize(model, **options),
    "plan": lambda model, **options: remat.plan(model, batch(), **options),
    "tradeoff": lambda model, budget=0.8, **options: remat.tradeoff(
        model, batch(), budgets=[budget], **options
    ),
    "compile": lambda model, **options: torch.compile(model, backend="remat", options=options)(
        batch()
    ),
}


HAVE = {
    "rematerialize": {*inspect.signature(remat.rematerialize).parameters},
    "plan": {*inspect.signature(remat.plan).parameters},
    "tradeoff": {*inspect.signature(remat.tradeoff).parameters, "budget"},
    "compile": {*OPTIONS},
}


@pytest.mark.parametrize(
    ("door", "wrong"),
    [(door, wrong) for door in DOORS for wrong in WRONG if wrong.keys() <= HAVE[door]],
    ids=str,
)
def test_an_option_of_another_type_is_refused_at_the_door(original, door, wrong):
    torch._dynamo.reset()
    with pytest.raises(remat.RematError, match="|".join(f"{name}=" for name in wrong)):
        DOORS[door](original, **{"budget": 0.8} | wrong)


@pytest.mark.parametrize("outputs", [[], ()])
def test_outputs_that_name_none(original, outputs):
    with pytest.raises(remat.RematError, match=r"outputs=.* names no output"):
        remat.rematerialize(original, outputs=outputs)


class WithCount(nn.Linear):
    def forward(self, inputs):
        return {"loss": super().forward(inputs).square().mean(), "count": inputs.square().sum()}


def test_outputs_that_get_no_gradient():
    model = WithCount(8, 8)
    with pytest.raises(remat.CaptureError, match="that outputs= names gets a gradient"):
        remat.plan(model, batch(), budget=1.0, outputs="count")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [(None, "missing 1 required"), ((batch(), batch()), "3 were given"), ((), "missing")],
)
def test_example_inputs_that_do_not_fit(original, inputs, message):
    with pytest.raises(remat.CaptureError, match=rf"example inputs do not fit .*{message}") as told:
        remat.plan(original, inputs, budget=1.0)
    assert "compiler.disable" not in str(told.value)
    with pytest.raises(remat.CaptureError, match="example inputs do not fit"):
        remat.tradeoff(original, inputs, budgets=[0.5])


def test_an_inner_call_that_does_not_fit_is_told_with_its_line():
    class Inner(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs, inputs)

    with pytest.raises(remat.CaptureError, match=r"cannot be traced.*test_bad_options"):
        remat.plan(Inner(8, 8), batch(), budget=1.0)
