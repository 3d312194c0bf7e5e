"""A forward that is set on a rematerialized module later, as trainers set it.

Most call the forward that was there, which is planned, within something of their own: an autocast,
a cast of what is returned. Others run the submodules in its place, as TRL's and Liger's do, whose
loss needs no logits; then they are what has to be planned. Which it is shows in the first training
call. If a submodule runs before the planned forward does, the call starts again, by a plan: what
the module stores, its buffers and the generators are put back first.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from remat.errors import BudgetWarning
from remat_graph.torch import copied, remember_generators, remember_state

__all__ = ["Key", "ModuleCall", "Planned", "key_of", "planned_forward_runs"]

logger = logging.getLogger(__name__)

_RAN = (
    "a forward that was set on {} after remat.rematerialize ran as it is, over any budget: it did "
    "not call the one that is planned. From the next call on it is planned in place of that one"
)


Key = types.CodeType | int | None


def key_of(forward: Any) -> Key:
    """Name a forward by its code, or by its `id`; `None` is that of the class."""
    if forward is None:
        return None
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code if isinstance(code, types.CodeType) else id(forward)


class Planned(Protocol):
    """The planned forward of a module."""

    @property
    def module(self) -> torch.nn.Module:
        """The module whose forward it is."""
        ...

    @property
    def may_give_way(self) -> bool:
        """Whether another can be planned in its place."""
        ...

    def known(self, forward: Callable[..., Any]) -> Planned | None:
        """Give what plans a forward, or plans for its code, if it did before."""
        ...

    def give_way(self, forward: Callable[..., Any] | None) -> Planned:
        """Let another be planned in its place, or that of the class; give what plans it."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, by a plan if gradients are on."""
        ...


class ModuleCall:
    """What `module(...)` runs of a rematerialized module, in place of `_call_impl`."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self._around: Key = None  # of what was set, and calls the planned one

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, having seen which forward it has."""
        planned, module = self._planned, self._planned.module
        run = functools.partial(type(module)._call_impl, module)
        own = module.__dict__
        found = own.get("forward")
        if found is planned or isinstance(found, _FirstCalls) or not planned.may_give_way:
            return run(*args, **kwargs)
        if found is None or planned.known(found) is not None:
            planned.give_way(found)
            return run(*args, **kwargs)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if self._around == key_of(found):
            return self._run_around(found, run, *args, **kwargs)
        first = own["forward"] = _FirstCalls(found, planned)
        try:
            return run(*args, **kwargs)
        finally:
            if own.get("forward") is first:
                own["forward"] = found
                self._around = key_of(found) if first.calls_planned else None

    def _run_around(
        self, found: Callable[..., Any], run: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        with _Watch(self._planned) as watch:
            returned = run(*args, **kwargs)
        if not watch.saw_planned:
            self._around = None
            _tell_of(found, self._planned, returned)
        return returned


class _FirstCalls:
    """Runs a forward that was set later, and sees whether it calls the planned one."""

    def __init__(self, forward: Callable[..., Any], planned: Planned) -> None:
        self._forward, self._planned = forward, planned
        self.calls_planned = False
        functools.update_wrapper(self, forward)  # whoever asks for its signature gets that

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; from its start again, by a plan, if it runs submodules in place of that one."""
        watch = _Watch(self._planned, stops=True)
        try:
            with watch:
                returned = self._forward(*args, **kwargs)
        except BaseException:
            if not watch.stopped:
                raise
        if watch.stopped:  # whatever became of the error
            for put_back in watch.before:
                put_back()
            logger.info("planning %s, which was set on the module", _named(self._forward))
            return self._planned.give_way(self._forward)(*args, **kwargs)
        self.calls_planned = watch.saw_planned
        if not watch.saw_planned:
            _tell_of(self._forward, self._planned, returned)
        return returned


def _tell_of(forward: Callable[..., Any], planned: Planned, returned: Any) -> None:
    """Plan a forward from now on that was not planned, if it trains anything."""
    leaves = tree_leaves(returned)
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        warnings.warn(_RAN.format(type(planned.module).__name__), BudgetWarning, stacklevel=4)
        planned.give_way(forward)


def _named(forward: Callable[..., Any]) -> str:
    code = getattr(forward, "__code__", None)
    if code is None:
        return repr(forward)
    return f"{code.co_qualname} at {code.co_filename}:{code.co_firstlineno}"


class _RunsSubmodules(BaseException):  # no `except Exception` in the forward catches it
    """A forward that was set later runs a submodule, and has not called the planned one."""


class _Watch:
    """Sees whether a planned forward runs, and, if it `stops`, whether a submodule does before.

    The planned one may run in another thread, for this one. Submodules stop in this one alone.
    """

    def __init__(self, planned: Planned, *, stops: bool = False) -> None:
        self.planned, self.saw_planned, self.stopped = planned, False, False
        self._stops, self._handles = stops, list[RemovableHandle]()
        self.before: list[Callable[[], None]] = []  # what puts that back
        self._thread = threading.get_ident()

    def __enter__(self) -> _Watch:
        _watching.append(self)
        if self._stops:
            module = self.planned.module
            buffers = copied(module.buffers())
            self.before = [remember_generators(), remember_state(module), buffers]
            self._handles = [
                part.register_forward_pre_hook(self._stop, prepend=True)
                for part in module.modules()
                if part is not module
            ]
        return self

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)
        self._end()

    def see(self) -> None:
        """See that the planned forward runs, in training: its submodules are not to stop."""
        self.saw_planned = True
        self.before.clear()
        self._end()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _stop(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and threading.get_ident() == self._thread:
            self.stopped = True
            raise _RunsSubmodules


_watching: list[_Watch] = []


def planned_forward_runs(forward: Any) -> None:
    """Say that a planned forward runs."""
    if _watching and torch.is_grad_enabled():
        for watch in [each for each in _watching if each.planned is forward]:
            watch.see()
