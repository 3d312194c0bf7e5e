"""Partitioners by name, found through the entry-point group `remat.partitioners`, or as objects.

Listing imports nothing, so a broken plugin never breaks it; a partitioner is loaded when first
asked for and kept.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from remat_graph.plugins import Plugin, described, find_plugins, read_settings, with_settings
from remat_partition.errors import (
    BrokenPartitioner,
    DuplicatePartitioner,
    PartitionError,
    UnknownOption,
    UnknownPartitioner,
)
from remat_partition.interface import Partitioner, is_partitioner

__all__ = ["GROUP", "Chosen", "get_partitioner", "list_partitioners", "resolve_partitioner"]

GROUP = "remat.partitioners"


def list_partitioners() -> dict[str, Plugin]:
    """List the installed partitioners by name, without importing any.

    Raises:
        DuplicatePartitioner: if several distributions offer the same name.
    """
    return {name: _only(name, plugins) for name, plugins in find_plugins(GROUP).items()}


def get_partitioner(partitioner: str | Partitioner) -> Partitioner:
    """Load the partitioner of a name and make it with its defaults, the same object every time.

    One that is an object is handed back.

    Raises:
        PartitionError: if this is neither a name nor a partitioner.
        UnknownPartitioner: if none has this name.
        DuplicatePartitioner: if several distributions offer it.
        BrokenPartitioner: if it cannot be imported or made, or is no partitioner.
    """
    return resolve_partitioner(partitioner).partitioner


@dataclass(frozen=True, slots=True)
class Chosen:
    """A partitioner as it was asked for.

    `name` is what messages call it, with the settings of an object where they are not its defaults.
    `identity` says all that its hierarchies depend on, so that what comes of them may be kept;
    `None` if that is not known: of a class that no installed distribution offers, whose code may
    change, or of settings that cannot be written down.
    """

    partitioner: Partitioner
    name: str
    origin: str
    identity: str | None


def resolve_partitioner(
    partitioner: str | Partitioner, options: Mapping[str, object] | None = None
) -> Chosen:
    """Make the partitioner of a name with options, or take an object, which has its own.

    A name may have options, too: `h-partition(max_top_ops=20)`.

    Raises:
        PartitionError: as `partition`, but for what comes of cutting.
    """
    if isinstance(partitioner, str):
        try:
            name, settings = read_settings(partitioner)
        except ValueError as error:
            raise PartitionError(f"partitioner={error}") from None
        plugin = find(name)
        built = make_with(plugin, {**settings, **(options or {})})
        identity = with_settings(plugin.name, built)
        return Chosen(
            built,
            (identity if settings else None) or plugin.name,
            plugin.origin,
            identity and f"{identity} of {plugin}",
        )
    if not is_partitioner(partitioner):
        raise PartitionError(
            f"partitioner={partitioner!r} is neither the name of an installed partitioner nor an "
            f"object with a `name`, a string, and `partition`"
        )
    if options:
        raise UnknownOption(partitioner.name, min(options), None)
    return Chosen(partitioner, *described(GROUP, partitioner.name, partitioner))


def find(name: str) -> Plugin:
    """Find the one plugin of a name, without importing it; errors as `get_partitioner`."""
    plugins = find_plugins(GROUP)
    if name not in plugins:
        raise UnknownPartitioner(name, list(plugins))
    return _only(name, plugins[name])


def _only(name: str, plugins: tuple[Plugin, ...]) -> Plugin:
    origins = [plugin.origin for plugin in plugins]
    if len({(plugin.distribution, plugin.version) for plugin in plugins}) > 1:
        raise DuplicatePartitioner(name, origins)
    if len(plugins) > 1:
        raise DuplicatePartitioner(name, origins, "it may be declared once: report it there")
    return plugins[0]


@functools.cache
def make(plugin: Plugin) -> Partitioner:
    """Import a plugin and make its partitioner with defaults, once; errors as `get_partitioner`."""
    return _build(plugin, _load(plugin), {})


def make_with(plugin: Plugin, options: Mapping[str, object]) -> Partitioner:
    """Import a plugin and make its partitioner with these options.

    Raises:
        UnknownOption: if it has no such option.
        PartitionError: what it raises itself, `InvalidOption` for instance.
        BrokenPartitioner: as `get_partitioner`.
    """
    if not options:
        return make(plugin)
    kind = _load(plugin)
    names = _options_of(kind)
    for option in options:
        if names is not None and option not in names:
            raise UnknownOption(plugin.name, option, names)
    return _build(plugin, kind, options)


def _load(plugin: Plugin) -> object:
    if EntryPoint.pattern.match(plugin.target) is None:
        cause = f"its entry point {plugin.target!r} is not of the form 'module:object'"
        raise BrokenPartitioner(plugin.name, plugin.origin, cause)
    try:
        return plugin.load()
    except (Exception, SystemExit) as error:
        cause = f"it does not load ({type(error).__name__}: {error})"
        raise BrokenPartitioner(plugin.name, plugin.origin, cause) from error


def _options_of(kind: object) -> list[str] | None:
    """List the options that a class names; None if it takes any."""
    try:
        parameters = inspect.signature(kind).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]


def _build(plugin: Plugin, kind: object, options: Mapping[str, object]) -> Partitioner:
    try:
        partitioner = kind(**options)  # type: ignore[operator]
    except PartitionError:
        raise
    except (Exception, SystemExit) as error:
        cause = f"it cannot be made ({type(error).__name__}: {error})"
        raise BrokenPartitioner(plugin.name, plugin.origin, cause) from error
    if not is_partitioner(partitioner):
        cause = (
            f"a {type(partitioner).__name__} is no Partitioner, which has a `name` and `partition`"
        )
        raise BrokenPartitioner(plugin.name, plugin.origin, cause)
    return partitioner
