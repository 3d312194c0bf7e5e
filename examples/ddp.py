"""DDP around a rematerialized model: `torchrun --nproc-per-node 2 examples/ddp.py`."""

import copy

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import remat


def train(model: nn.Module) -> list[float]:
    """Give the losses of a few steps on the batches of this rank."""
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(distributed.get_rank())
    losses = []
    for _ in range(3):
        x = torch.randn(128, 32)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()  # gradients are reduced while the rest is computed
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Dropout(0.1))
    plain_losses = train(copy.deepcopy(model))
    model = remat.rematerialize(model, budget=0.7)  # first, then wrapped
    assert train(model) == plain_losses
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    if distributed.get_rank() == 0:
        print(model.plan)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
