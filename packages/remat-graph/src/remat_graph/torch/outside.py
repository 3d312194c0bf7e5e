"""What a forward reads by name outside its module and its arguments, to tell when it changes.

A capture freezes these values: global variables and what is reached from them by attributes,
variables of a closure, attributes of a module's class. `Reads` notes which code of the user runs in
a forward, `Reads.settle` which settings that code names and what they hold then: plain values,
types, functions, and small containers of these. What runs inside torch or the standard library is
left out, as is what the forward itself changes (a side effect, such as a count of calls). Tensors
are no settings: capture refuses a forward that reads one that is not the module's.

Known limits: attributes are followed where code names them on a variable, not where it hands the
object on; closures are not found if `gc.freeze` hides them; nothing is noted while a profiler runs
that could not be put back.
"""

from __future__ import annotations

import argparse
import dataclasses
import dis
import enum
import gc
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from remat_graph.torch.snapshot import PLAIN, Snapshots

__all__ = ["Outside", "Reads"]

_TORCH = {"torch", "torchgen", "functorch", "sympy"}
_NOT_THE_USERS = {*_TORCH, "remat_graph", "remat_exec", "remat", *sys.stdlib_module_names}
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_SETTINGS = (*PLAIN, *_NAMED, enum.Enum, torch.dtype, torch.device)
_MOST_ENTRIES = 1_000
_DEEPEST = 3
_BETWEEN = {"CACHE", "EXTENDED_ARG", "NOP"}  # of the instructions of one chain of attributes
_FROM_A_CLOSURE = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}


class _Gone:
    """Stands for a value that is not there (any more)."""


_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value: how to read it, what it is called, and what it held."""

    name: str
    read: Callable[[], Any]
    plain: Any
    taken: Hashable

    @classmethod
    def of(cls, name: str, read: Callable[[], Any]) -> _Setting:
        value = read()
        plain = value if isinstance(value, PLAIN) else _Gone
        return cls(name, read, plain, Snapshots().take(value))


@dataclass(frozen=True, slots=True)
class Outside:
    """The settings outside a module that a capture took for constant."""

    settings: tuple[_Setting, ...] = ()

    def difference(self) -> str | None:
        """Name one that holds something else now; `None` if none does."""
        take = Snapshots().take
        for setting in self.settings:
            now = setting.read()
            if take(now) == setting.taken:
                continue
            if now is _Gone:
                return f"{setting.name} is gone"
            if isinstance(now, PLAIN) and setting.plain is not _Gone:
                return f"{setting.name} was {setting.plain!r} and is {now!r}"
            return f"{setting.name} was changed"
        return None


class Reads:
    """Notes the code that runs in a forward, and settles which settings it reads."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.complete = False
        self._codes: dict[int, types.CodeType] = {}  # equal ones may have different variables
        self._closed: dict[int, list[str]] = {}  # variables that such code reads of a closure
        self._closures: dict[tuple[int, ...], list[Any]] = {}
        self._globals: dict[tuple[int, _Path], tuple[str, Callable[[], Any], Hashable]] = {}
        take = Snapshots().take
        self._of_classes = {
            base: {
                name: take(value)
                for name, value in base.__dict__.items()
                if not name.startswith("__") and _is_setting(value)
            }
            for part in module.modules()
            for base in type(part).__mro__
            if _is_users(base.__module__)
        }

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the code that this thread runs meanwhile, unless that is done already."""
        before: Any = sys.getprofile()
        enable = getattr(before, "enable", None)  # cProfile's is no function
        if self.complete or not (before is None or callable(before) or callable(enable)):
            yield
            return
        seen: dict[int, types.CodeType] = {}

        def note(frame: types.FrameType, event: str, arg: object) -> None:
            if event != "call":
                return
            code = frame.f_code
            if id(code) not in seen:
                seen[id(code)] = code
                if _is_users(str(frame.f_globals.get("__name__", ""))):
                    self._note(code, frame.f_globals)
            if id(code) in self._closed:
                held = [frame.f_locals.get(name, _Gone) for name in self._closed[id(code)]]
                self._closures[id(code), *map(id, held)] = held

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

    def _note(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        if id(code) in self._codes:
            return
        self._codes[id(code)] = code
        assigned = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_DEREF"}
        if closed := [name for name in code.co_freevars if name not in assigned]:
            self._closed[id(code)] = closed
        take = Snapshots().take
        for in_closure, path in _paths(code):
            if in_closure or path[0] not in variables:
                continue
            found = _first_setting(variables[path[0]], path)
            if found is None:
                continue
            reached, value = found
            name = ".".join((str(variables.get("__name__", "")), *reached))
            entry = name, _reader(variables, reached), take(value)
            self._globals.setdefault((id(variables), reached), entry)
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                for method in value.__dict__.values():  # its backward runs later
                    function = getattr(method, "__func__", method)
                    if isinstance(function, types.FunctionType):
                        self._note(function.__code__, function.__globals__)

    def settle(self) -> Outside:
        """Say what the settings hold now, but for those that changed while code was noted."""
        named = {name for code in self._codes.values() for name in code.co_names} | {"forward"}
        noted = list(self._globals.values())
        for base, attributes in self._of_classes.items():
            for name in sorted(named & attributes.keys()):
                label = f"{base.__qualname__}.{name}"
                noted.append((label, _reader(base.__dict__, (name,)), attributes[name]))
        settings = [_Setting.of(name, read) for name, read, _ in noted]
        unchanged = [s for s, (*_, taken) in zip(settings, noted, strict=True) if s.taken == taken]
        closures = [_Setting.of(name, read) for name, read in self._read_closures()]
        return Outside((*unchanged, *closures))

    def _read_closures(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Find the closure variables that the code noted reads and does not assign to.

        A frame does not say which function it runs: those of the same code that hold the same are
        looked for.
        """
        seen = set()
        for function in gc.get_objects() if self._closures else ():
            code = function.__code__ if type(function) is types.FunctionType else None
            if code is None or id(code) not in self._closed:
                continue
            cells = dict(zip(code.co_freevars, map(_Cell, function.__closure__ or ()), strict=True))
            closed = {name: cells[name] for name in self._closed[id(code)]}
            held = (cell.get("", _Gone) for cell in closed.values())
            if (id(code), *map(id, held)) not in self._closures:
                continue
            for in_closure, path in _paths(code):
                if not in_closure or path[0] not in closed:
                    continue
                cell = closed[path[0]]
                found = _first_setting(cell.get("", _Gone), path)
                if found is None or isinstance(found[1], _NAMED):  # what decorators hold
                    continue
                if (id(cell.cell), found[0]) not in seen:
                    seen.add((id(cell.cell), found[0]))
                    name = f"{'.'.join(found[0])} of {function.__qualname__}"
                    yield name, _reader(cell, found[0])


def _is_users(name: str) -> bool:
    """Say whether a module of this name is of neither torch, remat nor the standard library."""
    return name.partition(".")[0] not in _NOT_THE_USERS


def _paths(code: types.CodeType) -> Iterator[tuple[bool, _Path]]:
    """List what code reads: whether from a closure, and a variable with the attributes after it."""
    path: list[str] = []
    in_closure = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in _BETWEEN:
            continue
        if path and name in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(instruction.argval)
            continue
        if path:
            yield in_closure, tuple(path)
            path = []
        if name in ("LOAD_GLOBAL", "LOAD_NAME") or name in _FROM_A_CLOSURE:
            path = [instruction.argval]
            in_closure = name in _FROM_A_CLOSURE


def _first_setting(value: Any, path: _Path) -> tuple[_Path, Any] | None:
    """Follow attributes from the variable `path[0]` to a setting; to a type if to nothing else."""
    found: tuple[_Path, Any] | None = None
    for position, name in enumerate(path):
        if position:
            value = _attribute(value, name)
        foreign = isinstance(value, types.ModuleType) and not _is_users(value.__name__)
        if foreign or value is _Gone:
            break
        if _is_setting(value):
            found = path[: position + 1], value
            if not isinstance(value, type):
                break
    return found


def _attribute(owner: Any, name: str) -> Any:
    """Read an attribute without running code of its class."""
    own = getattr(owner, "__dict__", {})
    if name in own:
        return own[name]
    kind = owner if isinstance(owner, type) else type(owner)
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return _Gone


def _reader(variables: Mapping[str, Any] | _Cell, path: _Path) -> Callable[[], Any]:
    first, *others = path

    def read() -> Any:
        value = variables.get(first, _Gone)
        for name in others:
            value = _attribute(value, name)
        return value

    return read


@dataclass(frozen=True, slots=True)
class _Cell:
    """A variable of a closure, to be read like the global variables of a module."""

    cell: types.CellType

    def get(self, _: str, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # empty
            return default


def _is_setting(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _SETTINGS):
        return True
    match value:
        case dict():
            inside = [*value, *value.values()]
        case list() | tuple() | set() | frozenset():
            inside = [*value]
        case types.SimpleNamespace() | argparse.Namespace():
            inside = [*vars(value).values()]
        case _ if dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
            inside = [*vars(value).values()]
        case _:
            return False
    within = depth < _DEEPEST and len(inside) <= _MOST_ENTRIES
    return within and all(_is_setting(item, depth + 1) for item in inside)
