"""Small models, with something to recompute, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = [
    "LARGE",
    "SMALL",
    "Block",
    "Blocks",
    "Counting",
    "Heads",
    "Size",
    "batch",
    "gpt2",
    "made",
    "square",
    "tokens",
]

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Size:
    """How large models and batches are: features, blocks and rows; words of a sentence."""

    width: int
    depth: int
    rows: int
    words: int


SMALL = Size(width=16, depth=3, rows=32, words=16)
LARGE = Size(width=128, depth=6, rows=256, words=64)


class Block(nn.Module):
    """A residual block with something cheap to compute again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.leave = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the features of each row: (rows, width) to the same."""
        return x + self.leave(torch.tanh(self.enter(self.norm(x))))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """A few blocks and a head."""

    def __init__(self, width: int = 16, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Give four numbers for each row."""
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(x))  # type: ignore[no-any-return]


class Heads(nn.Module):
    """Two heads on one trunk."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.left, self.right = nn.Linear(width, 4), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give four numbers for each row, twice."""
        x = self.trunk(x)
        return self.left(x), self.right(x)


class Counting(nn.Module):
    """Counts its calls, on itself and on what it holds."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.steps = 0
        inner: Any = Blocks(width, depth)
        inner.steps = 0
        self.inner = inner
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Give four numbers for each row."""
        self.steps += 1
        self.inner.steps += 1
        self.count.add_(1)
        return self.inner(x)  # type: ignore[no-any-return]


def made(kind: Callable[..., Module], *args: Any, **kwargs: Any) -> Module:
    """Make a model, the same one each time."""
    torch.manual_seed(0)
    return kind(*args, **kwargs).train()


def batch(step: int = 0, size: int = 32, width: int = 16) -> Tensor:
    """Make the batch of a step: (size, width)."""
    return torch.randn(size, width, generator=torch.Generator().manual_seed(step))


def tokens(step: int = 0, size: int = 4, length: int = 16) -> Tensor:
    """Make the tokens of a step: (size, length)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, 60, (size, length), generator=generator)


def square(output: Tensor) -> Tensor:
    """Take a loss that uses every number of one tensor."""
    return output.square().mean()


def gpt2(width: int = 32, depth: int = 2, **options: Any) -> Any:
    """Make a GPT-2 with dropout."""
    import transformers  # noqa: PLC0415

    config = transformers.GPT2Config(
        n_layer=depth, n_embd=width, n_head=2, vocab_size=64, n_positions=128, bos_token_id=0,
        eos_token_id=63, pad_token_id=0, **options,
    )  # fmt: skip
    model: Any = made(transformers.GPT2LMHeadModel, config)
    model.loss_type = "ForCausalLM"
    return model
