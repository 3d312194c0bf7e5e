"""Lightning: a callback that rematerializes a part of the module before the training begins."""

import copy
import warnings

import torch
from lightning import Callback, LightningModule, Trainer
from torch import nn

import remat


class Rematerialize(Callback):
    """Trains the submodule of a name within a budget."""

    def __init__(self, name: str, budget: int | float | str) -> None:
        self.name, self.budget = name, budget

    def setup(self, _: Trainer, module: LightningModule, stage: str) -> None:
        if stage == "fit":
            part = remat.rematerialize(module.get_submodule(self.name), budget=self.budget)
            module.set_submodule(self.name, part)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())))

    def training_step(self, x: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: Classifier, *callbacks: Callback) -> Classifier:
    trainer = Trainer(
        accelerator="cpu", max_steps=4, callbacks=list(callbacks), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.randn(4, 128, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return module


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    module = Classifier()
    plain = fit(copy.deepcopy(module))
    fit(module, Rematerialize("net", budget=0.7))
    print(module.net.plan)
    assert all(map(torch.equal, module.parameters(), plain.parameters()))
    assert module.net.plan.measured_peak_bytes <= module.net.plan.budget_bytes


if __name__ == "__main__":
    main()
