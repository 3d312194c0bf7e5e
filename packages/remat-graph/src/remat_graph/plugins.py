"""Plugins of other distributions, found through entry points without importing any.

The solvers and the partitioners are both registries over this. A plugin carries the distribution it
comes from, so that every error can name who must mend it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType

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


def find_plugins(group: str) -> Mapping[str, tuple[Plugin, ...]]:
    """Find the installed plugins of a group by name, several where a name is offered twice.

    Of a distribution that is on the path twice, `importlib.metadata` sees the first alone. The path
    is read again where it or one of its folders has changed, as by an installation.
    """
    return MappingProxyType(_find_on(group, tuple((path, _changed(path)) for path in sys.path)))


def _changed(path: str) -> int | None:
    """Tell when a folder of the path last changed, in ns; `None` if there is none."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


@functools.lru_cache(maxsize=8)
def _find_on(group: str, path: tuple[tuple[str, int | None], ...]) -> dict[str, tuple[Plugin, ...]]:
    """Read the entry points of all distributions, some tens of milliseconds.

    `path` is the key under which they are kept: `importlib.metadata` looks at `sys.path` itself.
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
