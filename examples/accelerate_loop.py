"""Accelerate, with gradients accumulated over two batches: prepare the rematerialized model."""

import copy

import torch
from accelerate import Accelerator
from torch import nn

import remat


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(32, 4))


def train(model: nn.Module) -> list[float]:
    """Give the losses of a few steps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.randn(4, 128, 32, generator=torch.Generator().manual_seed(1))
    model, optimizer, batches = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        torch.utils.data.DataLoader(data, batch_size=None),
    )
    torch.manual_seed(2)
    losses = []
    for x in batches:
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    model = build()
    plain_losses = train(copy.deepcopy(model))
    model = remat.rematerialize(model, budget=0.7)
    assert train(model) == plain_losses
    print(model.plan)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


if __name__ == "__main__":
    main()
