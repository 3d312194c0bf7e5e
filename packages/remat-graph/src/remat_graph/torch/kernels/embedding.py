"""The gradient of an embedding, added to another gradient of its table without a table of its own.

A language model whose head is its embedding has two gradients of one table: autograd makes both,
and then the sum. Here the rows that were looked up are added to the other one. Each row is summed
as eager sums it, and then added once, so the bits are those of eager. Nothing waits for data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from remat_graph.torch.calls import Call, TensorFacts

__all__ = ["add_embedding_gradient", "add_embedding_gradient_over", "workspace_of_rows"]

aten = torch.ops.aten

_SCHEMA = (
    "add_embedding_gradient(Tensor total, Tensor grad, Tensor indices, SymInt padding_idx, "
    "bool scale_grad_by_freq) -> Tensor"
)
_NUMBERS_BYTES = 64  # for each index, while they are numbered
_SMALL = 4096  # blocks of an allocator

_library = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(_SCHEMA)  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "add_embedding_gradient", "CompositeExplicitAutograd")
def _run(
    total: Tensor, grad: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    return add_embedding_gradient_over(
        total.clone(), grad, indices, padding_idx, scale_grad_by_freq
    )


@torch.library.register_fake("remat::add_embedding_gradient", lib=_library)  # type: ignore[untyped-decorator]
def _predict(total: Tensor, *_: object) -> Tensor:
    return torch.empty_like(total)


add_embedding_gradient = torch.ops.remat.add_embedding_gradient.default


def add_embedding_gradient_over(
    total: Tensor, grad: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Add to `total` [words, width] the gradient `grad` [*, width] of its rows at `indices` [*].

    As many rows hold the sums as there are indices; of as many indices as words, a whole table.
    """
    count = indices.numel()
    if count == 0:
        return total.add_(0)
    if count >= len(total):
        settings = len(total), padding_idx, scale_grad_by_freq
        return total.add_(aten.embedding_dense_backward(grad, indices, *settings))
    words, places = _numbered(indices.flatten())
    rows = aten.embedding_dense_backward(
        grad, places.view(indices.shape), count, -1, scale_grad_by_freq
    )
    if padding_idx >= 0:
        rows.masked_fill_((words == padding_idx).unsqueeze(1), 0)
    total.add_(0)  # to all other rows eager adds zeros, which -0.0 does not outlive
    return total.index_add_(0, words, rows)


def _numbered(indices: Tensor) -> tuple[Tensor, Tensor]:
    """List the words among indices, each once and in order, and where each index has its word.

    Both are as many as there are indices: behind the last word are zeros.
    """
    ordered, order = indices.sort(stable=True)
    numbers = torch.zeros_like(ordered, dtype=torch.int64)
    numbers[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    places = torch.empty_like(numbers).scatter_(0, order, numbers)
    words = torch.zeros_like(ordered).scatter_(0, numbers, ordered)
    return words, places


def workspace_of_rows(facts: Mapping[str, TensorFacts], call: Call) -> int:
    """Predict what `add_embedding_gradient` takes beside what it reads and gives.

    torch copies a gradient that is not contiguous, as one that is expanded.
    """
    total, grad, indices = (facts[item.name] for item in call.args[:3])
    count, row_bytes = math.prod(indices.shape), total.shape[1] * total.dtype.itemsize
    is_contiguous = grad.is_whole and grad.stride == tuple(sorted(grad.stride, reverse=True))
    rows = min(count, total.shape[0]) + count * (not is_contiguous)
    return rows * row_bytes + _NUMBERS_BYTES * count + _SMALL
