"""What a call's tensors say: where they are, and whether eager code computed them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from remat_graph.torch import flatten

__all__ = ["device_of", "is_computed", "requires_grad"]


def device_of(inputs: Iterable[Any]) -> torch.device:
    """Find the first device that is no CPU, if there is one."""
    devices = (item.device for item in inputs if isinstance(item, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def requires_grad(item: Any) -> bool:
    """Whether it is a tensor that something differentiates."""
    return isinstance(item, torch.Tensor) and item.requires_grad


def is_computed(tensors: Any, inputs: Any) -> bool:
    """Whether any of these has a gradient, is no leaf, and is no view of the inputs."""
    storages = set(map(_storage, flatten(inputs)[0]))
    return any(
        tensor.grad_fn is not None and _storage(tensor) not in storages
        for tensor in flatten(tensors)[0]
    )


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    storage: int = tensor.untyped_storage()._cdata
    return storage
