"""Partitioners by name, found through the entry-point group `remat.partitioners`.

Listing imports nothing, so a broken plugin never breaks it; a partitioner is loaded when first asked
for and kept.
"""

from __future__ import annotations

import functools

from remat_graph.plugins import Plugin, find_plugins
from remat_partition.errors import BrokenPartitioner, DuplicatePartitioner, UnknownPartitioner
from remat_partition.partition import Partitioner

__all__ = ["GROUP", "get_partitioner", "list_partitioners"]

GROUP = "remat.partitioners"


def list_partitioners() -> dict[str, Plugin]:
    """List the installed partitioners by name, without importing any.

    Raises:
        DuplicatePartitioner: if several distributions offer the same name.
    """
    return {name: _only(name, plugins) for name, plugins in find_plugins(GROUP).items()}


def get_partitioner(name: str) -> Partitioner:
    """Load a partitioner and make it with its defaults; the same object every time.

    Raises:
        UnknownPartitioner: if none has this name.
        DuplicatePartitioner: if several distributions offer it.
        BrokenPartitioner: if it cannot be imported or made, or is no partitioner.
    """
    plugins = find_plugins(GROUP)
    if name not in plugins:
        raise UnknownPartitioner(name, list(plugins))
    return _make(_only(name, plugins[name]))


def _only(name: str, plugins: tuple[Plugin, ...]) -> Plugin:
    if len(plugins) > 1:
        raise DuplicatePartitioner(name, [plugin.origin for plugin in plugins])
    return plugins[0]
