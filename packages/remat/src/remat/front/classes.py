"""What the classes of a model define, to notice a method that is replaced, or a class.

TorchDynamo guards attributes of modules, but takes the methods of their classes as they are. A lazy
module takes another class at its first call, which is a break of the graph: that one call is no
reason to plan as for several regions.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

__all__ = ["Classes"]

_OF_OTHERS = ("torch.nn.modules.module.", "builtins", "abc", "typing")


class Classes:
    """The classes of a module and its submodules, and what they defined when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        classes = dict.fromkeys(base for part in module.modules() for base in type(part).__mro__)
        self._contents: list[tuple[Any, list[Any]]] = [
            (vars(cls), list(vars(cls).values()))
            for cls in classes
            if not f"{cls.__module__}.".startswith(_OF_OTHERS)
        ]
        self._lazy = [part for part in module.modules() if isinstance(part, LazyModuleMixin)]

    def are_as_they_were(self) -> bool:
        """Whether nothing was replaced, added or taken away, and lazy modules are still lazy."""
        return all(isinstance(part, LazyModuleMixin) for part in self._lazy) and all(
            len(now) == len(then) and all(map(operator.is_, now.values(), then))
            for now, then in self._contents
        )
