"""Outputs that are made when they are read, where compiled code is given one.

To TorchDynamo such a stand-in is no tensor, and `torch.is_tensor` says so in what it compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remat_exec import DeferredTensor

__all__ = ["reads_deferred"]


def reads_deferred(given: Mapping[str, Any]) -> bool:
    """Whether a frame has some among its variables, so that it is to run as it is.

    They are read here: from the next forward on they are made, if the budget has room.
    """
    found = [each for each in given.values() if issubclass(type(each), DeferredTensor)]
    for each in found:
        _ = each.made
    return bool(found)
