"""`math.exp` and `math.log` of symbols, as torch has the square root and others.

Of a function that torch has not, TorchDynamo takes the number of the call for a constant, and
traces anew for each: of a weight `math.exp(-step / 100)`, at each step. Tried with torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental import sym_node
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._sympy import functions
from torch.utils._sympy.printers import CppPrinter, PythonPrinter

__all__ = ["symbolic_math"]

_TEACH = "_make_node_magic", "_make_user_magic"


def _of_symbols(name: str) -> Callable[[Any], Any] | None:
    """Give a function of `math` that gives a symbol for one, and teach torch's symbols what it is.

    `None` where torch has its own, or cannot be taught.
    """
    if hasattr(torch, f"_sym_{name}") or not all(hasattr(sym_node, each) for each in _TEACH):
        return None
    method, of_number = f"sym_{name}", getattr(math, name)

    def function(number: Any) -> Any:
        if has_torch_function_unary(number):
            return handle_torch_function(function, (number,), number)
        if isinstance(number, torch.SymInt):
            number = torch.sym_float(number)  # type: ignore[no-untyped-call]
        if isinstance(number, torch.SymFloat):
            return getattr(number, f"__{method}__")()
        return of_number(number)

    function.__name__ = function.__qualname__ = method
    for known_methods in (
        sym_node.unary_magic_methods,
        sym_node.unary_methods,
        sym_node.always_float_magic_methods,
    ):
        known_methods.add(method)
    sym_node.METHOD_TO_OPERATOR[method] = function
    setattr(sym_node.SymNode, method, lambda node: getattr(node, f"_{method}")())
    opaque = f"OpaqueUnaryFn_{name}"
    make_node_magic: Any = sym_node._make_node_magic
    make_user_magic: Any = sym_node._make_user_magic
    make_node_magic(method, getattr(functions, opaque))
    make_user_magic(method, torch.SymFloat)
    for printer, of in (PythonPrinter, f"math.{name}"), (CppPrinter, f"std::{name}"):
        setattr(printer, f"_print_{opaque}", _printed(of))
    return function


def _printed(function: str) -> Callable[[Any, Any], str]:
    return lambda printer, expression: f"{function}({printer._print(expression.args[0])})"


sym_exp = _of_symbols("exp")  # by the name that they have: the code of a graph imports them
sym_log = _of_symbols("log")
_FUNCTIONS = {"_sym_exp": sym_exp, "_sym_log": sym_log}


@contextmanager
def symbolic_math() -> Iterator[None]:
    """Have TorchDynamo put these functions into its graphs; while its lock is held."""
    missing = {name: function for name, function in _FUNCTIONS.items() if function is not None}
    for name, function in missing.items():
        setattr(torch, name, function)
    try:
        yield
    finally:
        for name in missing:
            delattr(torch, name)
