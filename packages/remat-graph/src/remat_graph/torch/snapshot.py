"""What a Python value holds, as a hashable description to compare with what it holds later.

Two snapshots are equal if code that reads the values would read the same: plain values by type and
value, containers and objects by what is in them, functions, types and other immutable objects by
their own `==`. Of tensors only their type is described, modules are described by identity and
their plain attributes: both are guarded elsewhere.

Known limits: what lies deeper than `_DEEPEST`, behind more than `_MOST_ENTRIES` entries or in an
array of more than `_MOST_BYTES` is described by identity, as are the variables a function closes
over and the state of extension types without `__dict__`.
"""

from __future__ import annotations

import enum
import functools
import logging
import pathlib
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Hashable, Iterable
from typing import Any

import torch

__all__ = ["PLAIN", "Snapshots", "settings_of", "snapshot"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_EXACTLY_PLAIN = frozenset(PLAIN)
_BY_EQUALITY = (
    type,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    logging.Logger,
    logging.Handler,
    pathlib.PurePath,
)
_OWN_ATTRIBUTES = frozenset(torch.nn.Module().__dict__)
_DEEPEST = 6
_MOST_ENTRIES = 50_000
_MOST_BYTES = 1 << 20


def snapshot(value: object) -> Hashable:
    """Describe one value."""
    return Snapshots().take(value)


def settings_of(owner: torch.nn.Module) -> list[str]:
    """Name the attributes of a module to take snapshots of.

    They are all but torch's own, plain values, tensors, and what rematerializing adds.
    """
    added = (
        ("forward", "plan") if hasattr(owner.__dict__.get("forward"), "original_forward") else ()
    )
    return [
        key
        for key, value in owner.__dict__.items()
        if key not in _OWN_ATTRIBUTES
        and key not in added
        and not isinstance(value, (*PLAIN, torch.Tensor))
    ]


class _Same:
    """Equal to another that holds the very same object, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Snapshots:
    """Takes snapshots at one moment; an object that several values share is read once."""

    def __init__(self) -> None:
        self._taken: dict[int, Hashable] = {}
        self._kept: list[object] = []  # so that no id is given out twice
        self._entries_left = _MOST_ENTRIES

    def take(self, value: object, depth: int = 0) -> Hashable:
        """Describe a value."""
        kind = type(value)
        if kind in _EXACTLY_PLAIN:
            return kind, _exact(value)
        if id(value) in self._taken:
            return self._taken[id(value)]
        if isinstance(value, torch.Tensor):
            return (kind,)
        if isinstance(value, torch.nn.Module):
            return kind, weakref.ref(value), _plain_attributes(value)
        if isinstance(value, weakref.ref):
            referent = value()  # a dead one may have been a tensor: nn.LSTM refers to its weights
            tensor = referent is None or isinstance(referent, torch.Tensor)
            return (kind,) if tensor else (kind, self.take(referent, depth))
        if isinstance(value, _BY_EQUALITY):
            return kind, value
        if depth >= _DEEPEST or self._entries_left <= 0:
            return _opaque(value)
        self._taken[id(value)] = (kind, "contains itself")
        self._kept.append(value)
        found = kind, self._content(value, depth + 1), self._state(value, depth + 1)
        taken: Hashable = found if found[1:] != (None, None) else _opaque(value)
        self._taken[id(value)] = taken
        return taken

    def _content(self, value: Any, depth: int) -> Any:
        """Describe what a value holds besides its attributes; `None` if nothing is known of it."""
        match value:
            case dict():
                return self._all(value, value, depth), self._all(value, value.values(), depth)
            case list() | tuple() | deque():
                return self._all(value, value, depth)
            case set() | frozenset():
                inside = self._all(value, value, depth)
                return inside if isinstance(inside, _Same) else (len(value), frozenset(inside))
            case bool() | int() | float() | complex() | str() | bytes() | bytearray():
                return _exact(value) if not isinstance(value, bytearray) else bytes(value)
            case slice():
                return self._all(value, (value.start, value.stop, value.step), depth)
            case functools.partial():
                return self.take((value.func, value.args, value.keywords), depth)
            case types.MethodType():
                return value.__func__, self.take(value.__self__, depth)
            case random.Random():
                return value.getstate()
        return self._numpy_content(value, depth)

    def _numpy_content(self, value: Any, depth: int) -> Hashable:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        if isinstance(value, numpy.random.Generator):
            return self.take(value.bit_generator.state, depth)
        if isinstance(value, numpy.random.RandomState):
            return self.take(value.get_state(legacy=False), depth)
        if not isinstance(value, numpy.ndarray):
            return None
        if value.dtype.hasobject:
            return value.shape, self.take(value.tolist(), depth)
        data = value.tobytes() if value.nbytes <= _MOST_BYTES else _Same(value)
        return value.shape, value.dtype.str, data

    def _state(self, value: Any, depth: int) -> Hashable:
        """Describe the attributes of an object; `None` if it has none of its own."""
        attributes = getattr(value, "__dict__", None)
        slots = [
            name
            for base in type(value).__mro__
            for name in _names(base.__dict__.get("__slots__", ()))
            if name not in ("__dict__", "__weakref__") and hasattr(value, name)
        ]
        if not isinstance(attributes, dict):
            if not slots:
                return None
            attributes = {}
        read = {**attributes, **{name: getattr(value, name) for name in slots}}
        return tuple(read), self._all(value, read.values(), depth)

    def _all(self, holder: object, values: Collection[Any], depth: int) -> Any:
        self._entries_left -= len(values)
        if self._entries_left <= 0:
            return _Same(holder)
        values = tuple(values)
        kinds = tuple(map(type, values))
        if float not in kinds and _EXACTLY_PLAIN.issuperset(kinds):
            return tuple(zip(kinds, values, strict=True))
        return tuple([self.take(item, depth) for item in values])


def _exact(value: Any) -> Any:
    """Tell zeros of different sign apart, and no NaN from another."""
    return float(value).hex() if isinstance(value, float) else value


def _opaque(value: Any) -> Hashable:
    try:
        hash(value)
    except Exception:  # whatever a class of the user's raises
        return type(value), _Same(value)
    return type(value), value


def _plain_attributes(module: torch.nn.Module) -> Hashable:
    return tuple(
        (key, type(value), _exact(value))
        for key, value in module.__dict__.items()
        if type(value) in _EXACTLY_PLAIN
    )


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots
