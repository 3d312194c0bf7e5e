"""Tells of models that are trained by other methods than their forward, which nothing plans.

Seen where an optimizer steps: parameters of such a model have gradients then, and its forward was
never called with gradients on.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from remat.errors import BudgetWarning

__all__ = ["FirstCall"]

_UNCALLED = (
    "an optimizer steps parameters of {}, whose forward was not called in training: a plan is of "
    "forward of what remat.rematerialize returned. The original, and other methods that the loop "
    "calls, such as model.loss(x), run as they are, over any budget. Name submodules that they "
    "call in regions=, or rematerialize a module whose forward calls them"
)


class FirstCall:
    """Warns, once, where a `model` is trained before its first call.

    Not where another that shares parameters with it was called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._name = type(model).__name__
        self._parameters: Callable[[], Iterable[torch.nn.Parameter]] = model.parameters
        _awaited.add(self)
        _listen_to_optimizers()

    def came(self) -> None:
        """See a call."""
        if self in _awaited:
            _awaited.discard(self)
            _called.add(self)

    def see_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See that an optimizer steps.

        Warns:
            BudgetWarning: if it steps parameters of this model that have a gradient.
        """
        own = {id(each) for each in self._parameters() if each.grad is not None}
        stepped = (id(each) for group in optimizer.param_groups for each in group["params"])
        if own.isdisjoint(stepped):
            return
        _awaited.discard(self)
        others = (id(each) for other in list(_called) for each in other._parameters())
        if own.isdisjoint(others):
            warnings.warn(_UNCALLED.format(self._name), BudgetWarning, stacklevel=2)


_awaited: weakref.WeakSet[FirstCall] = weakref.WeakSet()
_called: weakref.WeakSet[FirstCall] = weakref.WeakSet()


@functools.cache
def _listen_to_optimizers() -> None:
    """Register the hook; it stays, for none may go while torch calls its hooks."""
    register_optimizer_step_pre_hook(_optimizer_steps)


def _optimizer_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _awaited and not torch.compiler.is_compiling():
        for first in list(_awaited):
            first.see_step(optimizer)
