"""The other way in: `remat` as the back end of `torch.compile`."""

import copy
from contextlib import nullcontext

import torch
from torch import nn

import remat


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def train(model: nn.Module) -> tuple[list[float], int]:
    """Give the losses of a few steps, and the bytes that the last took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for step in range(3):
        x = torch.randn(512, 64)
        optimizer.zero_grad()
        with remat.measure_peak() if step == 2 else nullcontext() as peak:  # planned by then
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, peak.peak_bytes


def main() -> None:
    model = build()
    plain_losses, plain_peak = train(copy.deepcopy(model))
    budget = int(0.7 * plain_peak)
    losses, peak = train(torch.compile(model, backend="remat", options={"budget": budget}))
    print(f"{peak:,} bytes within {budget:,} (plain {plain_peak:,})")
    assert losses == plain_losses
    assert peak <= budget


if __name__ == "__main__":
    main()
