"""Schedules of the minimal peak that was found for graphs for which a budget was too small.

The refusal names that peak as enough. A search for it is cut short by the clock, so that another
one, on a busier machine, might find less: it begins with what is known here. Schedules are found
by the outline of a graph, for times are measured anew, and kept for this process and for later
ones.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from remat.cache.store import DAMAGE, Store
from remat.plans.outlines import Outline
from remat_graph import Graph, GraphError, Schedule, decode, encode, simulate

__all__ = ["keep_smallest", "smallest_known"]

_MOST_KEPT = 64  # in this process

_kept: dict[str, Schedule] = {}  # in the names of outlines, by the hashes of these


def smallest_known(graph: Graph) -> Schedule | None:
    """Give the schedule of minimal peak of a refusal for a graph like this; else `None`."""
    store = Store.here()
    if not _kept and (store is None or not _folder(store).is_dir()):
        return None
    here = Outline.of(graph)
    digest = here.hash
    schedules = [None if store is None else _read(store, digest, here, graph)]
    if digest in _kept:
        schedules.append(here.nameless.translate(_kept[digest], here))
    return min(
        (schedule for schedule in schedules if schedule is not None),
        key=lambda schedule: simulate(graph, schedule).peak_bytes,
        default=None,
    )


def keep_smallest(graph: Graph, schedule: Schedule) -> None:
    """Keep a schedule of a graph, in place of what was known of graphs like it."""
    here = Outline.of(graph)
    digest, nameless = here.hash, here.translate(schedule, here.nameless)
    _kept.pop(digest, None)
    _kept[digest] = nameless
    if len(_kept) > _MOST_KEPT:
        del _kept[next(iter(_kept))]
    store = Store.here()
    if store is not None:
        store.write(_path(store, digest), _key(digest), msgspec.Raw(encode(nameless).strip()))


def _read(store: Store, digest: str, here: Outline, graph: Graph) -> Schedule | None:
    path = _path(store, digest)
    raw = store.read(path, _key(digest), msgspec.Raw)
    if raw is None:
        return None
    try:
        document = decode(bytes(raw), source="the schedule")
        if not isinstance(document, Schedule):
            raise ValueError("it holds no schedule")
        schedule = here.nameless.translate(document, here)
        simulate(graph, schedule)
    except (*DAMAGE, GraphError, KeyError) as error:
        store.refuse(path, error)
        return None
    store.used(path)
    return schedule


def _folder(store: Store) -> Path:
    return store.folder / "smallest"


def _path(store: Store, digest: str) -> Path:
    return _folder(store) / f"{digest}.json"


def _key(digest: str) -> dict[str, str]:
    return {"outline": digest}
