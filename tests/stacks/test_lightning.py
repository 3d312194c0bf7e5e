"""Lightning trains a module that is rematerialized as a whole, or holds one that is."""

import importlib

import pytest
import torch
from stack_cases.models import (
    assert_moved_alike,
    assert_planned,
    assert_same_state,
    rematerialized,
)

from loop_cases.models import batch, made, square

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # the batches are few
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),  # not of this code
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),  # not of this code
]


@pytest.fixture(scope="module")
def lightning():
    return importlib.import_module("loop_cases.by_lightning")  # only here: it takes two seconds


def trained(module, lightning, **options):
    return lightning.fitted(module, [batch(step) for step in range(3)], **options)


@pytest.mark.parametrize("by_forward", [False, True])
def test_a_whole_module(lightning, by_forward):
    class Module(lightning.Lightning):
        """A training step that calls `self`, or `self.forward` without the module's hooks."""

        def training_step(self, x, batch):
            return square(self.forward(x)) if by_forward else super().training_step(x, batch)

    module = trained(rematerialized(made(Module)), lightning)
    assert_planned(module)
    assert_same_state(module, trained(made(Module), lightning))


def test_a_whole_module_planned_before_the_training(lightning):
    module = rematerialized(made(lightning.Lightning), batch())
    plan = module.plan
    trained(module, lightning)
    assert module.plan is plan
    assert_planned(module)
    assert_same_state(module, trained(made(lightning.Lightning), lightning))


@pytest.mark.parametrize("part", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_mixed_precision(lightning, part):
    module = made(lightning.Lightning)
    if part:
        module.net = rematerialized(module.net)
    else:
        module = rematerialized(module)
    trained(module, lightning, precision="bf16-mixed")
    assert not torch.is_autocast_enabled("cpu")
    assert_planned(module.net if part else module)
    assert_moved_alike(
        module,
        trained(made(lightning.Lightning), lightning, precision="bf16-mixed"),
        made(lightning.Lightning),
    )
