"""Memory that is written to between a forward and its backward: eager's gradients, or an error.

For a long run: `REMAT_RANDOM_CHANGES=1000 pytest tests/test_changed_memory.py -k random`.
"""

import contextlib
import copy
import os
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from integration_cases.aliases import (
    HANDED,
    OF_A_TENSOR,
    OF_OTHERS,
    OF_THE_OUTPUT,
    Net,
    drawn_nets,
    gradients,
)

import remat

EXAMPLES = int(os.environ.get("REMAT_RANDOM_CHANGES", "3"))
COUNTED = "modified by an inplace operation|modified inplace|changed in place"
UNCOUNTED = "where torch does not count it"
RANDOM = OF_THE_OUTPUT | {
    name: change for name, change in OF_OTHERS.items() if "embedding" not in name
}
RANDOM["a bias"] = lambda step: [
    layer.bias.data.mul_(-1) for layer in step.model.layers if layer.bias is not None
]
RANDOM["other data of a bias"] = lambda step: [
    setattr(layer.bias, "data", torch.ones(16))
    for layer in step.model.layers
    if layer.bias is not None
]
WAYS = ("rematerialize", "compile")
# One of what is handed out whole, in part, without a version, and in another layout.
KEPT = {("whole", "rematerialize")}


def planned(plain, budget, way, **step):
    """Plan a copy of a model for a budget, the least that can be had if it is too small."""
    while True:
        torch._dynamo.reset()
        options = {"budget": budget, "limit_seconds": 0.1, "costs": "estimate"}
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
    """Say what is wrong with a step, if nothing was raised and its gradients are not eager's.

    Where eager raises an error, they are those without the change; where the change makes eager's
    wrong, as that of memory that it keeps, they may be anything.
    """
    values = [value.clone() for value in plain.state_dict().values()]
    expected = clean = gradients(plain, **options)
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
    if not all(map(torch.equal, expected, clean)):
        return ""
    return "" if all(map(torch.equal, got, expected)) else "other gradients"


def all_wrong(model, plain, changes, **options):
    """Say it of each change of which something is wrong."""
    found = {name: wrong(model, plain, change, **options) for name, change in changes.items()}
    return {name: what for name, what in found.items() if what}


CASES = [
    pytest.param(handed, 1, way, marks=() if (handed, way) in KEPT else pytest.mark.sweep)
    for handed in HANDED
    for way in WAYS
]
CASES += [
    pytest.param("whole", budget, "rematerialize", marks=pytest.mark.sweep)
    for budget in ("80KB", "1MB")
]


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")  # of what is detached, and not made
@pytest.mark.parametrize(("handed", "budget", "way"), CASES)
def test_what_is_written_to_after_the_forward(handed, budget, way):
    torch.manual_seed(0)
    plain = Net(HANDED[handed])
    model = planned(plain, budget, way)
    if budget == 1 and way == "rematerialize":
        assert re.search(r"compared +\d+ tensors that eager would not keep", str(model.plan))
    changes = OF_THE_OUTPUT | OF_OTHERS
    if handed == "detached":  # it is made when it is read, of which these do not tell, or refused
        changes = {name: changes[name] for name in changes.keys() - {"dlpack", "other data"}}
    assert all_wrong(model, plain, changes) == {}
    assert all(map(torch.equal, gradients(model), gradients(plain)))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
@pytest.mark.parametrize("handed", ["half"])
def test_what_is_written_to_where_an_output_gets_no_gradient(handed):
    torch.manual_seed(0)
    plain = Net(HANDED[handed])
    model = planned(plain, 1, "rematerialize", of_both=False)
    changes = OF_THE_OUTPUT | OF_OTHERS
    assert all_wrong(model, plain, changes, of_both=False) == {}
    assert all_wrong(model, plain, changes) == {}  # a backward that was not planned for


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
@pytest.mark.parametrize(
    ("handed", "budget"), [pytest.param("half", 1, marks=pytest.mark.sweep), ("whole", "300KB")]
)
def test_what_is_written_to_between_regions_in_a_later_step(handed, budget):
    """That it is not was learnt from the first ones."""
    torch.manual_seed(0)
    plain = Net(HANDED[handed], breaks=True)
    model = planned(plain, budget, "rematerialize")
    assert not model.plan.is_one_region
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


def test_a_buffer_that_is_refilled_while_the_backward_runs(monkeypatch):
    monkeypatch.setattr(
        "remat_exec.gradient_groups._GROUP_BYTES", 1
    )  # gradients come as they are made
    torch.manual_seed(0)
    plain = Net(HANDED["whole"])
    model = planned(plain, 1, "rematerialize")

    hooks = []

    def refill_when_a_gradient_comes(step):
        """At the first: which that is, the plan says."""
        for parameter in filter(lambda each: each.requires_grad, step.model.parameters()):
            refill = parameter.register_post_accumulate_grad_hook(lambda _: step.buffer.fill(7))
            hooks.append(refill)

    assert len(model.plan.source.split("yield given")) > 2
    with pytest.raises(remat.BackwardError, match=UNCOUNTED):
        gradients(model, refill_when_a_gradient_comes)
    for hook in hooks:
        hook.remove()
    assert all(map(torch.equal, gradients(model), gradients(plain)))


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
def test_what_is_seen_to_be_written_to_between_regions_is_copied():
    """From the first steps on, though torch does not count it."""
    torch.manual_seed(0)
    plain = Net(HANDED["whole"], breaks=True)
    plain.between = OF_A_TENSOR["numpy"]
    model = remat.rematerialize(copy.deepcopy(plain), budget="300KB", limit_seconds=0.2)
    for _ in range(4):
        assert all(map(torch.equal, gradients(model), gradients(plain)))


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="REMAT_RANDOM_CHANGES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(
    plain=drawn_nets(),
    changes=st.lists(st.sampled_from([*RANDOM]), min_size=4, max_size=8, unique=True),
    budget=st.sampled_from([1, "60KB", "100KB", "200KB"]),
    of_both=st.booleans(),
)
def test_random_models_and_changes(plain, changes, budget, of_both):
    model = planned(plain, budget, "rematerialize", of_both=of_both)
    if all(map(torch.equal, *(gradients(each, of_both=of_both) for each in (model, plain)))):
        chosen = {name: RANDOM[name] for name in changes}
        assert all_wrong(model, plain, chosen, of_both=of_both) == {}


def test_hooks_that_give_back_other_bits_are_named():
    class Packed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(64, 256), torch.nn.Linear(256, 16)
            self.body = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())
            self.hooks = (lambda saved: saved.bfloat16(), lambda packed: packed.float())

        def forward(self, x):
            h = torch.sin(self.first(x))
            with torch.autograd.graph.saved_tensors_hooks(*self.hooks):
                h = self.body(h)
            return self.last(h)

    torch.manual_seed(0)
    made = remat.rematerialize(Packed(), budget=1.0, limit_seconds=0.5)
    loss = made(torch.randn(300, 64)).square().mean()
    with pytest.raises(remat.RematError, match="or saved-tensor hooks, which were active"):
        loss.backward()


PLACES = {
    "at an odd number": lambda memory: memory[1:-4607].view(-1, 128),
    "in columns": lambda memory: memory.view(-1, 129)[:, :128],
    "repeated": lambda memory: memory[:128].expand(4608, -1),
    "transposed": lambda memory: memory[:-4608].view(128, -1).t(),
}


@pytest.mark.parametrize("place", PLACES)
def test_copies_that_hooks_give_back_have_changed_nothing(place):
    """A copy lies in one piece, wherever the input does."""
    torch.manual_seed(0)
    x = PLACES[place](torch.randn(4608 * 129))
    layers = (torch.nn.Tanh(), torch.nn.Linear(128, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    plain = torch.nn.Sequential(*layers)
    model = remat.rematerialize(copy.deepcopy(plain), (x,), budget=0.7, limit_seconds=0.1)
    assert "check__" in model.plan.source
    copies = (lambda saved: saved.clone(memory_format=torch.contiguous_format), lambda kept: kept)
    for each in (plain, model):
        with torch.autograd.graph.saved_tensors_hooks(*copies):
            each(x).square().mean().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
