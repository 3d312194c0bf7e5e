"""Memory that is written to between a forward and its backward: eager's gradients, or an error.

For a long run: `REMAT_RANDOM_CHANGES=1000 pytest tests/test_changed_memory.py -k random`.
"""

import contextlib
import copy
import os
import re

import pytest
import torch
from integration_cases.aliases import HANDED, OF_A_TENSOR, OF_OTHERS, OF_THE_OUTPUT, Net, gradients

import remat

EXAMPLES = int(os.environ.get("REMAT_RANDOM_CHANGES", "3"))
COUNTED = "modified by an inplace operation|modified inplace|changed in place"
UNCOUNTED = "where torch does not see it"
WAYS = ("rematerialize", "compile")


def planned(plain, budget, way, **step):
    """Plan a copy of a model for a budget, the least that can be had if it is too small."""
    while True:
        torch._dynamo.reset()
        options = {"budget": budget, "limit_seconds": 0.2}
        if way == "compile":
            model = torch.compile(copy.deepcopy(plain), backend="remat", options=options)
        else:
            model = remat.rematerialize(copy.deepcopy(plain), **options)
        try:
            for _ in range(4):  # it is planned anew for what the first steps show
                gradients(model, **step)
        except remat.BudgetTooSmall as error:
            budget = error.smallest_bytes
        else:
            return model


def wrong(model, plain, change, **options):
    """Say what is wrong with a step, if its gradients are not eager's and nothing was raised."""
    values = [value.clone() for value in plain.state_dict().values()]
    expected = None
    try:
        with contextlib.suppress(RuntimeError):
            expected = gradients(plain, change, **options)
        got = gradients(model, change, **options)
    except RuntimeError as error:
        return "" if re.search(f"{COUNTED}|{UNCOUNTED}", str(error)) else repr(error)
    finally:
        for each in (plain, model):
            for own, value in zip(each.state_dict().values(), values, strict=True):
                own.copy_(value)
    if expected is None:
        return "eager raises an error"
    return "" if all(map(torch.equal, got, expected)) else "other gradients"


def all_wrong(model, plain, changes, **options):
    """Say it of each change of which something is wrong."""
    found = {name: wrong(model, plain, change, **options) for name, change in changes.items()}
    return {name: what for name, what in found.items() if what}


CASES = [(handed, 1, way) for handed in HANDED for way in WAYS]
CASES += [("whole", budget, "rematerialize") for budget in ("80KB", "100KB", "1MB")]


@pytest.mark.parametrize(("handed", "budget", "way"), CASES)
def test_what_is_written_to_after_the_forward(handed, budget, way):
    torch.manual_seed(0)
    plain = Net(HANDED[handed])
    model = planned(plain, budget, way)
    if budget == 1 and way == "rematerialize":
        assert "check" in model.plan.source
    assert all_wrong(model, plain, OF_THE_OUTPUT | OF_OTHERS) == {}
    assert all(map(torch.equal, gradients(model), gradients(plain)))


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
@pytest.mark.parametrize("handed", ["whole", "half"])
def test_what_is_written_to_where_an_output_gets_no_gradient(handed):
    torch.manual_seed(0)
    plain = Net(HANDED[handed])
    model = planned(plain, 1, "rematerialize", of_both=False)
    changes = OF_THE_OUTPUT | OF_OTHERS
    assert all_wrong(model, plain, changes, of_both=False) == {}
    assert all_wrong(model, plain, changes) == {}  # a backward that was not planned for


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
@pytest.mark.parametrize("budget", [1, "300KB"])
@pytest.mark.parametrize("handed", ["whole", "half"])
def test_what_is_written_to_between_regions_in_a_later_step(handed, budget):
    """That it is not was learnt from the first ones."""
    torch.manual_seed(0)
    plain = Net(HANDED[handed], breaks=True)
    model = planned(plain, budget, "rematerialize")
    assert model.plan.calls
    assert all_wrong(model, plain, OF_THE_OUTPUT | OF_OTHERS) == {}
    found = {}
    for name, change in OF_A_TENSOR.items():
        plain.between = model.between = change
        found[name] = wrong(model, plain, None)
        plain.between = model.between = None
        assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert {name: what for name, what in found.items() if what} == {}


def test_weights_that_autocast_casts():
    """Eager keeps the casts alone."""
    torch.manual_seed(0)
    plain = Net(HANDED["whole"])
    changes = {
        "all": lambda step: step.model.a.weight.data.mul_(2),
        "one": lambda step: step.model.b.weight.data.view(-1)[7].add_(1),
        "in place": lambda step: step.model.c.weight.mul_(2),
    }
    with torch.autocast("cpu", torch.bfloat16):
        model = planned(plain, 1, "rematerialize")
        assert all_wrong(model, plain, changes) == {}
