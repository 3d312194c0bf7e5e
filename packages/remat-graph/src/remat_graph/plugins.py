"""Plugins of other distributions, found through entry points without importing any.

The registries of all four layers (captures, partitioners, solvers, executors) are made of this. A
plugin carries the distribution it comes from, so that every error can name who must fix it.
`Registry` is for plugins that are functions or classes, taken as they are; `with_settings` names
one that was made with arguments, `read_settings` reads such a name. `interrupts_deferred` lets
Ctrl-C wait for the end of an import.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import functools
import importlib.metadata
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import MappingProxyType

__all__ = [
    "Plugin",
    "Registry",
    "described",
    "find_plugins",
    "interrupts_deferred",
    "read_settings",
    "with_settings",
]


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
        return {
            name: self._only(name, plugins) for name, plugins in find_plugins(self.group).items()
        }

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
        # Asked of each folder whenever a plugin is: pathlib takes three times as long.
        return os.stat(path or ".").st_mtime_ns  # noqa: PTH116
    except OSError:
        return None


@functools.lru_cache(maxsize=8)
def _find_on(group: str, path: tuple[tuple[str, int | None], ...]) -> dict[str, tuple[Plugin, ...]]:
    """Read the entry points of all distributions, some tens of milliseconds.

    `path` is the key under which they are kept: `importlib.metadata` looks at `sys.path` itself.
    """
    by_name: dict[str, list[Plugin]] = {}
    for point in importlib.metadata.entry_points(group=group):
        by_name.setdefault(point.name, []).append(_plugin(point))
    return {name: tuple(plugins) for name, plugins in sorted(by_name.items())}


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
    with interrupts_deferred():
        loaded: object = EntryPoint(plugin.name, plugin.target, plugin.group).load()
    return loaded


@contextmanager
def interrupts_deferred() -> Iterator[None]:
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


def _offering(group: str, name: str, instance: object) -> Plugin | None:
    """Find the one plugin of a name, if what it names is the class of this object."""
    plugins = find_plugins(group).get(name, ())
    if len(plugins) != 1:
        return None
    try:
        return plugins[0] if plugins[0].load() is type(instance) else None
    except (Exception, SystemExit):  # the error comes where it is asked for by its name
        return None


def described(group: str, name: str, instance: object) -> tuple[str, str, str | None]:
    """Say what an object is called, where it comes from, and all that its answers depend on.

    The last is `None` if that is not known: of a class that no installed distribution offers, or of
    settings that cannot be written down.
    """
    full_name, offered = with_settings(name, instance), _offering(group, name, instance)
    kind = type(instance)
    origin = f"{kind.__module__}.{kind.__qualname__}" if offered is None else offered.origin
    identity = None if full_name is None or offered is None else f"{full_name} of {offered}"
    return full_name or name, origin, identity


def with_settings(name: str, instance: object) -> str | None:
    """Name what was made with settings, and those that are not its defaults: `rotor(slots=50)`.

    Settings are the arguments of its class, each kept in an attribute of the same name, as a
    dataclass keeps them. `None` where one is not kept so, or is neither a plain value nor a
    dataclass that can be named like this.
    """
    try:
        parameters = inspect.signature(type(instance)).parameters.values()
    except (TypeError, ValueError):
        return None
    settings: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        if not hasattr(instance, parameter.name):
            return None
        setting = _plain(getattr(instance, parameter.name))
        if setting is None:
            return None
        if setting != _plain(parameter.default):
            settings.append(f"{parameter.name}={setting}")
    return f"{name}({', '.join(settings)})" if settings else name


def read_settings(name: str) -> tuple[str, dict[str, object]]:
    """Split a name with settings, such as `rotor(slots=50)`, as `with_settings` writes it.

    Settings are plain values: numbers, strings, True, False, None, lists of these, or a member of
    an enumeration, which is given as it is written (`"Form.PAPER"`).

    Raises:
        ValueError: if what stands in the parentheses is anything else.
    """
    plain, bracket, rest = name.partition("(")
    if not bracket:
        return name, {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError
        settings = {
            str(each.arg): ast.unparse(each.value)
            if isinstance(each.value, ast.Attribute)
            else ast.literal_eval(each.value)
            for each in call.keywords
        }
        if "None" in settings or len(settings) < len(call.keywords):  # **more, or one twice
            raise ValueError
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(
            f"{name!r} cannot be read; settings are plain values by name, "
            f"as in '{plain}(limit=3, kind=\"x\")'"
        ) from None
    return plain, settings


def _plain(setting: object) -> str | None:
    """Write a setting so that equal ones read the same in every process; `None` if it cannot be."""
    if isinstance(setting, enum.Enum):
        return f"{type(setting).__name__}.{setting.name}"
    if setting is None or isinstance(setting, bool | int | float | str | bytes):
        return repr(setting)
    if isinstance(setting, tuple | list):
        parts = [_plain(part) for part in setting]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    if dataclasses.is_dataclass(setting) and not isinstance(setting, type):
        return with_settings(type(setting).__qualname__, setting)
    return None
