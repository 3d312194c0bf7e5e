"""What is equal, or is computed with, in a way of its own.

TorchDynamo finds objects in a dict by what they are, frozen dataclasses by all their fields, and
bound methods equal whatever object they are of; a number of the user's class, beside a tensor, is a
number. Where Python would ask the class, it breaks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import base, user_defined
from torch._dynamo.variables.functions import UserMethodVariable

__all__ = ["breaks_at_own_methods"]

_EQUAL, _HASH, _VALUE = "is_python_equal", "hash_impl", "get_real_python_backed_value"
_OBJECTS = "UserDefinedObjectVariable", "UserDefinedTupleVariable"
_FROZEN = "FrozenDataClassVariable"
_NUMBER, _PROXY = "UserDefinedConstantVariable", "as_proxy"
_ARITHMETIC = frozenset(
    f"__{side}{name}__"
    for side in ("", "r")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
)
_WRITTEN = "<string>"  # the file of the methods that `dataclass` writes


def breaks_at_own_methods() -> tuple[tuple[Any, str, Callable[[Any], Any]], ...]:
    """List where Dynamo is changed: the class, its method, and what makes another of it.

    These are the names of torch 2.13; what a version does not have stays as it is.
    """
    wanted: list[tuple[Any, str, Callable[[Any], Any]]] = [
        *((getattr(user_defined, each, None), _EQUAL, _ask_equality) for each in _OBJECTS),
        (getattr(user_defined, _FROZEN, None), _HASH, _ask_fields),
        (getattr(user_defined, _NUMBER, None), _PROXY, _ask_arithmetic),
        (UserMethodVariable, _VALUE, lambda _: lambda self: base.NO_SUCH_SUBOBJ),
    ]
    return tuple(each for each in wanted if each[1] in vars(each[0] or object))


def _ask_equality(original: Any) -> Any:
    """Have Dynamo break where two keys of one hash are compared by an `__eq__` of theirs."""

    def is_python_equal(self: Any, other: Any) -> Any:
        kind = type(self.value)
        is_known = other is self or self.is_python_constant()
        if is_known or not isinstance(kind.__eq__, FunctionType):
            return original(self, other)
        if self.value is getattr(other, "value", None):
            return True
        _break(kind, f"Two keys of one hash are compared by {kind.__name__}.__eq__.")

    return is_python_equal


def _ask_fields(original: Any) -> Any:
    """Have Dynamo break at frozen dataclasses as keys that are not compared by all their fields."""

    def hash_impl(self: Any, *rest: Any) -> Any:
        kind = type(self.value)
        if not (_is_of_torch(kind) or _compares_all(kind)):
            _break(kind, f"A {kind.__name__} is not compared by all its fields.")
        return original(self, *rest)

    return hash_impl


def _ask_arithmetic(original: Any) -> Any:
    """Have Dynamo break where a number with operators of its own meets a tensor."""

    def as_proxy(self: Any) -> Any:
        kind = type(self.value)
        if any(isinstance(getattr(kind, each, None), FunctionType) for each in _ARITHMETIC):
            _break(kind, f"A {kind.__name__} has operators of its own.")
        return original(self)

    return as_proxy


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _compares_all(kind: Any) -> bool:
    fields = dataclasses.fields(kind)
    return (
        _is_written(kind.__eq__)
        and _is_written(kind.__hash__)
        and all(each.compare and each.hash is not False for each in fields)
    )


def _is_written(method: Any) -> bool:
    """Whether `dataclass` wrote a method."""
    return isinstance(method, FunctionType) and method.__code__.co_filename == _WRITTEN


def _break(kind: type, explanation: str) -> NoReturn:
    unimplemented(
        gb_type="a class with operators of its own",
        context=kind.__name__,
        explanation=explanation,
        hints=[],
    )
