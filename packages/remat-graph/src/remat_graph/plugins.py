"""Plugins of other distributions, found through entry points without importing any.

The solvers and the partitioners are both registries over this. A plugin carries the distribution it
comes from, so that every error can name who must mend it.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from importlib.metadata import EntryPoint

__all__ = ["Plugin", "find_plugins"]


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point and the distribution that declares it."""

    name: str
    target: str
    distribution: str
    version: str
    group: str

    @property
    def origin(self) -> str:
        """Distribution, version and entry point, for messages."""
        return f"{self.distribution} {self.version} ({self.target})"

    def load(self) -> object:
        """Import what the entry point names; the same object every time.

        Raises:
            Exception: whatever the import raises.
        """
        return _load(self)


def find_plugins(group: str) -> dict[str, tuple[Plugin, ...]]:
    """Find the installed plugins of a group by name, several where a name is offered twice.

    Of a distribution that is on the path twice, `importlib.metadata` sees the first alone.
    """
    found: dict[str, list[Plugin]] = {}
    for point in importlib.metadata.entry_points(group=group):
        found.setdefault(point.name, []).append(_plugin(point))
    return {name: tuple(plugins) for name, plugins in sorted(found.items())}


def _plugin(point: EntryPoint) -> Plugin:
    dist = point.dist
    return Plugin(
        name=point.name,
        target=point.value,
        distribution="an unknown distribution" if dist is None else dist.name,
        version="of unknown version" if dist is None else dist.version,
        group=point.group,
    )


@functools.cache
def _load(plugin: Plugin) -> object:
    loaded: object = EntryPoint(plugin.name, plugin.target, plugin.group).load()
    return loaded
