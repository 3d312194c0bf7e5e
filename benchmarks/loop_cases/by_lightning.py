"""Training by Lightning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import lightning
import torch
from torch import Tensor

from loop_cases.models import Blocks, made, square
from loop_cases.run import Kept, Run, state

__all__ = ["Lightning", "fitted", "trained"]

Step = Callable[[], AbstractContextManager[Any]]


class Lightning(lightning.LightningModule):  # type: ignore[misc]
    """A training step that calls `self`."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.net: Any = Blocks(width, depth)

    def forward(self, x: Tensor) -> Tensor:
        """Give four numbers for each row."""
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, x: Tensor, _: int) -> Tensor:
        """Give the loss of a batch."""
        loss = square(self(x))
        self.log("loss", loss, prog_bar=False, logger=False)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Take SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


class _Steps(lightning.Callback):  # type: ignore[misc]
    """Enters `step` around each forward and backward."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.entered = ExitStack()

    def on_train_batch_start(self, *_: Any) -> None:
        self.entered.enter_context(self.step())

    def on_after_backward(self, *_: Any) -> None:
        self.entered.close()


def fitted(module: Any, data: list[Tensor], step: Step = nullcontext, **options: Any) -> Any:
    """Train by Lightning, and give the module back; `options` are of its `Trainer`."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=len(data), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[_Steps(step)], **options,
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    torch.manual_seed(1)
    trainer.fit(module, loader)
    assert trainer.global_step == len(data)
    return module


def trained(run: Run, inner: bool) -> Kept:
    """Train a LightningModule that is rematerialized, or holds a module that is."""
    module = made(Lightning, run.size.width, run.size.depth)
    if inner:
        module.net = run.wrap(module.net)
    else:
        module = run.wrap(module)
    data = [run.batch(step) for step in range(run.steps)]
    return state(fitted(module, data, run.step))
