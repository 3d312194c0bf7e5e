"""Measured costs: one file for each device and setting, which maps equivalence classes to costs.

With them the graph of a model is the same in each process, costs included, so that its solution is
found again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from remat.cache.keys import costs_key, file_name
from remat.cache.store import Store

if TYPE_CHECKING:
    import torch

    from remat_graph.torch import Cost, Costs

__all__ = ["remembered_costs"]

_MOST_CLASSES = 50_000

_Class = Annotated[str, msgspec.Meta(max_length=100)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Size = Annotated[int, msgspec.Meta(ge=0)]
_Costs = list[tuple[_Class, _Seconds, _Size]]


@contextmanager
def remembered_costs(
    measured: dict[str, Cost], device: torch.device, costs: Costs = "measure"
) -> Iterator[None]:
    """Add what was measured before to `measured`; keep what has been added to it in the meantime.

    Costs that are not measured are neither added nor kept.
    """
    store = Store.here()
    if store is None or costs != "measure":
        yield
        return
    key = costs_key(device)
    path = store.folder / "costs" / f"{file_name(key)}.json"
    before = _read(store, path, key)
    for equivalence, cost in before.items():
        measured.setdefault(equivalence, cost)
    count = len(measured)
    yield
    if len(measured) == count:
        if before:
            store.used(path)
        return
    merged = {**measured, **_read(store, path, key)}  # another process may have written meanwhile
    rows = [(name, cost.time, cost.workspace_bytes) for name, cost in merged.items()]
    store.write(path, key, rows[-_MOST_CLASSES:])


def _read(store: Store, path: Path, key: dict[str, str]) -> dict[str, Cost]:
    from remat_graph.torch import Cost  # noqa: PLC0415 - takes seconds

    rows = store.read(path, key, _Costs)
    return {name: Cost(time, workspace) for name, time, workspace in rows or ()}
