"""Models whose largest values bind, each as it is and as people slice it by hand.

A decoder returns its loss alone. `by_hand` says what of it a user has changed: blocks that are
checkpointed, a loss in slices, a feed-forward part in slices, or torch's own head and loss in one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zoo
from zoo import Example

__all__ = ["MODELS", "ByHand", "build"]

LOSS_SLICES = 16
MLP_SLICES = 8


@dataclass(frozen=True, slots=True)
class ByHand:
    """What a user has changed in a model to train it in less memory."""

    blocks: bool = False
    loss: Literal["whole", "slices", "linear_cross_entropy"] = "whole"
    mlp_in_slices: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder; `gated` is of Llama's kind, else of GPT-2's."""

    layers: int
    width: int
    heads: int
    hidden: int
    words: int
    batch: int
    tokens: int
    gated: bool = False
    tied: bool = False


class MLP(nn.Module):
    """The feed-forward part, gated as in Llama or plain as in GPT-2."""

    def __init__(self, shape: Shape, slices: int) -> None:
        super().__init__()
        bias = not shape.gated
        self.up = nn.Linear(shape.width, shape.hidden, bias=bias)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False) if shape.gated else None
        self.down = nn.Linear(shape.hidden, shape.width, bias=bias)
        self._slices = slices

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to tokens, a slice of them at a time where it is to."""
        if self._slices == 1:
            return self._of_some(x)
        parts = x.chunk(self._slices, dim=1)
        return torch.cat([checkpoint(self._of_some, p, use_reentrant=False) for p in parts], dim=1)

    def _of_some(self, x: Tensor) -> Tensor:
        up = self.up(x)
        inside = functional.gelu(up) if self.gate is None else functional.silu(self.gate(x)) * up
        result: Tensor = self.down(inside)
        return result


class Block(nn.Module):
    """Causal attention, and a feed-forward part, each after a norm and beside a skip."""

    def __init__(self, shape: Shape, slices: int) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.heads, bias = shape.heads, not shape.gated
        self.before, self.between = norm(shape.width), norm(shape.width)
        self.entry = nn.Linear(shape.width, 3 * shape.width, bias=bias)
        self.leave = nn.Linear(shape.width, shape.width, bias=bias)
        self.mlp = MLP(shape, slices)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to tokens."""
        batch, tokens, width = x.shape
        entry = self.entry(self.before(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = entry.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.leave(seen.transpose(1, 2).reshape(batch, tokens, width))
        result: Tensor = x + self.mlp(self.between(x))
        return result


class Decoder(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, shape: Shape, by_hand: ByHand) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(shape.tokens, shape.width)
        slices = MLP_SLICES if by_hand.mlp_in_slices else 1
        self.blocks = nn.ModuleList(Block(shape, slices) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        if shape.tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Give the mean cross-entropy of the next words."""
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_hand.blocks else block(x)
        rows, wanted = self.norm(x).flatten(0, 1), labels.flatten()
        if self.by_hand.loss == "linear_cross_entropy":
            options = nn.LinearCrossEntropyOptions()
            return functional.linear_cross_entropy(rows, self.head.weight, wanted, options=options)
        if self.by_hand.loss == "whole":
            return self._summed_loss(rows, wanted) / len(wanted)
        parts = zip(rows.chunk(LOSS_SLICES), wanted.chunk(LOSS_SLICES), strict=True)
        losses = [checkpoint(self._summed_loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(wanted)

    def _summed_loss(self, rows: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(rows), wanted, reduction="sum")


# layers, width, heads, hidden, words, batch, tokens
SHAPES = {
    "32,000 words": Shape(6, 256, 4, 1024, 32_000, 1, 1024),
    "GPT-2 of 50,257 words": Shape(4, 384, 6, 1536, 50_257, 1, 512, tied=True),
    "Qwen3-like, 151,936 words": Shape(4, 256, 4, 768, 151_936, 1, 512, gated=True, tied=True),
    "Llama-like, 4,096 tokens": Shape(2, 256, 4, 1536, 2000, 1, 4096, gated=True),
}
UNET = "U-Net"
MODELS = (*SHAPES, UNET)


def build(name: str, by_hand: ByHand, *, tiny: bool = False) -> Example:
    """Build a model as a user has changed it, with a batch; equal weights whatever was changed."""
    if name == UNET:
        return zoo.build("unet", "tiny" if tiny else "peers")
    shape = SHAPES[name]
    if tiny:
        shape = replace(shape, layers=2, width=32, heads=2, hidden=64, words=1000, tokens=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Decoder(shape, by_hand)
        ids, labels = torch.randint(shape.words, (2, shape.batch, shape.tokens))
    return Example(name, model, (ids, labels), {}, lambda loss: loss)
