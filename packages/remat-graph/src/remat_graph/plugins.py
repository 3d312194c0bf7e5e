"""Plugins of other distributions, found through entry points without importing any.

The registries of all four layers (captures, partitioners, solvers, executors) are made of this. A
plugin carries the distribution it comes from, so that every error can name who must fix it.
`Registry` is for plugins that are functions or classes, taken as they are.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import inspect
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType

__all__ = ["Plugin", "Registry", "find_plugins"]


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

        Ctrl-C takes effect once the import has ended, which is then not done again.

        Raises:
            Exception: whatever the import raises.
        """
        return _load(self)


@dataclass(frozen=True, slots=True)
class Registry:
    """What is installed in a group, by name, with the errors of the package that asks.

    `kind` is what messages call it, `example` a name that is always there. Listing imports nothing,
    so a broken plugin never breaks it.
    """

    group: str
    kind: str
    example: str
    unknown: type[Exception]
    duplicate: type[Exception]
    broken: type[Exception]

    def listed(self) -> dict[str, Plugin]:
        """List the installed plugins by name, without importing any.

        Raises:
            Exception: of the type `duplicate`, if a name is offered more than once.
        """
        return {name: self._only(name, found) for name, found in find_plugins(self.group).items()}

    def find(self, name: str) -> Plugin:
        """Find the one plugin of a name, without importing it; errors as `load`."""
        if not isinstance(name, str):
            raise self.unknown(f"{self.kind}={name!r}; give a name, such as {self.example!r}")
        plugins = find_plugins(self.group)
        if name not in plugins:
            close = difflib.get_close_matches(name, plugins, n=3)
            hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            raise self.unknown(
                f"no {self.kind} is called {name!r}; {hint}"
                f"installed are: {', '.join(plugins) or 'none'}"
            )
        return self._only(name, plugins[name])

    def load(self, name: str, *args: object, **kwargs: object) -> object:
        """Load what a name stands for: the same object every time, which takes such arguments.

        Raises:
            Exception: of the type `unknown` if none has this name, `duplicate` if it is offered
                more than once, `broken` if it does not load or cannot be called like this.
        """
        plugin = self.find(name)
        try:
            loaded = plugin.load()
        except (Exception, SystemExit) as error:
            cause = f"it does not load ({type(error).__name__}: {error})"
            raise self._broken(plugin, cause) from error
        if not callable(loaded):
            raise self._broken(plugin, f"a {type(loaded).__name__} cannot be called")
        try:
            inspect.signature(loaded).bind(*args, **kwargs)
        except TypeError as error:
            raise self._broken(plugin, f"it does not take what it is given: {error}") from error
        except ValueError:
            pass  # written in C, and says nothing of its arguments
        return loaded

    def _broken(self, plugin: Plugin, cause: str) -> Exception:
        return self.broken(
            f"{self.kind} {plugin.name!r} of {plugin.origin} is broken: {cause}; "
            f"report it there, or use another {self.kind}"
        )

    def _only(self, name: str, plugins: tuple[Plugin, ...]) -> Plugin:
        if len(plugins) > 1:
            origins = " and by ".join(plugin.origin for plugin in plugins)
            raise self.duplicate(
                f"{self.kind} {name!r} is offered by {origins}; uninstall all but one"
            )
        return plugins[0]


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
    with _interrupts_deferred():
        loaded: object = EntryPoint(plugin.name, plugin.target, plugin.group).load()
    return loaded


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C take effect at the end: some modules cannot be imported again once they began to.

    It is only ever seen by the main thread, and only its handler can be replaced.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
