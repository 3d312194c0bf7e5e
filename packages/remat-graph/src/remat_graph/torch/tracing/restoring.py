"""What a forward leaves behind where it is run for planning alone, put back.

That is what it stores on its modules, in containers and objects that hang on them, and in what
their hooks keep, tensors that exist only while tracing among it; and what it takes from Python's
and numpy's random numbers. Known limits: what hangs deeper than `_DEEPEST`, containers of more
than `_MOST_ENTRIES`, slots, and global variables are left as the forward leaves them. The data of
tensors is copied apart (`copied`), for it may be much.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remat_graph.torch.process import remember_numbers
from remat_graph.torch.tracing.fakes import has_no_data

__all__ = ["copied", "left_as_it_was", "reachable", "remember_state"]

_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, set, deque})
_CLOSED = (type, types.ModuleType, torch.Tensor, torch.nn.Module)
_PLAIN = frozenset({bool, int, float, str, type(None)})  # which hold nothing
_DEEPEST = 6
_MOST_ENTRIES = 10_000


@contextmanager
def left_as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """Put back what `remember_state` notes of a module, on every path."""
    put_back = remember_state(module)
    try:
        yield
    finally:
        put_back()


def remember_state(module: torch.nn.Module) -> Callable[[], None]:
    """Note what is stored on a module, and Python's and NumPy's generators; give what puts it back.

    So are the classes of modules, and parameters of lazy ones that got their shapes. The code that
    a graph of `torch.fx` writes of itself at its first call stays.
    """
    parts = list(module.modules())
    for part in parts:
        if isinstance(part, torch.fx.GraphModule):
            _ = part.code
    classes = [(part, type(part)) for part in parts]
    shapeless = [
        (tensor, type(tensor))
        for part in parts
        for tensor in (*part._parameters.values(), *part._buffers.values())
        if tensor is not None and is_lazy(tensor)
    ]
    objects = reachable(part.__dict__ for part in parts)
    before = [(holder, _contents(holder)) for holder in objects if type(holder) in _CONTAINERS]
    states = [(drawn, drawn.getstate()) for drawn in objects if type(drawn) is random.Random]
    numpy = sys.modules.get("numpy")
    own = () if numpy is None else [g for g in objects if type(g) is numpy.random.Generator]
    numpy_states = [(drawn.bit_generator, drawn.bit_generator.state) for drawn in own]
    numbers = remember_numbers()

    def put_back() -> None:
        for part, kind in classes:
            if type(part) is not kind:
                part.__class__ = kind
        for holder, then in before:
            _fill(holder, then)
        for tensor, lazy in shapeless:
            if type(tensor) is not lazy:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.__class__ = lazy
        for drawn, state in states:
            drawn.setstate(state)
        for generator, state in numpy_states:
            generator.state = state
        numbers()

    return put_back


def _fill(holder: Any, then: list[Any]) -> None:
    """Put back what was in a container, unless that is what is there."""
    if not then and not holder:
        return
    now = _contents(holder)
    if len(now) == len(then) and all(map(operator.is_, now, then)):
        return
    holder.clear()
    if isinstance(holder, dict):
        half = len(then) // 2
        holder.update(zip(then[:half], then[half:], strict=True))
    else:
        (holder.extend if isinstance(holder, (list, deque)) else holder.update)(then)


def _contents(holder: Any) -> list[Any]:
    """List what is in a container: of a dictionary, all keys and then their values."""
    if not holder:
        return []
    return [*holder, *holder.values()] if isinstance(holder, dict) else list(holder)


def reachable(level: Iterable[Any]) -> list[Any]:
    """List objects and what hangs on them, each once, but for plain values.

    That is what containers, objects, methods, functions, partial calls and weak references to
    modules hold; modules, tensors and classes are listed, and not looked into.
    """
    objects: list[Any] = []
    seen: set[int] = set()
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
            objects.append(value)
            if size and depth < _DEEPEST:
                below.extend(_held(value))
        level = below
    return objects


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
    if issubclass(kind, weakref.ref):  # handles of hooks have some to all hooks
        return (value(),) if issubclass(type(value()), torch.nn.Module) else ()
    if kind is types.FunctionType:
        defaults = value.__defaults__ or (), value.__kwdefaults__ or {}
        return *_closure_of(value), *defaults
    if issubclass(kind, _CLOSED) or hasattr(kind, "original_forward"):
        return ()  # the second has plans, which are to stay
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return (attributes,) if type(attributes) is dict else ()


def copied(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Copy the data of tensors; what is returned puts it back, into the memory where it was.

    Also where they were resized, or given other memory. The parts of sparse tensors and of
    subclasses are put back; what holds its data in no such part is left as it is.
    """
    parts = [part for tensor in tensors for part in _dense_parts(tensor)]
    places = [(part, part.detach()) for part in parts]
    data = {
        storage._cdata: (storage, _bytes_of(storage).clone())
        for storage in (place.untyped_storage() for _, place in places)
    }

    def put_back() -> None:
        for storage, then in data.values():
            if storage.nbytes() != then.numel():
                storage.resize_(then.numel())
            now = _bytes_of(storage)
            if not torch.equal(now, then):
                now.copy_(then)
        for part, place in places:
            if _place_of(part) != _place_of(place):
                part.data = place

    return put_back


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tensor.size(), tensor.stride()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """List the tensors with memory of their own that a tensor is made of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _dense_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        if not (has_no_data(tensor) or is_lazy(tensor)):
            yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def _closure_of(function: types.FunctionType) -> list[Any]:
    """List what the variables of enclosing functions hold that a function reads."""
    held = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # of one that holds nothing yet
            held.append(cell.cell_contents)
    return held
