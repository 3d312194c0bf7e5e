"""What a forward leaves behind where it is run for planning alone, put back.

That is what it stores on its modules, in containers and objects that hang on them, and in what
their hooks keep, tensors that exist only while tracing among it; and what it takes from Python's
and numpy's random numbers. Known limits: what hangs deeper than `_DEEPEST`, containers of more
than `_MOST_ENTRIES`, slots, and global variables are left as the forward leaves them.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

__all__ = ["buffers_restored", "left_as_it_was"]

_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, set, deque})
_CLOSED = (type, types.ModuleType, torch.Tensor, torch.nn.Module)
_PLAIN = frozenset({bool, int, float, str, type(None)})  # which hold nothing
_DEEPEST = 6
_MOST_ENTRIES = 10_000


@contextmanager
def left_as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """Put back what is stored on a module, and the random generators, on every path."""
    found = _reachable(module)
    before = [(holder, _contents(holder)) for holder in found if type(holder) in _CONTAINERS]
    states = [(drawn, drawn.getstate()) for drawn in found if type(drawn) is random.Random]
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state(legacy=False)
    own = () if numpy is None else [g for g in found if type(g) is numpy.random.Generator]
    numpy_states = [(drawn.bit_generator, drawn.bit_generator.state) for drawn in own]
    try:
        yield
    finally:
        for holder, then in before:
            if not then and not holder:
                continue
            now = _contents(holder)
            if len(now) != len(then) or not all(map(operator.is_, now, then)):
                holder.clear()
                if isinstance(holder, dict):
                    half = len(then) // 2
                    holder.update(zip(then[:half], then[half:], strict=True))
                else:
                    (holder.extend if isinstance(holder, (list, deque)) else holder.update)(then)
        for drawn, state in states:
            drawn.setstate(state)
        random.setstate(python_state)
        for generator, state in numpy_states:
            generator.state = state
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _contents(holder: Any) -> list[Any]:
    """List what is in a container: of a dictionary, all keys and then their values."""
    if not holder:
        return []
    return [*holder, *holder.values()] if isinstance(holder, dict) else list(holder)


def _reachable(module: torch.nn.Module) -> list[Any]:
    """List what hangs on a module and its submodules, each once, but for plain values."""
    found: list[Any] = []
    seen: set[int] = set()
    level: Iterable[Any] = [part.__dict__ for part in module.modules()]
    for depth in range(_DEEPEST + 1):
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _PLAIN or id(value) in seen:
                continue
            seen.add(id(value))
            size = len(value) if kind in _CONTAINERS else 1
            if size > _MOST_ENTRIES:
                continue
            found.append(value)
            if size and depth < _DEEPEST:
                below.extend(_held(value))
        level = below
    return found


def _held(value: Any) -> Iterable[Any]:
    """List what a value holds, without running code of its class."""
    kind = type(value)  # isinstance asks the value
    if issubclass(kind, dict):
        return dict.values(value)
    if kind in _CONTAINERS or kind is tuple:
        return cast("Iterable[Any]", value)
    if kind is functools.partial:
        return value.func, value.args, value.keywords
    if kind is types.MethodType:
        return value.__self__, value.__func__
    if kind is types.FunctionType:
        return [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
    if issubclass(kind, _CLOSED) or hasattr(kind, "original_forward"):
        return ()  # the second has plans, which are to stay
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return (attributes,) if type(attributes) is dict else ()


@contextmanager
def buffers_restored(module: torch.nn.Module) -> Iterator[None]:
    """Put back the data of buffers."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, data in before:
                if not torch.equal(buffer, data):
                    buffer.copy_(data)


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
