"""Numbers and arrays of NumPy in the forward.

TorchDynamo runs NumPy's functions by torch's. What these return may be of another type, shape or
value: `np.median` of an array has one dimension, `np.cbrt` of -8 is NaN, one array of integers by
another has 32 bits. A number of NumPy's is a tensor there, of 64 bits, no size and no branch. So a
number is Python's here, and what is computed of numbers is computed by NumPy. What is computed of
arrays breaks the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch._dynamo import guards, utils
from torch._dynamo.exc import SkipFrame, unimplemented
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, builder
from torch._dynamo.variables.tensor import SymNodeVariable

__all__ = ["NumpyValues"]

_NUMBERS = np.float64, np.int64
_ASKING = isinstance, type, hasattr, getattr, repr, round
_FUNCTIONS = (
    np.prod, np.sum, np.mean, np.max, np.min, np.round, np.around, np.clip, np.float64, np.int64,
)  # fmt: skip
_OF_SIZES: dict[Any, Callable[[Any], Any]] = {
    np.sqrt: math.sqrt,
    np.floor: math.floor,
    np.ceil: math.ceil,
}
_BY_TORCH = (
    utils.numpy_to_tensor_wrapper,
    utils.numpy_method_wrapper,
    utils.numpy_operator_wrapper,
)
_TENSORS = torch.tensor, torch.as_tensor, torch.asarray, torch._refs.tensor


class NumpyValues:
    """What is found of NumPy's numbers while one frame is compiled."""

    def __init__(self) -> None:
        self._met = False

    def wrap(self, original: Any) -> Any:
        """Take a number that the forward holds or is given for Python's."""

        def wrap(self_: Any, value: Any) -> Any:
            if type(value) not in _NUMBERS or self_.source is None:
                return original(self_, value)
            self._met = True
            self_.install_guards(guards.GuardBuilder.TYPE_MATCH)
            number = CallFunctionNoArgsSource(AttrSource(self_.source, "item"))
            return builder.VariableBuilder(self_.tx, number)(value.item())

        return wrap

    def call(self, original: Any) -> Any:
        """Run a function of numbers and sizes, instead of tracing it."""

        def call_function(self_: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            function = self_.value
            if isinstance(function, np.ufunc) or any(function is each for each in _FUNCTIONS):
                everything = [*args, *kwargs.values()]
                if everything and all(each.is_python_constant() for each in everything):
                    number = function(
                        *(each.as_python_constant() for each in args),
                        **{name: each.as_python_constant() for name, each in kwargs.items()},
                    )
                    if type(number) in _NUMBERS:
                        self._met = True
                        return ConstantVariable.create(number.item())
                elif len(args) == 1 and not kwargs:
                    found = _of_sizes(function, args[0], tx)
                    if found is not None:
                        self._met = True
                        return found
            return original(self_, tx, args, kwargs)

        return call_function

    def ask(self, original: Any) -> Any:
        """Leave a frame as it is that asks what a number is, of which Python's is another."""

        def call_function(self_: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            asking = self_.as_python_constant()
            if args and asking in _ASKING and _is_number(args[0].realize()) and self._met:
                raise SkipFrame(
                    f"it calls {asking.__name__} of a number, and uses numbers of NumPy, which are "
                    f"Python's in a graph"
                )
            return original(self_, tx, args, kwargs)

        return call_function

    def watch(self, original: Any) -> Any:
        """Break the graph at what is computed of arrays.

        A tensor of a number of NumPy's has its type, of 64 bits. Python's has none, so a frame that
        makes one, and has met a number of NumPy's, runs as it is.
        """

        def create_proxy(
            tracer: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
        ) -> Any:
            if isinstance(target, _BY_TORCH):
                name = target.__name__.removeprefix("wrapped_")
                unimplemented(
                    gb_type="NumPy computes on an array",
                    context=name,
                    explanation=f"NumPy's {name} runs between graphs: torch's may return another "
                    f"type, shape or value.",
                    hints=["Compute it by torch."],
                )
            if self._met and target in _TENSORS and _has_float(args) and "dtype" not in kwargs:
                raise SkipFrame(
                    "it makes a tensor of a number, and uses numbers of NumPy, whose type a tensor "
                    "would have; give dtype="
                )
            return original(tracer, kind, target, args, kwargs, *rest, **named)

        return create_proxy


def _of_sizes(function: Any, argument: Any, tx: Any) -> Any:
    """Compute of a size that changes what its symbol can, or give None."""
    if function in _OF_SIZES and isinstance(argument, SymNodeVariable):
        computed = builder.SourcelessBuilder.create(tx, _OF_SIZES[function])
        found = computed.call_function(tx, [argument], {})
        return BuiltinVariable(float).call_function(tx, [found], {})
    items = getattr(argument, "items", None)
    if function is np.prod and isinstance(items, list):
        times = BuiltinVariable(operator.mul)
        if all(each.python_type() is int for each in items):
            return reduce(lambda one, other: times.call_function(tx, [one, other], {}), items)
    return None


def _is_number(variable: Any) -> bool:
    if isinstance(variable, ConstantVariable):
        return type(variable.value) in (int, float)
    return isinstance(variable, SymNodeVariable)


def _has_float(args: Any) -> bool:
    found = torch.utils._pytree.tree_leaves(args)
    return any(
        isinstance(each, float)
        or (
            isinstance(each, torch.fx.Proxy)
            and isinstance(each.node.meta.get("example_value"), torch.SymFloat)
        )
        for each in found
    )
