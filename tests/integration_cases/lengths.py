"""A language model over sentences of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

WORDS, WIDTH = 1000, 16


class Layer(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.functional.dropout(mixed.transpose(1, 2).flatten(2), self.rate)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Language(nn.Module):
    """A language model with shifted labels, some of which are ignored."""

    def __init__(self, *, tied: bool = False, rate: float = 0.0, both: bool = False) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.Sequential(Layer(rate))
        self.head, self.both = nn.Linear(WIDTH, WORDS, bias=False), both
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.layers(self.words(ids)))
        shifted = pad(labels[:, 1:], (0, 1), value=-100)
        loss = cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        return (loss, logits) if self.both else loss


def words(batch: int, length: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (batch, length), generator=generator)
    return ids, ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)


Inputs = tuple[torch.Tensor, ...]
