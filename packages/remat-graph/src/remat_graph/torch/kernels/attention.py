"""Attention on the CPU, whose kernel takes each row to lie in one piece, and does not look.

Which kernel runs is chosen as a graph is traced, by how tensors are thought to lie. Where one lies
otherwise, as what batch norm makes of a transposed input, the kernel would read other memory.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["attention", "attention_backward"]

aten = torch.ops.aten


def attention(*args: Any, **kwargs: Any) -> Any:
    """Run the kernel on rows that lie in one piece."""
    rows = map(_in_one_piece, args)
    return aten._scaled_dot_product_flash_attention_for_cpu.default(*rows, **kwargs)


def attention_backward(*args: Any, **kwargs: Any) -> Any:
    """Run its backward in the same way."""
    rows = map(_in_one_piece, args)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(*rows, **kwargs)


def _in_one_piece(item: Any) -> Any:
    is_read_in_rows = isinstance(item, torch.Tensor) and item.dim() == 4
    return item.contiguous() if is_read_in_rows and item.stride(-1) != 1 else item
