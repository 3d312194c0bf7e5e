"""Which submodules of a model have hooks, and which all modules have, looked up at each call.

TorchDynamo can guard that each of six tables of hooks of each submodule is empty, which takes more
time than all its other guards of a model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

__all__ = ["Hooks", "global_hooks"]

_tables: Callable[[Any], tuple[Mapping[int, Any], ...]] = operator.itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)


class Hooks:
    """The submodules of a module, and which of them have hooks."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._registered = -1
        self._children: list[Any] = []
        self._hooked: list[torch.nn.Module | None] = []
        self._hooks: list[Mapping[int, Any]] = []
        self._is_unique = True

    def state(self) -> Hashable:
        """Give what is equal while hooks are where they were; what they do is not looked at.

        `None` if a submodule is of the same class as the module: their forwards are one function.
        """
        if self._registered != RemovableHandle.next_id or self._submodules() != self._hooked:
            self._read()
        if not self._is_unique:
            return None
        return tuple(map(bool, self._hooks)) if any(self._hooks) else ()

    def _read(self) -> None:
        self._registered = RemovableHandle.next_id  # counts the hooks ever registered anywhere
        parts = list(self._module.modules())
        self._children = [part._modules.values() for part in parts]
        self._hooked = self._submodules()
        inner = parts[1:]  # hooks of the module itself run around its forward
        self._hooks = [hooks for part in inner for hooks in _tables(vars(part))]
        self._is_unique = type(self._module) not in map(type, inner)

    def _submodules(self) -> list[torch.nn.Module | None]:
        return list(chain.from_iterable(self._children))


def global_hooks() -> tuple[Any, ...]:
    """Name what hooks all modules have: TorchDynamo does not guard these."""
    if not torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return ()
    return tuple(
        tuple(hooks.values())
        for name, hooks in vars(torch_module).items()
        if name.startswith("_global_") and isinstance(hooks, dict)
    )
