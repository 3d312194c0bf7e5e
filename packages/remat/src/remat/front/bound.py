"""What a model holds that refers to the model itself, where a copy of it is to be trained.

Methods of what was copied, which it or its submodules hold, as hooks, are bound to the copy, and so
are functions that close over it, and weak references: such a submodule is copied, too, as one with
another forward is. What refers to it otherwise, as a list or an object, is told of.
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.front.units import copy_within, end_copying
from remat_graph.torch import reachable

__all__ = ["Bound", "bind_to_copy"]

_REGISTERED = frozenset({"_modules", "_parameters", "_buffers"})
_DEEPEST = 6


@dataclass(eq=False)
class Bound:
    """What follows a model in its copy: hooks that were bound, and what refers to the model.

    `copies` are modules of the model with their copies.
    """

    copies: list[tuple[torch.nn.Module, torch.nn.Module]]
    is_referred_to: bool = False
    hooks: list[tuple[dict[Any, Any], dict[Any, Any], list[Any]]] = field(default_factory=list)

    def follow(self) -> None:
        """Remove hooks that the model has no more, and let it train or evaluate as the copy does.

        That is for code that refers to the model.
        """
        if self.is_referred_to:
            for part, twin in self.copies:
                part.training = twin.training
        for own, of_model, bound in self.hooks:
            for key in bound:
                if key not in of_model:
                    own.pop(key, None)

    def bind(self) -> None:
        """Bind what the copies hold."""
        twins = _twins(self.copies)
        for part, twin in self.copies:
            for name, item in twin.__dict__.items():
                if name in _REGISTERED:
                    continue
                twin.__dict__[name] = _bound(item, twins)
                if isinstance(item, dict):  # which is the copy's own
                    bound = {key: _bound(value, twins) for key, value in item.items()}
                    changed = [key for key, value in bound.items() if value is not item[key]]
                    if changed:
                        item.update(bound)
                        self.hooks.append((item, part.__dict__[name], changed))


def bind_to_copy(copy: torch.nn.Module, model: torch.nn.Module) -> Bound | None:
    """Bind methods of modules that were copied, which the copy or parts of it hold, to the copies.

    `None` if there is nothing to follow.

    Warns:
        UserWarning: if something else refers to what was copied.
    """
    copies, before = _copies(copy, model), 0
    while len(copies) > before and (name := _holder(copy, copies)) is not None:
        copy_within(copy, name)  # its hooks are the original's
        before, copies = len(copies), _copies(copy, model)
    found = Bound(copies)
    end_copying(copy)
    found.bind()
    references = list(dict.fromkeys(_references(copy, _twins(copies))))
    if references:
        found.is_referred_to = True
        warnings.warn(
            f"{', '.join(references[:3])}{', ...' if len(references) > 3 else ''} of "
            f"{type(model).__name__} refers to the original model or a part of it, not to the copy "
            f"that is returned: attributes that are read or written there are not the copy's, and "
            f"gradients may differ from eager's. Set it on what remat.rematerialize returns, or "
            f"let it do without the model",
            stacklevel=3,
        )
    return found if found.hooks or found.is_referred_to else None


def _copies(
    copy: torch.nn.Module, model: torch.nn.Module
) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Pair modules of the model with their copies."""
    originals = dict(model.named_modules(remove_duplicate=False))
    pairs = {
        id(twin): (originals[name], twin)
        for name, twin in copy.named_modules(remove_duplicate=False)
        if name in originals and originals[name] is not twin
    }
    return list(pairs.values())


def _twins(
    copies: Iterable[tuple[torch.nn.Module, torch.nn.Module]],
) -> dict[int, torch.nn.Module]:
    return {id(part): twin for part, twin in copies}


def _holder(
    copy: torch.nn.Module, copies: Iterable[tuple[torch.nn.Module, torch.nn.Module]]
) -> str | None:
    """Name a part of the copy that is the model's, and holds a method of what was copied."""
    twins, own = _twins(copies), {id(twin) for _, twin in copies}
    others = (name for name, part in copy.named_modules() if id(part) not in own)
    holds = (
        name
        for name in others
        if any(_bound(item, twins) is not item for item in _held(copy.get_submodule(name)))
    )
    return next(holds, None)


def _bound(item: Any, twins: Mapping[int, torch.nn.Module], depth: int = 0) -> Any:
    """Give what was copied as its copy, and so what a method, closure or partial call has of it.

    Anything else is given as it is.
    """
    if id(item) in twins:
        return twins[id(item)]
    if depth == _DEEPEST:
        return item
    again = functools.partial(_bound, twins=twins, depth=depth + 1)
    if type(item) is types.MethodType:
        parts = item.__func__, item.__self__
        return _rebuilt(item, parts, again, types.MethodType)
    if type(item) is functools.partial:
        parts = item.func, *item.args, *item.keywords.values()
        names, count = tuple(item.keywords), len(item.args)

        def call(function: Any, *rest: Any) -> Any:
            keywords = dict(zip(names, rest[count:], strict=True))
            return functools.partial(function, *rest[:count], **keywords)

        return _rebuilt(item, parts, again, call)
    if type(item) is weakref.ref:
        return _rebuilt(item, (item(),), again, weakref.ref)
    if type(item) is types.FunctionType:
        cells, defaults = item.__closure__ or (), item.__defaults__ or ()
        keywords = item.__kwdefaults__ or {}
        parts = *cells, *defaults, *keywords.values()
        return _rebuilt(item, parts, again, functools.partial(_function, item))
    if type(item) is types.CellType:
        with suppress(ValueError):  # of one that holds nothing yet
            return _rebuilt(item, (item.cell_contents,), again, types.CellType)
    return item


def _rebuilt(
    item: Any, parts: Sequence[Any], again: Callable[[Any], Any], make: Callable[..., Any]
) -> Any:
    """Make an item of its parts as they are bound, if one is another."""
    bound = [again(part) for part in parts]
    changed = any(one is not other for one, other in zip(parts, bound, strict=True))
    return make(*bound) if changed else item


def _function(function: types.FunctionType, *parts: Any) -> types.FunctionType:
    """Make a function like another, of its cells, defaults and keyword-only defaults."""
    count, names = len(function.__closure__ or ()), tuple(function.__kwdefaults__ or ())
    end = len(parts) - len(names)
    like = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, parts[count:end], parts[:count]
    )
    like.__kwdefaults__ = dict(zip(names, parts[end:], strict=True))
    functools.update_wrapper(like, function)
    del like.__wrapped__  # type: ignore[attr-defined]
    like.__dict__.update(function.__dict__)
    return like


def _held(part: torch.nn.Module) -> Iterator[Any]:
    """Give the attributes of a module, and the values of those that are dictionaries."""
    for name, item in part.__dict__.items():
        if name not in _REGISTERED:
            yield from (item, *(item.values() if isinstance(item, dict) else ()))


def _references(copy: torch.nn.Module, twins: Mapping[int, torch.nn.Module]) -> Iterator[str]:
    """Name the attributes of the copy's modules that lead to what was copied."""
    for prefix, part in copy.named_modules():
        for name, item in part.__dict__.items():
            if name in _REGISTERED:
                continue
            if any(id(held) in twins for held in reachable([item])):
                yield f"{prefix}.{name}".lstrip(".")
