"""Writes by a mask, `x[mask] = values`: their backward has known sizes alone.

Its formula, in autograd, reads the gradient at the mask, which has a size that data decide, before
the engine adds that up to the size of the values. Here both are one operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._C import DispatchKey

from remat_graph.torch.kernels.masked_writes import gradient_of_values, is_mask
from remat_graph.torch.tracing.overriding import overridden

__all__ = ["masked_writes_of_known_size"]

_index = torch.ops.aten.index.Tensor
_WRITES = ("IndexPutBackward0", "torch::autograd::CopySlices")  # the second: into a view
_VALUES = 1  # in either the edge to what was written


def masked_writes_of_known_size() -> contextlib.AbstractContextManager[None]:
    """Let what this thread traces give the gradient of what a mask writes by one operator."""
    return overridden(_index, _read, DispatchKey.Autograd)


def _read(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    node = torch._C._current_autograd_node()
    result: torch.Tensor
    if node is not None and node.name() in _WRITES and any(map(is_mask, indices)):
        values, which = cast("tuple[Any, int]", node.next_functions[_VALUES])
        result = gradient_of_values(tensor, indices, values._input_metadata[which].shape)
    else:
        result = _index._op_dk(DispatchKey.Autograd, tensor, indices)
    return result
