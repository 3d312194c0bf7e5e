"""Hears of each step of any optimizer, before it."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["OptimizerListener", "stop_telling", "tell_of_optimizers"]


class OptimizerListener(Protocol):
    """Who wants to know of steps of optimizers."""

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See that an optimizer begins a step, in the thread that called it."""


_listeners: weakref.WeakSet[OptimizerListener] = weakref.WeakSet()
_lock = threading.Lock()  # a set may not change in one thread while another goes through it


def tell_of_optimizers(listener: OptimizerListener) -> None:
    """Tell a listener of steps from now on, as long as it is held."""
    _register()
    with _lock:
        _listeners.add(listener)


def stop_telling(listener: OptimizerListener) -> None:
    """Tell a listener of no more steps."""
    with _lock:
        _listeners.discard(listener)


@functools.cache
def _register() -> None:
    """Register the hook; it stays, for none may go while torch calls its hooks."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _listeners and not torch.compiler.is_compiling():
        with _lock:
            listeners = list(_listeners)
        for listener in listeners:
            listener.before_optimizer(optimizer)
