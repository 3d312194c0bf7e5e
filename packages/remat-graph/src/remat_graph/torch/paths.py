"""What code reads by name: variables, and what it reaches from one by attributes and constant keys.

Read from the code itself, without running any of it or of the classes of what is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import dis
import enum
import functools
import math
import pathlib
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from remat_graph.torch.snapshot import PLAIN

__all__ = [
    "NAMED",
    "OWN_PACKAGES",
    "Gone",
    "Path",
    "assigned",
    "attribute",
    "is_setting",
    "is_users",
    "paths",
    "reach",
    "reader",
    "unwrapped",
    "variable",
    "with_inner",
    "written",
]

OWN_PACKAGES = ("torch", "remat_graph", "remat_exec", "remat")  # whose code is not the user's
_NOT_THE_USERS = {*OWN_PACKAGES, "torchgen", "functorch", "sympy", *sys.stdlib_module_names}
NAMED = (type, types.FunctionType, types.BuiltinFunctionType, functools.partial)
_SETTINGS = (
    *PLAIN,
    *NAMED,
    enum.Enum,
    range,
    slice,
    pathlib.PurePath,
    torch.dtype,
    torch.device,
    torch.nn.Module,
)
_MOST_ENTRIES = 1_000
_DEEPEST = 4
_BETWEEN = {"CACHE", "EXTENDED_ARG", "NOP"}  # of the instructions of one path
_FROM_A_CLOSURE = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}


class Gone:
    """Stands for a value that is not there (any more)."""


@dataclass(frozen=True, slots=True)
class _Key:
    """A step from a container to one of its entries; a step to an attribute is its name."""

    key: Hashable


Path = tuple[str | _Key, ...]  # from the name of a variable


def is_users(module_name: Any) -> bool:
    """Say whether a module is of neither torch, remat nor the standard library."""
    return not (isinstance(module_name, str) and module_name.partition(".")[0] in _NOT_THE_USERS)


def paths(code: types.CodeType) -> Iterator[tuple[bool, Path]]:
    """List what code reads: whether from a closure, and a variable with the steps after it."""
    path: list[str | _Key] = []
    constant: _Key | None = None
    in_closure = False
    for instruction in dis.get_instructions(code):
        name, argument = instruction.opname, instruction.argval
        if name in _BETWEEN:
            continue
        if path and name in ("LOAD_CONST", "LOAD_SMALL_INT") and constant is None:
            constant = _Key(argument) if isinstance(argument, (str, int)) else None
            if constant is not None:
                continue
        elif path and constant is None and name in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(argument)
            continue
        elif constant and (name == "BINARY_SUBSCR" or instruction.argrepr == "[]"):
            path.append(constant)
            constant = None
            continue
        if path:
            yield in_closure, tuple(path)
        path, constant = [], None
        if name in ("LOAD_GLOBAL", "LOAD_NAME") or name in _FROM_A_CLOSURE:
            path = [argument]
            in_closure = name in _FROM_A_CLOSURE
    for inner in _inner(code):
        for closed, inner_path in paths(inner):
            if closed and inner_path[0] in code.co_freevars:
                yield True, inner_path


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and that of the functions inside it."""
    yield code
    for inner in _inner(code):
        yield from with_inner(inner)


def _inner(code: types.CodeType) -> Iterable[types.CodeType]:
    return (item for item in code.co_consts if isinstance(item, types.CodeType))


def assigned(code: types.CodeType) -> set[str]:
    """Name the global and closure variables that code, or a function inside it, assigns to."""
    return {
        instruction.argval
        for part in with_inner(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname in ("STORE_DEREF", "STORE_GLOBAL")
    }


def reach(value: Any, path: Path) -> tuple[Path, Any] | None:
    """Go along a path as far as there are values; return its last setting, and the way there."""
    found: tuple[Path, Any] | None = None
    if value is Gone:  # perhaps not there yet
        return path[:1], value
    for position, step in enumerate(path):
        if position:
            owner, value = value, _step(value, step)
            of_its_class = step not in getattr(owner, "__dict__", ())
            if of_its_class and isinstance(value, NAMED) and found and found[1] is owner:
                break  # a method, which may read all of it
        if isinstance(value, types.ModuleType) and not is_users(attribute(value, "__name__")):
            break
        if value is Gone:
            break
        if is_setting(value):
            found = path[: position + 1], value
    return found


def _step(owner: Any, step: str | _Key) -> Any:
    if isinstance(step, str):
        return attribute(owner, step)
    if not isinstance(owner, (dict, list, tuple)):
        return Gone
    try:
        return owner[step.key]  # type: ignore[call-overload]
    except Exception:  # whatever a class of the user's raises
        return Gone


def attribute(owner: Any, name: str) -> Any:
    """Read an attribute without running code of its class: of a property, its getter."""
    kind = owner if isinstance(owner, type) else type(owner)
    try:
        own = getattr(owner, "__dict__", None) if kind is not owner else None
        if own is not None and name in own:
            return own[name]
        for base in kind.__mro__:
            if name in base.__dict__:
                found = base.__dict__[name]
                if isinstance(found, types.MemberDescriptorType) and kind is not owner:
                    return found.__get__(owner)
                return unwrapped(found)
    except Exception:  # an empty slot, or whatever a class of the user's raises
        return Gone
    return Gone


def unwrapped(method: Any) -> Any:
    """Find the function in a static method, class method or property."""
    if isinstance(method, (staticmethod, classmethod)):
        return method.__func__
    return method.fget if isinstance(method, property) else method


def variable(holder: Any, name: str | _Key) -> Any:
    """Read a variable: of a module, given its dict, of a closure, given its cell, of a class."""
    if isinstance(holder, type):
        return attribute(holder, str(name))
    if isinstance(holder, dict):
        return holder.get(name, Gone)
    try:
        return holder.cell_contents
    except ValueError:  # empty
        return Gone


def reader(holder: Any, path: Path) -> Callable[[], Any]:
    """Make a function that reads what a path leads to: `Gone` where it leads nowhere."""
    first, *others = path

    def read() -> Any:
        value = variable(holder, first)
        for step in others:
            value = _step(value, step)
        return value

    return read


def written(path: Path) -> str:
    """Write a path as Python does."""
    steps = (f".{step}" if isinstance(step, str) else f"[{step.key!r}]" for step in path[1:])
    return "".join((str(path[0]), *steps))


def is_setting(value: Any) -> bool:
    """Take small values that code branches on or computes with, and small containers of them."""
    try:
        return _entries(value, 0) <= _MOST_ENTRIES
    except Exception:  # whatever a class of the user's raises
        return False


def _entries(value: Any, depth: int) -> float:
    kind = type(value)
    if issubclass(kind, _SETTINGS):
        return 1
    if kind.__module__ == "numpy":
        return float(getattr(value, "size", 1))
    if depth == _DEEPEST:
        return math.inf
    if issubclass(kind, dict):
        inside = [*value, *value.values()]
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        inside = [*value]
    elif issubclass(kind, (types.SimpleNamespace, argparse.Namespace)):
        inside = [*vars(value).values()]
    elif dataclasses.is_dataclass(kind):
        inside = [getattr(value, each.name) for each in dataclasses.fields(value)]
    else:
        return math.inf
    return 1 + sum(_entries(item, depth + 1) for item in inside[: _MOST_ENTRIES + 1])
