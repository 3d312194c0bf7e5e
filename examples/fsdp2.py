"""FSDP2 by blocks, each one region of the plan: `torchrun --nproc-per-node 2 examples/fsdp2.py`."""

import copy

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

import remat


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(model: Blocks) -> list[float]:
    """Shard by blocks; give the losses of a few steps on the batches of this rank."""
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(distributed.get_rank())
    losses = []
    for _ in range(5):
        x = torch.randn(512, 32)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = Blocks()
    plain_losses = train(copy.deepcopy(model))
    model = remat.rematerialize(model, budget="1.2 MiB", regions="layers.*")  # first, then sharded
    assert train(model) == plain_losses
    if distributed.get_rank() == 0:
        print(model.plan)
    assert model.plan.recomputations
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes  # the first steps record it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
