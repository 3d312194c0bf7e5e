"""Made-up matrices that can be factorised, and made-up factors."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["with_pivots", "with_regular_matrix"]


def with_regular_matrix(matrix: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """Make the first of made-up arguments, of numbers in [0, 1), one that has an inverse.

    Its diagonal is larger than the rest of a row. A triangle of it is one of a positive definite
    matrix.
    """
    matrix.diagonal(dim1=-2, dim2=-1).add_(matrix.shape[-1])
    return (matrix, *others)


def with_pivots(factors: torch.Tensor, pivots: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """Let each row of made-up factors be exchanged with the first: rows count from 1."""
    return (factors, pivots.fill_(1), *others)
