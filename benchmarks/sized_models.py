"""Models whose batches are of another size each time: text, graphs, images, boxes, sound."""

from __future__ import annotations

import copy
import random
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.functional import (
    cross_entropy,
    ctc_loss,
    gelu,
    grid_sample,
    gumbel_softmax,
    scaled_dot_product_attention,
    smooth_l1_loss,
)

__all__ = [
    "Annealed",
    "Boxes",
    "Decoder",
    "GraphNet",
    "Images",
    "Language",
    "Molecules",
    "PyG",
    "Speech",
]


class Layer(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give tokens, batch x length x width, after the layer."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        after: torch.Tensor = x + self.down(gelu(self.up(self.norms[1](x))))
        return after


class Language(nn.Module):
    """A language model; one that is `masked` has its head on the masked tokens alone."""

    def __init__(
        self, *, masked: bool, width: int = 256, layers: int = 4, words: int = 2000
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.Sequential(*(Layer(width, causal=not masked) for _ in range(layers)))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Give the loss over labels that are not -100."""
        states = self.layers(self.tokens(ids))
        if self.layers[0].causal:
            return cross_entropy(self.head(states).flatten(0, 1), labels.flatten())
        chosen = labels != -100
        return cross_entropy(self.head(states[chosen]), labels[chosen])


class GraphNet(nn.Module):
    """Messages along the edges of a graph, added up by node."""

    def __init__(self, width: int = 128, rounds: int = 4) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.update = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Give a loss over the nodes."""
        source, target = edges
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(torch.cat([nodes[source], nodes[target]], -1)).relu()
            gathered = torch.zeros_like(nodes).index_add(0, target, sent)
            nodes = nodes + update(torch.cat([nodes, gathered], -1)).relu()
        return nodes.square().mean()


class Annealed(nn.Module):
    """A choice by Gumbel's softmax, whose temperature falls in each step."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        parts = [nn.Linear(width, width), nn.GELU()] * 3
        self.body = nn.Sequential(*(copy.deepcopy(part) for part in parts))

    def forward(self, x: torch.Tensor, temperature: float) -> torch.Tensor:
        """Give a loss over what was chosen."""
        return gumbel_softmax(self.body(x), tau=temperature).square().mean()


class Images(nn.Module):
    """Convolutions over images of any size."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
        for _ in range(4):
            convolutions += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.body, self.head = nn.Sequential(*convolutions), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give a loss over the means of all channels."""
        loss: torch.Tensor = self.head(self.body(x).mean((2, 3))).square().mean()
        return loss


class _OfMolecules(nn.Module):
    """Graphs in one batch as PyG lays them out: messages over edges, and a sum for each graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.edge = nn.Embedding(40, width), nn.Linear(8, width)
        self.head = nn.Linear(width, 1)

    def messages(
        self, x: torch.Tensor, edges: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        """Give the nodes after all rounds."""
        raise NotImplementedError

    def forward(
        self,
        atoms: torch.Tensor,
        edges: torch.Tensor,
        features: torch.Tensor,
        graph: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Give the squared error of one number for each graph."""
        x = self.messages(self.embed(atoms), edges, features)
        pooled = x.new_zeros(len(targets), x.shape[-1]).index_add(0, graph, x)
        loss: torch.Tensor = (self.head(pooled)[:, 0] - targets).square().mean()
        return loss


class Molecules(_OfMolecules):
    """Attention over edges."""

    def __init__(self, width: int = 128, rounds: int = 3) -> None:
        super().__init__(width)
        self.score = nn.ModuleList(nn.Linear(width, 4) for _ in range(rounds))
        self.value = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))

    def messages(
        self, x: torch.Tensor, edges: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        """Give the nodes after all rounds."""
        source, target = edges
        for score, value, norm in zip(self.score, self.value, self.norm, strict=True):
            sent = gelu(x[source] + self.edge(features))
            weight = score(sent).sigmoid()
            total = x.new_full((len(x), 4), 1e-6).index_add(0, target, weight)
            given = value(sent).unflatten(-1, (4, -1)) * (weight / total[target])[..., None]
            x = norm(x + torch.zeros_like(x).index_add(0, target, given.flatten(1)))
        return x


class Boxes(nn.Module):
    """Boxes cut out of an image's features, classified and moved: a detector's second half."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU()]
        for _ in range(5):
            convolutions += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*convolutions)
        self.hidden, self.kind = nn.Linear(49 * width, 64), nn.Linear(64, 21)
        self.move = nn.Linear(64, 4)

    def forward(
        self, image: torch.Tensor, boxes: torch.Tensor, kinds: torch.Tensor
    ) -> torch.Tensor:
        """Give the loss over boxes, as centre and half of the size from -1 to 1."""
        features = self.body(image)
        steps = torch.linspace(-1, 1, 7)
        grid = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1)
        places = boxes[:, None, None, :2] + grid * boxes[:, None, None, 2:]
        cut = grid_sample(features, places.flatten(0, 1)[None], align_corners=False)
        cut = cut.view(1, -1, len(boxes), 49).transpose(1, 2).flatten(2)[0]
        hidden = self.hidden(cut).relu()
        moved = smooth_l1_loss(self.move(hidden), boxes)
        loss: torch.Tensor = cross_entropy(self.kind(hidden), kinds) + moved
        return loss


class Speech(nn.Module):
    """Convolutions over sound, and CTC against a text: both of any length."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 3, padding=1)
        self.layers = nn.Sequential(*(Layer(width, causal=False) for _ in range(2)))
        self.head = nn.Linear(width, 32)

    def forward(
        self, sound: torch.Tensor, text: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Give the loss; `lengths` are those of sounds and texts."""
        x = self.layers(gelu(self.first(sound)).transpose(1, 2))
        chances = self.head(x).log_softmax(-1).transpose(0, 1)
        return ctc_loss(chances, text, lengths[0], lengths[1])


class Decoder(nn.Module):
    """A recurrent decoder that reads, at each position, the text or what it said itself."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(500, width), nn.GRUCell(width, width)
        self.head = nn.Linear(width, 500)

    def forward(self, text: torch.Tensor, share: float) -> torch.Tensor:
        """Give the loss over a text, of which about a `share` is read."""
        state, token = self.tokens(text[:, 0]), text[:, 0]
        loss: torch.Tensor = state.new_zeros(())
        for position in range(1, text.shape[1]):
            state = self.cell(self.tokens(token), state)
            said = self.head(state)
            loss = loss + cross_entropy(said, text[:, position])
            reads = torch.rand(len(text)) * random.random() < share
            token = torch.where(reads, text[:, position], said.argmax(-1))
        return loss


class PyG(_OfMolecules):
    """GINE, GAT and PNA of torch_geometric, one after the other."""

    def __init__(self, width: int = 64) -> None:
        super().__init__(width)
        layers: Any = import_module("torch_geometric.nn")
        mixed = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.first = layers.GINEConv(mixed)
        self.second = layers.GATv2Conv(
            width, width // 4, heads=4, edge_dim=width, add_self_loops=False
        )
        degrees = torch.tensor([0, 0, 40, 40, 20])
        self.third = layers.PNAConv(
            width, width, ["mean", "max", "std"], ["identity"], degrees, width
        )

    def messages(
        self, x: torch.Tensor, edges: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        """Give the nodes after all layers."""
        of_edges = self.edge(features)
        for layer in (self.first, self.second, self.third):
            x = x + layer(x, edges, of_edges).relu()
        return x
