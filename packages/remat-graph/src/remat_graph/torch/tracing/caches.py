"""Caches of tensors in the code of a model, such as `functools.lru_cache` around a position table.

What they kept before would be no input of a traced graph, and what they keep of a trace exists only
there: the model that was traced would find it later. Known limits: other caches than those of
`functools`, and functions that no module of the model's code can name.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

__all__ = ["Cache", "caches_within", "tensors_forgotten"]

Cache: TypeAlias = "functools._lru_cache_wrapper[Any]"

_OURS = {"remat", "remat_exec", "remat_graph", "remat_partition", "remat_solvers"}
_OF_TESTS = {"_pytest", "hypothesis", "pytest"}  # with thousands of entries, which tests would read
_NOT_THEIRS = {"numpy", "scipy", "sympy", "torch"} | sys.stdlib_module_names | _OURS | _OF_TESTS
_FUNCTIONS = (types.FunctionType, type)
_MAY_HOLD = {types.FunctionType, staticmethod, classmethod, functools._lru_cache_wrapper}


def caches_within(module: torch.nn.Module) -> list[Cache]:
    """Find the caches in the Python modules of a model's classes, and in what these refer to."""
    pending = [cls.__module__ for part in module.modules() for cls in type(part).__mro__]
    seen: set[str] = set()
    caches: dict[int, Cache] = {}
    while pending:
        name = pending.pop()
        if name in seen or name.partition(".")[0] in _NOT_THEIRS:
            continue
        seen.add(name)
        contents = list(vars(sys.modules.get(name, types)).values())
        for item in contents:
            if isinstance(item, types.ModuleType):
                pending.append(item.__name__)
            elif isinstance(item, _FUNCTIONS) and isinstance(item.__module__, str):
                pending.append(item.__module__)
        methods = (vars(item).values() for item in contents if type(item) is type)
        for item in itertools.chain(contents, *methods):
            if type(item) in _MAY_HOLD:
                caches.update((id(cache), cache) for cache in _caches_of(item))
    return list(caches.values())


def _caches_of(item: Any) -> Iterator[Cache]:
    """Yield a function's own cache, or the one that a wrapper around it closes over."""
    if isinstance(item, (staticmethod, classmethod)):
        item = item.__func__
    if type(item) is functools._lru_cache_wrapper:
        yield item
    elif type(item) is types.FunctionType:
        for held in gc.get_referents(*(item.__closure__ or ())):
            if type(held) is functools._lru_cache_wrapper:
                yield held


@contextmanager
def tensors_forgotten(caches: Iterable[Cache]) -> Iterator[None]:
    """Empty those that hold tensors, before and after, and put back what they held.

    What a cache with a bound held cannot be put back: it is computed again when next needed.
    """
    held = [
        (contents, dict(contents))
        for cache in caches
        if _is_with_tensors(cache) and (contents := _contents(cache)) is not None
    ]
    _forget(caches)
    try:
        yield
    finally:
        _forget(caches)
        for contents, before in held:
            contents.update(before)


def _contents(cache: Cache) -> dict[Any, Any] | None:
    """Give the dict of a cache without a bound, which it refers to beside its attributes."""
    if cache.cache_parameters()["maxsize"] is not None:
        return None
    attributes = vars(cache)
    return next(
        each for each in gc.get_referents(cache) if type(each) is dict and each is not attributes
    )


def _forget(caches: Iterable[Cache]) -> None:
    for cache in caches:
        if _is_with_tensors(cache):
            cache.cache_clear()


def _is_with_tensors(cache: Cache) -> bool:
    return bool(cache.cache_info().currsize) and _holds_tensors(gc.get_referents(cache))


def _holds_tensors(items: Iterable[Any], deep: int = 3) -> bool:
    for item in items:
        if isinstance(item, torch.Tensor):
            return True
        held = item.values() if type(item) is dict else item
        if deep and isinstance(item, (dict, tuple, list)) and _holds_tensors(held, deep - 1):
            return True
    return False
