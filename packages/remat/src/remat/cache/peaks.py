"""Measured peaks: of a plain step of a graph of TorchDynamo's, and of a step by a plan.

They are found by the code of the graph and by what is captured of it: two regions of the same
captured graph may differ in what eager code writes in place, and so in the peak of a plain step.
That of a plan is found by its generated code, too. On the CPU it is a sum of allocations, and the
same at each run of the same code by the same versions; on CUDA, where it depends on how blocks lie,
no plan's is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from remat.cache.keys import costs_key, file_name
from remat.cache.store import Store
from remat_graph import canonical_hash

if TYPE_CHECKING:
    import torch

    from remat_exec import Peak
    from remat_graph.torch import Capture

__all__ = ["remembered_peak", "remembered_rehearsal"]

_Size = Annotated[int, msgspec.Meta(ge=1)]
_Curve = tuple[tuple[float, int], ...]
_Found = TypeVar("_Found")


def remembered_peak(
    module: torch.nn.Module, captured: Capture, measure: Callable[[], int | None]
) -> int | None:
    """Give the peak in bytes of a plain step, measured here or in an earlier process."""
    return _remembered(_Size, module, captured, {}, measure)


def remembered_rehearsal(
    module: torch.nn.Module,
    captured: Capture,
    source: str,
    rehearse: Callable[[], Peak],
) -> Peak:
    """Give the peak and the curve of a step by the generated code `source`, in the same way."""
    if captured.program.device.type != "cpu":
        return rehearse()
    from remat_exec import Peak, __version__  # noqa: PLC0415 - imports torch

    def measured() -> tuple[int, _Curve]:
        peak = rehearse()
        return peak.peak_bytes, peak.curve

    key = {"plan": hashlib.sha256(source.encode()).hexdigest(), "remat-exec": __version__}
    size, curve = _remembered(tuple[_Size, _Curve], module, captured, key, measured)
    return Peak(size, requested_bytes=size, curve=curve)


def _remembered(
    kind: Any,
    module: torch.nn.Module,
    captured: Capture,
    more: dict[str, str],
    measure: Callable[[], _Found],
) -> _Found:
    from torch.fx import GraphModule  # noqa: PLC0415 - takes seconds

    store = Store.here()
    if store is None or not isinstance(module, GraphModule):
        return measure()
    key = {
        **costs_key(captured.program.device),
        "code": hashlib.sha256(module.code.encode()).hexdigest(),
        "graph": canonical_hash(captured.graph),
        "loss": str(captured.loss.kept_bytes),
        **more,
    }
    path = store.folder / "peaks" / f"{file_name(key)}.json"
    remembered: _Found | None = store.read(path, key, kind)
    if remembered is not None:
        store.used(path)
        return remembered
    peak = measure()
    if peak is not None:
        store.write(path, key, peak)
    return peak
