"""Lightning trains a module that is rematerialized as a whole, or holds one that is."""

import logging

import lightning
import pytest
import torch
from stack_cases.models import (
    Blocks,
    assert_moved_alike,
    assert_planned,
    assert_same_state,
    batch,
    made,
    rematerialized,
    square,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # the batches are few
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),  # not of this code
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),  # not of this code
]


class Module(lightning.LightningModule):
    """A training step that calls `self`."""

    def __init__(self):
        super().__init__()
        self.net = Blocks()

    def forward(self, x):
        return self.net(x)

    def training_step(self, x, _):
        loss = square(self(x))
        self.log("loss", loss, prog_bar=False, logger=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ForwardModule(Module):
    """A training step that calls `self.forward`, without the hooks of the module."""

    def training_step(self, x, _):
        return square(self.forward(x))


def trained(module, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    data = torch.utils.data.DataLoader([batch(step) for step in range(3)], batch_size=None)
    torch.manual_seed(1)
    trainer.fit(module, data)
    assert trainer.global_step == 3
    return module


@pytest.mark.parametrize("kind", [Module, ForwardModule])
def test_a_whole_module(kind):
    module = trained(rematerialized(made(kind)))
    assert_planned(module)
    assert_same_state(module, trained(made(kind)))


def test_a_whole_module_planned_before_the_training():
    module = rematerialized(made(Module), batch())
    plan = module.plan
    trained(module)
    assert module.plan is plan
    assert_planned(module)
    assert_same_state(module, trained(made(Module)))


def test_a_module_planned_in_part():
    module = made(Module)
    module.net = rematerialized(module.net)
    trained(module)
    assert_planned(module.net)
    assert_same_state(module, trained(made(Module)))


@pytest.mark.parametrize("part", [False, True])
def test_mixed_precision(part):
    module = made(Module)
    if part:
        module.net = rematerialized(module.net)
    else:
        module = rematerialized(module)
    trained(module, precision="bf16-mixed")
    assert not torch.is_autocast_enabled("cpu")
    assert_planned(module.net if part else module)
    assert_moved_alike(module, trained(made(Module), precision="bf16-mixed"), made(Module))
