"""Models whose batches are of other sizes each time, and what their tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, gelu, relu, scaled_dot_product_attention

from remat_graph.torch import SizedCapture, trace_sizes

__all__ = [
    "MODELS",
    "Attention",
    "GraphNet",
    "Images",
    "Recurrent",
    "captures_of",
    "gradients",
    "graph",
    "graphs_of",
    "image",
    "model_of",
    "sequence",
    "tokens",
]


class Attention(nn.Module):
    """Layers of causal attention over learned positions, with a loss over all tokens."""

    def __init__(self, rate: float = 0.0, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(16), "qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)}
            )
            for _ in range(depth)
        )
        self.head, self.rate = nn.Linear(16, 50), rate

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(length))
        for layer in self.layers:
            parts = layer["qkv"](layer["norm"](x)).view(batch, length, 3, 2, 8)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).reshape(batch, length, 16)
            x = x + dropout(layer["out"](gelu(x)), self.rate, self.training)
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class GraphNet(nn.Module):
    """Messages along edges, added up by node: nodes and edges are of any number."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for _ in range(2):
            messages = relu(self.message(torch.cat([nodes[source], nodes[target]], -1)))
            gathered = torch.zeros_like(nodes).index_add(0, target, messages)
            nodes = nodes + relu(self.update(torch.cat([nodes, gathered], -1)))
        return nodes.square().mean()


class Images(nn.Module):
    """A convolution, its batch norm, a pooling, and one more, over images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh().mean((2, 3)).square().sum()


class Recurrent(nn.Module):
    """A loop over time in Python: as many steps as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
        return state.square().mean()


def tokens(length: int, batch: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return (torch.randint(0, 50, (batch, length), generator=generator),)


def graph(nodes: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(nodes)
    edges = torch.randint(0, nodes, (2, 3 * nodes + nodes % 5), generator=generator)
    return torch.randn(nodes, 8, generator=generator), edges


def image(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 3, size, size + 3, generator=torch.Generator().manual_seed(size)),)


def sequence(length: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, length, 4, generator=torch.Generator().manual_seed(length)),)


MODELS: dict[
    str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]], list[int]]
]
MODELS = {
    "attention": (Attention, tokens, [12, 20, 17, 33, 9, 20, 50]),
    "dropout": (lambda: Attention(0.3, depth=1), tokens, [12, 20, 17, 33, 9]),
    "graph": (GraphNet, graph, [30, 41, 25, 60, 33]),
    "images": (Images, image, [24, 32, 20, 27, 40]),
}


def gradients(
    model: nn.Module, run: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = run(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def model_of(model: nn.Module) -> nn.Module:
    """Give a model that runs in eager, with the same parameters."""
    forward = type(model).forward

    class Eager(nn.Module):
        def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
            return forward(model, *inputs)

    return Eager()


def graphs_of(
    model: nn.Module, *calls: tuple[torch.Tensor, ...]
) -> list[tuple[torch.fx.GraphModule, list[tuple[Any, ...]]]]:
    """Give the graphs of TorchDynamo for calls of a model, and what each graph reads in them."""
    found: list[tuple[torch.fx.GraphModule, list[tuple[Any, ...]]]] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> Any:
        read: list[tuple[Any, ...]] = []
        found.append((graph, read))

        def run(*inputs: Any) -> Any:
            read.append(inputs)
            return graph(*inputs)

        return run

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=noted)
    for inputs in calls:
        compiled(*inputs)
    return found


def captures_of(model: nn.Module, *calls: tuple[torch.Tensor, ...]) -> list[SizedCapture]:
    """Capture calls of a model by one trace with symbols.

    The first is traced as it comes, and left out.
    """
    _, (graph, read), *_ = graphs_of(model, *calls)
    region = trace_sizes(graph, read[0])
    return [region.capture(inputs, costs="estimate") for inputs in read]
