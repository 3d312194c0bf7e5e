"""Training loops that people write, each in short: tests and benchmarks run them alike."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["MODULES", "find", "names"]

MODULES = ("by_hand", "ranks", "frameworks")  # the last imports most


def names() -> list[str]:
    """List the loops; this imports the libraries that they are of."""
    return [name for module in MODULES for name in _loops(module)]


def find(name: str) -> Callable[..., Any]:
    """Find a loop, and import no library that it does not need.

    Raises:
        KeyError: if there is none.
    """
    for module in MODULES:
        if name in _loops(module):
            return _loops(module)[name]
    raise KeyError(name)


def _loops(module: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = importlib.import_module(f"loop_cases.{module}").LOOPS
    return found
