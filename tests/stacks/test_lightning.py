"""Lightning trains a module that is rematerialized as a whole, or holds one that is."""

import pytest
import torch
from stack_cases.models import (
    assert_moved_alike,
    assert_planned,
    assert_same_state,
    rematerialized,
)

from loop_cases.frameworks import Lightning, fitted
from loop_cases.models import batch, made, square

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # the batches are few
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),  # not of this code
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),  # not of this code
]


class ForwardModule(Lightning):
    """A training step that calls `self.forward`, without the hooks of the module."""

    def training_step(self, x, _):
        return square(self.forward(x))


def trained(module, **options):
    return fitted(module, [batch(step) for step in range(3)], **options)


@pytest.mark.parametrize("kind", [Lightning, ForwardModule])
def test_a_whole_module(kind):
    module = trained(rematerialized(made(kind)))
    assert_planned(module)
    assert_same_state(module, trained(made(kind)))


def test_a_whole_module_planned_before_the_training():
    module = rematerialized(made(Lightning), batch())
    plan = module.plan
    trained(module)
    assert module.plan is plan
    assert_planned(module)
    assert_same_state(module, trained(made(Lightning)))


@pytest.mark.parametrize("part", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_mixed_precision(part):
    module = made(Lightning)
    if part:
        module.net = rematerialized(module.net)
    else:
        module = rematerialized(module)
    trained(module, precision="bf16-mixed")
    assert not torch.is_autocast_enabled("cpu")
    assert_planned(module.net if part else module)
    assert_moved_alike(module, trained(made(Lightning), precision="bf16-mixed"), made(Lightning))
