"""What stands in for `forward` on a rematerialized module: it plans for each call, and runs it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from remat.dynamo import Across
from remat.errors import RematError
from remat.front.bound import Bound
from remat.front.classes import Classes
from remat.front.dispatch_modes import is_beneath_a_mode
from remat.front.hooks import Hooks, global_hooks
from remat.front.machine import Machine, new_machine
from remat.front.set_later import Key, ModuleCall, key_of, planned_forward_runs
from remat.front.uncalled import FirstCall
from remat.front.units import tensors_of
from remat.planning.infeasible import NotPlanned
from remat.planning.settings import Settings
from remat.refusals import refuse_checkpointed, refuse_transforms, refuse_unpicklable
from remat.session.run_again import rebuilt
from remat_graph.torch import copied, generators_restored, left_as_it_was, process_lock

__all__ = ["RematForward", "is_rematerialized"]


_FORWARD = "_remat_forward"
_making = threading.Lock()


def _calls(forward: Any, other: RematForward) -> bool:
    """Whether a function may call another: by what it closes over, wraps or is bound to."""
    open_, seen = [forward], list[Any]()
    while open_:
        each = open_.pop()
        if each is other:
            return True
        if not callable(each) or any(each is one for one in seen):
            continue
        seen.append(each)
        cells = getattr(each, "__closure__", None) or ()
        open_ += [cell.cell_contents for cell in cells if cell != types.CellType()]
        if isinstance(each, RematForward):
            open_.append(each._instance_forward)  # not its __func__, which is new each time
        else:
            names = "__func__", "__wrapped__", "func"  # the last of a partial call
            open_ += [getattr(each, name, None) for name in names]
    return False


def is_rematerialized(module: torch.nn.Module) -> bool:
    """Whether a module is one that `rematerialize` returned, whatever its forward is by now."""
    return _FORWARD in module.__dict__


class RematForward:
    """Stands in for `forward` on one module: chooses the plan for a call, and runs it."""

    _first: FirstCall
    _shown: Any  # the plan, while another forward has its own

    def __init__(
        self,
        module: torch.nn.Module,
        settings: Settings,
        instance_forward: Any = None,
        by_regions: bool = False,
    ) -> None:
        self._module, self._settings = module, settings
        self._instance_forward, self._by_regions = instance_forward, by_regions
        self.bound: Bound | None = None
        self._dress()
        self._family: dict[Key, RematForward] = {key_of(instance_forward): self}

    def stand_in(self) -> None:
        """Take the place of the module's forward."""
        own = self._module.__dict__
        own["forward"] = own[_FORWARD] = self
        for other in self._family.values():
            other._gave_way = other is not self
        self._see_calls()

    def _see_calls(self) -> None:
        # What Module.compile sets is called in place of the rest; copies come without it
        self._module.__dict__["_compiled_call_impl"] = ModuleCall(self)

    def known(self, forward: Callable[..., Any]) -> RematForward | None:
        """Give what plans a forward of the module, or plans for its code, if it did before."""
        if isinstance(forward, RematForward):
            return forward if forward in self._family.values() else None
        found = self._family.get(key_of(forward))
        return None if found is None or _calls(forward, found) else found

    def give_way(self, forward: Callable[..., Any] | None) -> RematForward:
        """Let another forward, which was set on the module later, be planned in place of this."""
        with _making:
            instead = self._family.get(None) if forward is None else self.known(forward)
            if instead is None:
                instead = RematForward(self._module, self._settings, forward)
                instead.original, instead.bound = self.original, self.bound
                instead._family = self._family
                key = key_of(forward)
                self._family[id(forward) if key in self._family else key] = instead
            if forward is not None and not isinstance(forward, RematForward):
                instead._instance_forward = forward  # closes over other values, it may be
                # Who looks for a forward that was set finds it
                instead.__dict__["__wrapped__"] = forward
            instead.stand_in()
        if instead is not self:
            self._first.end()
            own = self._module.__dict__
            self._shown, own["plan"] = own["plan"], instead._shown
        return instead

    @property
    def module(self) -> torch.nn.Module:
        """The module whose forward this is."""
        return self._module

    @property
    def may_give_way(self) -> bool:
        """Whether the forward is planned as a whole, not submodules that have their own."""
        return not self._by_regions

    def _dress(self) -> None:
        self._gave_way = False
        self._shown = NotPlanned()
        self.original: torch.nn.Module | None = None
        self._classes: Classes | None = None
        self._across, self._hooks = Across(), Hooks(self._module)
        self._first = FirstCall(self._module)
        unbound = self._instance_forward or type(self._module).forward
        functools.update_wrapper(self, unbound, updated=())
        self.__dict__.pop("__wrapped__")  # whoever unwraps wrappers must not unwrap this one
        signature = inspect.signature(unbound)
        if self._instance_forward is None:
            parameters = list(signature.parameters.values())[1:]
            signature = signature.replace(parameters=parameters)
        self.__signature__ = signature

    @property
    def __self__(self) -> torch.nn.Module:
        """The module, as bound methods have it."""
        return self._module

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function of the module and a call, as bound methods have it: wrappers look for it."""

        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = self if module is self._module else module.__dict__[_FORWARD]
            return own(*args, **kwargs)

        functools.update_wrapper(forward, self, updated=())
        del forward.__wrapped__  # type: ignore[attr-defined]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [own, *self.__signature__.parameters.values()]
        forward.__signature__ = self.__signature__.replace(parameters=parameters)  # type: ignore[attr-defined]
        return forward

    def check_owner(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Refuse, as a hook, a `copy.copy` of the module: what is set on it would not be seen.

        Raises:
            RematError: if the module called is not the one that this belongs to.
        """
        if module is not self._module:
            raise RematError(
                "this is a copy.copy of a rematerialized model, and still runs the one it is a "
                "copy of; use copy.deepcopy, or call remat.rematerialize on a copy of the original"
            )

    @property
    def instance_forward(self) -> Callable[..., Any] | None:
        """The forward that was set on the original module, if one was."""
        return self._instance_forward  # type: ignore[no-any-return]

    @property
    def original_forward(self) -> Callable[..., Any]:
        """The forward of the module's class, or the one that was set on the original module."""
        if self._instance_forward is not None:
            return self._instance_forward  # type: ignore[no-any-return]
        return type(self._module).forward.__get__(self._module)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module, by a plan if gradients are on.

        Where it gave way to another, which is planned, it is a part of that one, as it is.
        """
        if self._gave_way:
            return self.original_forward(*args, **kwargs)
        return self._run(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        planned_forward_runs(self)
        if self.bound is not None:
            self.bound.follow()
        if torch.is_grad_enabled():
            refuse_transforms()
            refuse_checkpointed(type(self._module).__name__)
        if not torch.is_grad_enabled() or is_beneath_a_mode():
            for sessions, _ in list(self.__dict__.get("_machines", {}).values()):
                sessions.rest()
            return self.original_forward(*args, **kwargs)
        sessions, compiled = self._machine
        run = self.original_forward
        if not self._by_regions:
            run = compiled(run, self._hooks.state())
        with sessions.taken() as session, self._first.watched(session):
            before = session.call_arguments, session.rebuild
            session.call_arguments = args, kwargs
            session.rebuild = functools.partial(rebuilt, self._module, run, args, kwargs)
            try:
                return session.run(run, *args, **kwargs)
            finally:
                session.call_arguments, session.rebuild = before  # nothing holds the batch

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan for a call."""
        self.__signature__.bind(*args, **kwargs)  # a call that Python would refuse is no new shape
        if self._settings.budget.is_auto:  # what is free is known at the first step
            return
        sessions, _ = self._machine
        module = self._module
        with contextlib.ExitStack() as stack:
            stack.enter_context(process_lock)
            stack.enter_context(generators_restored())
            stack.enter_context(left_as_it_was(module))
            stack.callback(copied(module.buffers()))

            @functools.cache  # parameters are as large as a model: code in no graph may change them
            def before_code() -> None:
                stack.callback(copied(tensors_of(module)))

            with sessions.taken() as session:
                session.prepare(lambda: self(*args, **kwargs), before_code)
            plan = module.__dict__["plan"]
        module.__dict__["plan"] = plan
        self._first = FirstCall(module)

    def run_region(self, block: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the forward of a submodule as a region; blocks of one class share their graphs."""
        sessions, compiled = self._machine
        run = compiled(type(block).forward, None)
        with sessions.taken() as session, self._first.watched(session):
            return session.run(run, block, *args, **kwargs)

    @property
    def _machine(self) -> Machine:
        """What plans and compiles for this model, as long as all modules have the same hooks."""
        hooks = global_hooks()
        machines = self.__dict__.setdefault("_machines", {})
        with _making:
            if not (self._classes and self._classes.are_as_they_were()) or self._across.is_news():
                machines.clear()
                self._classes = Classes(self._module)
            if hooks not in machines:
                machines[hooks] = new_machine(
                    self._module, self._settings, self._across, one_region=not self._by_regions
                )
            machine: Machine = machines[hooks]
        return machine

    def __deepcopy__(self, memo: dict[int, Any]) -> RematForward:
        module = copy.deepcopy(self._module, memo)
        instance_forward = copy.deepcopy(self._instance_forward, memo)
        forward = RematForward(module, self._settings, instance_forward, self._by_regions)
        memo[id(self)] = forward
        forward.bound = copy.deepcopy(self.bound, memo)
        if not self._gave_way:
            forward._see_calls()
        return forward

    def __getstate__(self) -> dict[str, Any]:
        refuse_unpicklable(self._settings.loss, self._settings.optimizer)
        return {
            "by_regions": self._by_regions,
            "module": self._module,
            "settings": replace(self._settings, progress=None),
            "instance_forward": self._instance_forward,
            "bound": self.bound,
            "gave_way": self._gave_way,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come back without plans: they are made again at the first call."""
        self._module, self._settings = state["module"], state["settings"]
        self._by_regions = state["by_regions"]
        self._instance_forward = state["instance_forward"]
        self.bound = state["bound"]
        self._dress()
        self._family = {key_of(self._instance_forward): self}
        if not state["gave_way"]:
            self._see_calls()
