"""The peak of a plain step of a graph of TorchDynamo's, by its code and what is captured of it.

Two regions of the same captured graph may differ in what eager code writes in place, and so in the
peak of a plain step: the code is part of the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec

from remat.cache.keys import costs_key, file_name
from remat.cache.store import Store
from remat_graph import canonical_hash

if TYPE_CHECKING:
    import torch

    from remat_graph.torch import Capture

__all__ = ["remembered_peak"]

_Size = Annotated[int, msgspec.Meta(ge=1)]


def remembered_peak(
    module: torch.nn.Module, captured: Capture, measure: Callable[[], int | None]
) -> int | None:
    """Give the peak in bytes of a plain step, measured here or in an earlier process."""
    from torch.fx import GraphModule  # noqa: PLC0415 - takes seconds

    store = Store.here()
    if store is None or not isinstance(module, GraphModule):
        return measure()
    key = {
        **costs_key(captured.program.device),
        "code": hashlib.sha256(module.code.encode()).hexdigest(),
        "graph": canonical_hash(captured.graph),
        "loss": str(captured.loss.kept_bytes),
    }
    path = store.folder / "peaks" / f"{file_name(key)}.json"
    known = store.read(path, key, _Size)
    if known is not None:
        store.used(path)
        return known
    peak = measure()
    if peak is not None:
        store.write(path, key, peak)
    return peak
