"""Executors by name, from the entry-point group `remat.executors`.

Listing imports nothing, so a broken plug-in never breaks it. An executor is loaded when first asked
for, and kept. A name that two distributions offer is an error that names both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from remat_exec.errors import BrokenExecutor, DuplicateExecutor, UnknownExecutor
from remat_exec.interface import Executor
from remat_graph.plugins import Plugin, Registry

__all__ = ["get_executor", "list_executors"]

_REGISTRY = Registry(
    "remat.executors", "executor", "generated", UnknownExecutor, DuplicateExecutor, BrokenExecutor
)


def list_executors() -> dict[str, Plugin]:
    """List the installed executors by name, without importing any.

    Raises:
        DuplicateExecutor: if two distributions offer the same name.
    """
    return _REGISTRY.listed()


def get_executor(name: str) -> Executor:
    """Load an executor by its name; give the same object every time.

    Raises:
        UnknownExecutor: if none has this name.
        DuplicateExecutor: if two distributions offer it.
        BrokenExecutor: if it cannot be imported, or does not take the arguments of an `Executor`.
    """
    return cast(Executor, _REGISTRY.load(name, None, None, budget_bytes=None, low_memory_plan=None))


if TYPE_CHECKING:
    from remat_exec.executable import Executable

    _built_in: Executor = Executable
