"""Options that cannot be what they are: refused at every door, before a model is looked at."""

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
