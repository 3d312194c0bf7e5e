"""`parameter.data = new` in a graph of TorchDynamo's, as a write of `new` into the parameter.

Momentum encoders and initialisations by data do so. AOTAutograd's joint graphs have no tensors that
get other memory. A write is the same where nothing else has the memory of either from then on; then
the parameter keeps its own, and optimizers and shards that hold it see the new numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.failures import noted_line
from remat_graph.torch.tracing.provenance import NotedInterpreter

__all__ = ["DataWriter"]


class DataWriter(NotedInterpreter):
    """Runs a graph with writes in place of `x.data = y`."""

    _given: frozenset[int] = frozenset()

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the graph, which is done several times for a trace."""
        self._given = _storages(args)
        return super().run(*args, **options)

    def run_node(self, n: Node) -> Any:
        """Run a node.

        Raises:
            CaptureError: if a write would not be the same, with the line.
        """
        if n.target is torch.Tensor.set_ and len(n.args) == 2:
            into, new = (self.env[node] for node in n.args if isinstance(node, Node))
            if _are_the_same(into, new):  # as by `module.to(device)` where it is already
                return into
            if not self._can_be_written(n, into, new):
                raise CaptureError(
                    f"forward gives a tensor other memory by `.data =`{noted_line(n)}, which has "
                    f"another shape or type, or is used besides; write into it, as by "
                    f".data.copy_(new) or .data.mul_(0.99)"
                )
            return into.copy_(new)
        return super().run_node(n)

    def _can_be_written(self, n: Node, into: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether a write is the same: what is in `env` is used later, or by this node alone."""
        looks = [(each.shape, each.dtype, each.device, each.layout) for each in (into, new)]
        done = self.user_to_last_uses.get(n, [])
        later = (value for node, value in self.env.items() if node not in done)
        used = _storages(value for value in later if value is not into)
        return (
            looks[0] == looks[1]
            and used.isdisjoint(_storages([into, new]))
            and self._given.isdisjoint(_storages([new]))
        )


def _are_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of the same numbers in the same memory."""
    looks = [
        (each.shape, each.stride(), each.storage_offset(), each.dtype) for each in (one, other)
    ]
    return looks[0] == looks[1] and _storages([one]) == _storages([other])


def _storages(items: Iterable[Any]) -> frozenset[int]:
    return frozenset(
        item.untyped_storage()._cdata
        for item in pytree.tree_leaves(list(items))
        if isinstance(item, torch.Tensor) and item.layout is torch.strided
    )
