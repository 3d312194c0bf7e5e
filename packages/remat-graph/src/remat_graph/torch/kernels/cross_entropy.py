"""Cross entropy of scores and targets, and its gradient, without log-probabilities of all classes.

torch writes them in the forward, reads them in the backward, and makes two more tensors of their
size there. Here a few rows are taken at a time, which stay in the cache, and made again from the
scores in the backward. What is left is the gradient, in the buffer of the scores if these end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from remat_graph.torch.calls import TensorFacts
from remat_graph.torch.kernels.unit_tangent import total_weight

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_over",
    "rows_at_once",
    "workspace_bytes",
]

aten = torch.ops.aten

_NONE, _MEAN = 0, 1  # at::Reduction
_CACHED_BYTES = 1 << 20  # for each thread of a CPU
_LAUNCHED_BYTES = 1 << 26  # of another device, where each kernel is launched
_SMALL = 4096  # numbers, sums and blocks of an allocator


def rows_at_once(scores: TensorFacts, dtype: torch.dtype) -> int:
    """Give how many rows are worked on at a time, with as many threads as there are now."""
    cached = _CACHED_BYTES * torch.get_num_threads()
    most = cached if scores.device.type == "cpu" else _LAUNCHED_BYTES
    return max(1, most // (scores.shape[1] * dtype.itemsize))


def workspace_bytes(scores: TensorFacts, dtype: torch.dtype, at_once: int) -> int:
    """Bound what either function takes beside what it is given and gives."""
    rows, classes = scores.shape
    buffers = 1 if scores.dtype is dtype else 2
    return buffers * min(rows, at_once) * classes * dtype.itemsize + 64 * rows + _SMALL


def cross_entropy(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
    dtype: torch.dtype, at_once: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Give what `nll_loss` does of the log-softmax of scores [rows, classes], and its total weight.

    It is computed in `dtype`, so many rows `at_once`; `reduction` is the number that
    `nll_loss_forward` takes.
    """
    terms = scores.new_empty(len(scores), dtype=dtype)
    for start, stop in _parts(len(scores), at_once):
        rows = aten._log_softmax(scores[start:stop].to(dtype), 1, False)
        own = aten.nll_loss_forward(rows, target[start:stop], weight, _NONE, ignore_index)[0]
        terms[start:stop] = own
        del rows
    if reduction == _NONE:
        return terms, terms.new_zeros(())
    total = total_weight(target, weight, ignore_index, dtype)
    loss = terms.sum()
    return (loss / total if reduction == _MEAN else loss), total


def cross_entropy_backward(
    scores: Tensor, grad: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
    ignore_index: int, total: Tensor, dtype: torch.dtype, at_once: int,
) -> Tensor:  # fmt: skip
    """Give the gradient of the scores, in their type, for `grad` of the loss."""
    into = torch.empty_like(scores)
    settings = target, weight, reduction, ignore_index, total, dtype, at_once
    return _backward(into, scores, grad, *settings)


def cross_entropy_over(scores: Tensor, *args: Any) -> Tensor:
    """Do as `cross_entropy_backward`, in the buffer of the scores."""
    return _backward(scores, scores, *args)


def _backward(
    into: Tensor, scores: Tensor, grad: Tensor, target: Tensor, weight: Tensor | None,
    reduction: int, ignore_index: int, total: Tensor, dtype: torch.dtype, at_once: int,
) -> Tensor:  # fmt: skip
    """Write the gradient; `total` is the weight of all targets, by which a mean divides."""
    is_ignored = target == ignore_index
    place = target.masked_fill(is_ignored, 0).long().unsqueeze(1)
    factor = grad.expand(len(scores)).unsqueeze(1)
    if weight is not None:
        factor = factor * weight[place]
    if reduction == _MEAN:
        factor = factor / total
    factor = factor.masked_fill(is_ignored.unsqueeze(1), 0)
    for start, stop in _parts(len(scores), at_once):
        rows = aten._softmax(scores[start:stop].to(dtype), 1, False)
        own = place[start:stop]
        rows.scatter_(1, own, rows.gather(1, own).sub_(1))
        into[start:stop].copy_(rows.mul_(factor[start:stop]))
        del rows
    return into


def _parts(count: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Cut so many rows into parts."""
    return ((start, min(count, start + at_once)) for start in range(0, count, at_once))
