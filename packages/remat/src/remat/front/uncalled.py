"""Tells of models that are trained by other methods than their forward, which nothing plans.

Seen where an optimizer steps: parameters of such a model have gradients then, and its forward was
never called with gradients on, or has nothing to plan: what it returned computes later.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from remat.errors import BudgetWarning
from remat.session.optimizers import stop_telling, tell_of_optimizers
from remat.session.session import Session

__all__ = ["FirstCall"]

_UNCALLED = (
    "an optimizer steps parameters of {}, whose forward was not called in training, or has nothing "
    "to plan: a plan is of forward of what remat.rematerialize returned. The original, other "
    "methods that the loop calls, such as model.loss(x), and what computes when it is read, as a "
    "distribution does, run as they are, over any budget. Name submodules that they call in "
    "regions=, or rematerialize a module whose forward calls them"
)


class FirstCall:
    """Warns, once, where a `model` is trained before its first call of which something is planned.

    Not where another that shares parameters with it was called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._name = type(model).__name__
        self._parameters: Callable[[], Iterable[torch.nn.Parameter]] = model.parameters
        self._awaited = True
        tell_of_optimizers(self)

    @contextmanager
    def watched(self, session: Session) -> Iterator[None]:
        """See a call: one of which something is planned, or that raises, says what there is."""
        try:
            yield
        except BaseException:
            self._came()
            raise
        if session.times_planned:
            self._came()

    def _came(self) -> None:
        if self._awaited:
            self.end()
            _called.add(self)

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See that an optimizer steps.

        Warns:
            BudgetWarning: if it steps parameters of this model that have a gradient.
        """
        own = {id(each) for each in self._parameters() if each.grad is not None}
        stepped = (id(each) for group in optimizer.param_groups for each in group["params"])
        if own.isdisjoint(stepped):
            return
        self.end()
        others = (id(each) for other in list(_called) for each in other._parameters())
        if own.isdisjoint(others):
            warnings.warn(_UNCALLED.format(self._name), BudgetWarning, stacklevel=2)

    def end(self) -> None:
        """Wait for the call no more."""
        self._awaited = False
        stop_telling(self)


_called: weakref.WeakSet[FirstCall] = weakref.WeakSet()
