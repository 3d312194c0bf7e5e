"""A small language model whose batches are of other sizes within one step."""

from __future__ import annotations

import copy
import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import remat

__all__ = ["Words", "are_eagers", "batch"]


class Words(nn.Module):
    """A small language model: the sum of losses over all but the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids, (rows, length), to the loss."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + gelu(layer(x))
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(draw: random.Random) -> torch.Tensor:
    """Draw ids, (rows, length), of a size of their own."""
    rows, length = draw.randint(2, 6), draw.randint(8, 40)
    generator = torch.Generator().manual_seed(draw.randint(0, 1000))
    return torch.randint(0, 40, (rows, length), generator=generator)


def are_eagers(rank: int, steps: int) -> bool:
    """Train beside plain DDP; say whether all gradients have the same bits."""
    torch.manual_seed(0)
    eager = Words()
    model = copy.deepcopy(eager)
    run = remat.rematerialize(model, budget=2**20, limit_seconds=0.1)
    parallel = nn.parallel.DistributedDataParallel(run)
    plain, draw = nn.parallel.DistributedDataParallel(eager), random.Random(rank)
    same = True
    for _ in range(steps):
        ids = batch(draw)
        for each in (plain, parallel):
            each.zero_grad()
            each(ids).backward()
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        same = same and all(torch.equal(one.grad, other.grad) for one, other in pairs)
    return same
