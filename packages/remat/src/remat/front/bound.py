"""What a model holds that refers to the model itself, where a copy of it is to be trained.

Its methods that it or its submodules hold, as hooks, are bound to the copy: such a submodule is
copied, as one with another forward is. What refers to it in other ways is told of.
"""

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.front.units import copy_within
from remat_graph.torch import closure_of

__all__ = ["Bound", "bind_to_copy"]

_CONTAINERS = (dict, list, tuple, set)
_DEEPEST = 4


@dataclass(eq=False)
class Bound:
    """What follows a model in its copy: hooks that were bound, and what refers to the model."""

    copy: torch.nn.Module
    model: torch.nn.Module
    is_referred_to: bool = False
    hooks: list[tuple[dict[Any, Any], dict[Any, Any], list[Any]]] = field(default_factory=list)

    def follow(self) -> None:
        """Remove hooks that the model has no more, and let it train or evaluate as the copy does.

        That is for code that refers to the model.
        """
        if self.is_referred_to:
            self.model.training = self.copy.training
        for own, of_model, bound in self.hooks:
            for key in bound:
                if key not in of_model:
                    own.pop(key, None)


def bind_to_copy(copy: torch.nn.Module, model: torch.nn.Module) -> Bound | None:
    """Bind methods of the model that its shallow copy and parts of it hold to the copy.

    `None` if there is nothing to follow.

    Warns:
        UserWarning: if something else refers to the model.
    """
    found = Bound(copy, model)
    for name, part in list(copy.named_modules()):
        if not name:
            _bind(found, copy, model)
        elif any(_bound(found, item) is not item for item in _held(part)):
            _bind(found, copy_within(copy, name), part)  # its hooks are the original's
    references = list(dict.fromkeys(_references(copy, model)))
    if references:
        found.is_referred_to = True
        warnings.warn(
            f"{', '.join(references[:3])}{', ...' if len(references) > 3 else ''} of "
            f"{type(model).__name__} refers to the original model, not to the copy that is "
            f"returned: attributes that are read or written there are not the copy's, and "
            f"gradients may differ from eager's. Set it on what remat.rematerialize returns, or "
            f"let it do without the model",
            stacklevel=3,
        )
    return found if found.hooks or found.is_referred_to else None


def _bind(found: Bound, twin: torch.nn.Module, part: torch.nn.Module) -> None:
    """Bind what a part's own copy holds."""
    for name, item in twin.__dict__.items():
        twin.__dict__[name] = _bound(found, item)
        if isinstance(item, dict):  # which is the copy's own
            bound = {key: _bound(found, value) for key, value in item.items()}
            changed = [key for key, value in bound.items() if value is not item[key]]
            if changed:
                item.update(bound)
                found.hooks.append((item, part.__dict__[name], changed))


def _bound(found: Bound, item: Any) -> Any:
    """Give a method of the model as one of the copy, anything else as it is."""
    if type(item) is types.MethodType and item.__self__ is found.model:
        return types.MethodType(item.__func__, found.copy)
    return item


def _held(part: torch.nn.Module) -> Iterator[Any]:
    """Give the attributes of a module, and the values of those that are dictionaries."""
    for item in part.__dict__.values():
        yield from (item, *(item.values() if isinstance(item, dict) else ()))


def _references(copy: torch.nn.Module, model: torch.nn.Module) -> Iterator[str]:
    """Name the attributes of modules by which the model is reached, but for the copy's own."""
    parts = ((f"{name}.", part) for name, part in copy.named_modules() if name)
    for prefix, part in itertools.chain([("", copy)], parts):
        for name, item in part.__dict__.items():
            if name not in ("_modules", "_parameters", "_buffers") and _reaches(item, model, 0):
                yield f"{prefix}{name}"


def _reaches(item: Any, model: torch.nn.Module, depth: int) -> bool:
    """Whether containers, methods, closures and partial calls lead to the model."""
    if item is model:
        return True
    if depth == _DEEPEST:
        return False
    inner: Any = ()
    kind = type(item)
    if issubclass(kind, dict):
        inner = list(dict.values(item))
    elif kind in _CONTAINERS:
        inner = list(item)
    elif kind is types.MethodType:
        inner = (item.__self__, item.__func__)
    elif kind is types.FunctionType:
        defaults = (*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values())
        inner = (*closure_of(item), *defaults)
    elif kind is functools.partial:
        inner = (item.func, *item.args, *item.keywords.values())
    return any(_reaches(each, model, depth + 1) for each in inner)
