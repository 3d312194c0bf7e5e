"""What the forward prints, logs and warns of: it runs behind the graph, instead of breaking it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, misc

__all__ = ["log_later", "share_what_is_told", "warn_later"]

_QUERIES = frozenset({"isEnabledFor", "getEffectiveLevel", "hasHandlers", "getChild"})


def log_later(original: Any) -> Any:
    """Let a logger's methods run after the graph in which they are called, instead of breaking it.

    Dynamo has this for `print`; for loggers it can only leave the call out, and lose the message.
    """

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        method = getattr(self.value, name, None)
        if not callable(method) or self.source is None:
            return original(self, tx, name, args, kwargs)
        level = getattr(logging, name.upper(), None)
        if isinstance(level, int) and not self.value.isEnabledFor(level):
            return ConstantVariable.create(None)
        later = misc.DebuggingVariable(method, source=AttrSource(self.source, name))
        if name in _QUERIES or kwargs or not later.can_reorder_logs(method, args, kwargs):
            return original(self, tx, name, args, kwargs)
        _tell(tx, later, args)
        return ConstantVariable.create(None)

    return call_method


def warn_later(original: Any) -> Any:
    """Let `print` and `warnings.warn` run later with whatever is known while compiling."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is warnings.warn:  # its category matters, its other arguments do not
            args = [*args[:2], *(item for key, item in kwargs.items() if key == "category")]
            kwargs = {}
        can_run_later = [
            self.can_reorder_logs(self.value, [a], {}) or _is_constant_or_guarded(a) for a in args
        ]
        if kwargs or not all(can_run_later):
            return original(self, tx, args, kwargs)
        _tell(tx, self, args)
        return ConstantVariable.create(None)

    return call_function


def _is_constant_or_guarded(variable: Any) -> bool:
    return bool(variable.is_python_constant()) or variable.source is not None


def _tell(tx: Any, later: Any, args: Any) -> None:
    """Have it run behind the graph, which within another one has no values to give."""
    is_within = tx.output.current_tracer.parent is not None
    if is_within and not all(arg.is_python_constant() for arg in args):
        unimplemented(
            gb_type="a tensor is printed or logged in a checkpoint or a custom autograd.Function",
            context=getattr(later.value, "__name__", ""),
            explanation="What is printed or logged there has no value behind the graph.",
            hints=[],
        )
    tx.debug_locals.append((later, list(args)))


def share_what_is_told(original: Any) -> Any:
    """Have a called frame tell with its callers: what it says alone, torch 2.13 forgets."""

    def init(self: Any, parent: Any, *rest: Any, **named: Any) -> None:
        original(self, parent, *rest, **named)
        self.debug_locals = parent.debug_locals

    return init
