"""Subclasses of `OrderedDict` that store or read items in a way of their own.

What `OrderedDict` itself does, as where it is made of items, calls that of the subclass (it does
not for `dict`). TorchDynamo does not call it: what is stored there would be what was given.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.misc import SuperVariable

__all__ = ["break_at_own_items"]

_OWN = "__setitem__", "__getitem__"
_OF_ITEMS = frozenset({"__init__", "update", "setdefault", "copy", "fromkeys", "__ior__"})


def break_at_own_items(original: Any) -> Any:
    """Have Dynamo break where a method of `OrderedDict` calls those of a subclass."""

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _OF_ITEMS and (args or kwargs or name == "copy"):
            kind = _kind_of(self)
            by_super = isinstance(self, SuperVariable)
            if _has_own(kind) and (by_super or name == "fromkeys" or _is_inherited(kind, name)):
                unimplemented(
                    gb_type="a subclass of OrderedDict with items of its own",
                    context=f"{kind.__name__}.{name}",
                    explanation=f"OrderedDict.{name} calls methods of {kind.__name__} for items.",
                    hints=[],
                )
        return original(self, tx, name, args, kwargs)

    return call_method


def _kind_of(variable: Any) -> type:
    """Give the class that a variable of Dynamo is or has, or that `super()` is called for."""
    value = getattr(getattr(variable, "objvar", variable), "value", None)
    return value if isinstance(value, type) else type(value)


def _has_own(kind: type) -> bool:
    return issubclass(kind, OrderedDict) and not all(_is_inherited(kind, each) for each in _OWN)


def _is_inherited(kind: type, name: str) -> bool:
    return getattr(kind, name) is getattr(OrderedDict, name)
