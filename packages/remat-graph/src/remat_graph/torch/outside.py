"""What a forward reads by name outside its module and its arguments, to tell when it changes.

A capture freezes these settings: values of global variables, of variables of closures and of
attributes of the modules' classes, and what code reaches from one by attributes or constant keys
(`args.gain`, `CONFIG["model"]["gain"]`). `Reads` notes which code of the user runs in a forward,
and will in its backward; `Reads.settle` says which settings that code names, and what they hold:
whatever `paths.is_setting` takes, the deepest on the way.

What runs inside torch or the standard library is left out, as is what a forward changes while it
runs (a side effect, such as a count of calls), and what is added to a dict or a set (a cache, a
register). Tensors are no settings: capture refuses a forward that reads one of another owner.

Known limits: names are followed from a variable, not where an object is handed on; containers with
other things in them count only by the entries that are named; functions held by closures do not
count, and closures that `gc.freeze` hides are not found; nothing is noted while a profiler runs
that could not be put back.
"""

from __future__ import annotations

import builtins
import gc
import logging
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from remat_graph.torch.paths import (
    NAMED,
    Gone,
    Path,
    assigned,
    attribute,
    is_setting,
    is_users,
    paths,
    reach,
    reader,
    unwrapped,
    variable,
    with_inner,
    written,
)
from remat_graph.torch.snapshot import PLAIN, snapshot

__all__ = ["Outside", "Reads"]

logger = logging.getLogger(__name__)

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_REGISTER_HOOK = torch.Tensor.register_hook.__code__


class _Unreadable:
    """Stands for a value whose class raises where it is read."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value: what it is called, how to read it, and what it held."""

    name: str
    read: Callable[[], Any]
    plain: Any
    keys: frozenset[Hashable] | None
    taken: Hashable

    @classmethod
    def of(cls, name: str, read: Callable[[], Any]) -> _Setting:
        value = _safely(read)
        plain = value if issubclass(type(value), PLAIN) else Gone
        keys = frozenset(value) if issubclass(type(value), (dict, set)) else None
        return cls(name, read, plain, keys, _described(read, keys))

    def now(self) -> Hashable:
        """Describe what it holds now, but for what was added to it."""
        return _described(self.read, self.keys)

    def difference(self) -> str:
        """Say how it has changed, which it has."""
        value = _safely(self.read)
        if value is Gone:
            return f"{self.name} is gone"
        if issubclass(type(value), PLAIN) and self.plain is not Gone:
            return f"{self.name} was {self.plain!r} and is {value!r}"
        return f"{self.name} was changed"


def _safely(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:  # whatever a class of the user's raises
        return _Unreadable


def _described(read: Callable[[], Any], keys: frozenset[Hashable] | None) -> Hashable:
    def describe() -> Hashable:
        value = read()
        if keys is not None and isinstance(value, dict):
            value = {key: item for key, item in value.items() if key in keys}
        elif keys is not None and isinstance(value, set):
            value = value & keys
        return snapshot(value)

    return _safely(describe)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Outside:
    """The settings outside a module that a capture took for constant."""

    settings: tuple[_Setting, ...] = ()

    def difference(self) -> str | None:
        """Name one that holds something else now; `None` if none does."""
        for setting in self.settings:
            if setting.now() != setting.taken:
                return setting.difference()
        return None


@dataclass(frozen=True, slots=True)
class _Closure:
    """A function's variables of its closure, and what they held when it was looked at."""

    function: types.FunctionType
    cells: dict[str, types.CellType]
    contents: dict[str, Any]

    @classmethod
    def of(cls, function: types.FunctionType) -> _Closure:
        names = function.__code__.co_freevars
        cells = dict(zip(names, function.__closure__ or (), strict=True))
        return cls(function, cells, {name: variable(cell, name) for name, cell in cells.items()})


@dataclass(slots=True)
class _Called:
    """Calls of functions of one code: what the variables `names` of their closures held.

    A frame does not say which function it runs.
    """

    names: list[str]
    held: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)

    def note(self, variables: dict[str, Any]) -> None:
        values = [variables.get(name, Gone) for name in self.names]
        self.held[tuple(map(id, values))] = values

    def among(self, closures: list[_Closure]) -> Iterator[_Closure]:
        """Find the functions called: by what they hold, or by that but for plain values."""
        found = set()
        changed = []
        for closure in closures:
            key = tuple(id(closure.contents[name]) for name in self.names)
            if key in self.held:
                found.add(key)
                yield closure
            else:
                changed.append(closure)
        missing = {_not_plain(values) for key, values in self.held.items() if key not in found}
        for closure in changed:
            if _not_plain([closure.contents[name] for name in self.names]) in missing:
                yield closure


def _not_plain(values: list[Any]) -> tuple[int, ...]:
    return tuple(0 if issubclass(type(value), PLAIN) else id(value) for value in values)


class Reads:
    """Notes the code that runs in a forward, and settles which settings it reads."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.complete = False
        self._noted: dict[tuple[int, int], tuple[types.CodeType, dict[str, Any]]] = {}
        self._called: dict[int, _Called] = {}
        self._functions: list[types.FunctionType] = []  # that run in the backward
        self._settings: dict[tuple[int, Path], _Setting] = {}
        self._of_classes = {
            (kind, name): _Setting.of(f"{kind.__qualname__}.{name}", reader(kind, (name,)))
            for kind in {type(part) for part in module.modules()}
            for name in _names_of_class(kind)
            if is_setting(attribute(kind, name))
        }
        for part in module.modules():
            for hook in (*part._backward_hooks.values(), *part._backward_pre_hooks.values()):
                self._note_function(hook)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the code that this thread runs meanwhile, unless that is done already."""
        before: Any = sys.getprofile()
        enable = getattr(before, "enable", None)  # cProfile's is no function
        if self.complete or not (before is None or callable(before) or callable(enable)):
            if not self.complete:
                logger.warning("a profiler runs: what forward reads of globals is not guarded")
            self.complete = True
            yield
            return
        seen: dict[tuple[int, int], types.CodeType] = {}

        def note(frame: types.FrameType, event: str, arg: object) -> None:
            if event != "call":
                return
            code, variables = frame.f_code, frame.f_globals
            if (id(code), id(variables)) not in seen:
                seen[id(code), id(variables)] = code
                if is_users(variables.get("__name__")):
                    self._note(code, variables)
            if id(code) in self._called:
                self._called[id(code)].note(frame.f_locals)
            elif code is _APPLY:
                for base in frame.f_locals["cls"].__mro__:
                    for method in base.__dict__.values() if is_users(base.__module__) else ():
                        self._note_function(unwrapped(method))
            elif code is _REGISTER_HOOK:
                self._note_function(frame.f_locals["hook"])

        sys.setprofile(note)
        try:
            yield
            self.complete = True
        finally:
            sys.setprofile(None)
            if callable(enable):
                enable()
            else:
                sys.setprofile(before)

    def _note(self, code: types.CodeType, variables: dict[str, Any]) -> list[Any]:
        """Note code and the values of the settings that it reads, which are returned."""
        if (id(code), id(variables)) in self._noted:
            return []
        self._noted[id(code), id(variables)] = code, variables
        if closed := sorted(set(code.co_freevars) - assigned(code)):
            self._called[id(code)] = _Called(closed)
        values = []
        for in_closure, path in paths(code):
            if in_closure or (path[0] not in variables and path[0] in vars(builtins)):
                continue
            reached = _reached(variable(variables, path[0]), path)
            if reached and (id(variables), reached[0]) not in self._settings:
                owner = variables.get("__name__")
                where = f"{owner}." if isinstance(owner, str) else ""
                name = where + written(reached[0])
                setting = _Setting.of(name, reader(variables, reached[0]))
                self._settings[id(variables), reached[0]] = setting
            values += [reached[1]] if reached else []
        return values

    def _note_function(self, function: Any) -> None:
        """Note a function that runs in the backward, and the functions that it names."""
        function = getattr(function, "__func__", function)
        if type(function) is types.FunctionType and is_users(function.__module__):
            self._functions.append(function)
            for code in with_inner(function.__code__):
                for value in self._note(code, function.__globals__):
                    self._note_function(value)

    def settle(self) -> Outside:
        """Say what the settings hold now, but for those that the code changes."""
        named, changed = {"forward"}, set[tuple[int, str]]()
        for code, variables in self._noted.values():
            named.update(code.co_names)
            changed.update((id(variables), name) for name in assigned(code))
        settings = [
            setting
            for (where, path), setting in self._settings.items()
            if (where, path[0]) not in changed
        ]
        settings += [s for (_, name), s in self._of_classes.items() if name in named]
        kept = [s for s in settings if s.now() == s.taken]
        return Outside((*kept, *self._settings_of_closures()))

    def _settings_of_closures(self) -> Iterator[_Setting]:
        """Find the closure variables that the code noted reads and does not assign to."""
        functions: dict[int, list[_Closure]] = {number: [] for number in self._called}
        for function in gc.get_objects() if functions else ():
            if type(function) is types.FunctionType and id(function.__code__) in functions:
                functions[id(function.__code__)].append(_Closure.of(function))
        found = [_Closure.of(function) for function in self._functions]
        for number, closures in functions.items():
            found += self._called[number].among(closures)
        seen = set()
        for closure in found:
            code = closure.function.__code__
            for in_closure, path in paths(code):
                name = str(path[0])
                if not in_closure or name not in closure.cells or name in assigned(code):
                    continue  # a variable of its own that a function in it uses
                reached = _reached(closure.contents[name], path)
                if reached is None or issubclass(type(reached[1]), NAMED):
                    continue
                if issubclass(type(closure.contents[name]), torch.nn.Module):
                    continue  # it would be kept alive, and what it holds is guarded
                cell = closure.cells[name]
                if (id(cell), reached[0]) not in seen:
                    seen.add((id(cell), reached[0]))
                    label = f"{written(reached[0])} of {closure.function.__qualname__}"
                    yield _Setting.of(label, reader(cell, reached[0]))


def _reached(value: Any, path: Path) -> tuple[Path, Any] | None:
    found = _safely(lambda: reach(value, path))
    return None if found is _Unreadable else found


def _names_of_class(kind: type) -> set[str]:
    """Name what the user's classes among `kind` and its bases have."""
    bases = (base for base in kind.__mro__ if is_users(base.__module__))
    return {name for base in bases for name in base.__dict__ if not name.startswith("__")}
