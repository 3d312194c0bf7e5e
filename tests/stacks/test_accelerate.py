"""Accelerate replaces `forward` on the instance: before or after the model is rematerialized."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from stack_cases.models import (
    assert_moved_alike,
    assert_planned,
    assert_same_state,
    rematerialized,
)

from loop_cases.frameworks import accelerated
from loop_cases.models import Blocks, batch, made, square


@pytest.fixture(autouse=True)
def _apart():
    """What Accelerate keeps for the process is not there from another test, nor left to one."""
    _forget()
    yield
    _forget()


def _forget():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def trained(model, wrap_last, precision="no"):
    return accelerated(model, [batch(step) for step in range(4)], wrap_last, precision)


@pytest.mark.parametrize(
    ("when", "precision"),
    [pytest.param("before", "bf16", marks=pytest.mark.sweep), ("after", "no"), ("after", "bf16")],
)
def test_weights_are_those_of_the_plain_model(precision, when):
    eager, _ = trained(made(Blocks), lambda model: model, precision)
    if when == "before":
        model, _ = trained(rematerialized(made(Blocks)), lambda model: model, precision)
    else:
        model, _ = trained(made(Blocks), rematerialized, precision)
    assert not torch.is_autocast_enabled("cpu")
    assert_planned(model)
    if precision == "no":
        assert_same_state(model, eager)
    else:
        assert_moved_alike(model, eager, made(Blocks))


@pytest.mark.sweep
def test_what_accelerate_unwraps_is_still_rematerialized():
    model, accelerator = trained(rematerialized(made(Blocks)), lambda model: model, "bf16")
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert type(model) is Blocks
    plan = model.plan
    eager = made(Blocks)
    eager.load_state_dict(model.state_dict())
    for each in (model, eager):
        each.zero_grad()
        torch.manual_seed(2)
        square(each(batch(7))).backward()
    assert not torch.is_autocast_enabled("cpu")
    assert model.plan is not plan, "autocast has gone, and the forward was not planned for"
    assert_planned(model)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
