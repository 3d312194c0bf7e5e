"""One step: what a forward hands to the backwards over it, and where the backward stands."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat_exec.autocast import autocast_type
from remat_exec.deferred import DeferredTensor, watched
from remat_exec.errors import BackwardError, BudgetExceeded
from remat_exec.gradient_groups import Group
from remat_exec.on_demand import OnDemand, Recipe
from remat_exec.outputs import tangents_of
from remat_exec.repeats import Repeat, Repeats
from remat_exec.step_code import StepCode
from remat_exec.takers import any_stays, unwanted_inputs
from remat_exec.variant import Variant

__all__ = ["Exceeded", "Observers", "Read", "Started", "StepRun"]

Started = Callable[[frozenset[int], frozenset[int]], None]
"""Gets the positions of missing gradients, and of outputs that nobody holds any more."""

Read = Callable[[int], None]
"""Gets the position of an output that is read."""

Exceeded = Callable[[BudgetExceeded], None]
"""Gets the error that says why a backward goes over its budget, and what it takes."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Who is told what happens in a step, and what is watched; see `Executable`."""

    started: Started | None = None
    finished: Callable[[], None] | None = None
    exceeded: Exceeded | None = None
    read: Read | None = None
    watched: frozenset[int] = frozenset()


_WITHIN = (
    ". If the forward or a hook runs it, torch._dynamo.graph_break() divides what it goes over "
    "from the rest, and torch.compiler.disable on the function that makes what is differentiated "
    "several times has that run as it is"
)

# Of a storage: a weak reference, whether it is gone, how many hold it, by what address it goes.
_weak: Any = StorageWeakRef
_gone: Callable[[StorageWeakRef], bool] = StorageWeakRef.expired
_count: Callable[[int], int] = torch._C._storage_Use_Count
_address: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]


class StepRun:
    """One step: a forward, and the backwards over it.

    A backward over a graph that was kept runs the forward again, unless `repeats` is `None`.
    """

    def __init__(
        self, executable: StepCode, bound: list[Any], observers: Observers, repeats: Repeats | None
    ) -> None:
        self.executable, self.observers = executable, observers
        program = executable.capture.program
        self._repeat = None if repeats is None else Repeat(program, bound, repeats)
        self._made_later: dict[int, StorageWeakRef] = {}
        self.states: dict[str, Any] = {}
        self.started = False
        self._bound = bound
        self._versions: list[int | None] = []
        self._backward: Iterator[list[torch.Tensor] | None] | None = None
        self._upcoming: list[Group] = []
        self._read_until_final: dict[str, tuple[torch.Tensor, int]] = {}
        self._final: dict[str, torch.Tensor] = {}
        self._handed: dict[int, StorageWeakRef] = {}
        self._released: frozenset[int] = frozenset()
        self._names: tuple[str, ...] = ()
        self._droppable: dict[str, Any] = {}
        self._is_lean = False

    def watch(self, handed: tuple[torch.Tensor, ...]) -> None:
        """Note what the user is handed, to see what is let go of before the backward."""
        if self.observers.started is not None:
            self._handed.update(
                (position, _weak(tensor.untyped_storage()))
                for position, tensor in enumerate(handed)
                if not isinstance(tensor, DeferredTensor)
            )

    def _released_outputs(self, saved: list[Any]) -> frozenset[int]:
        """Find the positions of what nobody holds any more, or only the backward itself.

        What autograd saved of outputs is there twice: as it was saved, and as it is given back. So
        is what is watched in the place of an output.
        """
        own: Counter[int] = Counter()
        watched = {self._handed[position].cdata for position in self.observers.watched}
        for tensor in saved:
            address = _address(tensor)
            own[address] += 1 if tensor.grad_fn is None and address not in watched else 2
        released = {
            position
            for position, ref in self._handed.items()
            if _gone(ref) or _count(ref.cdata) == own[ref.cdata]
        }
        held = {p for p, ref in self._made_later.items() if not _gone(ref)}
        return frozenset(released | (self.executable.capture.program.deferred - held))

    def run_forward(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run the forward; give what it returns, and what autograd is to save."""
        later = self._on_demand()
        returned, saved = self._run()
        self._defer(returned, later)
        return returned, saved

    def _run(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        returned, saved = self.executable.code.forward(list(self._bound), self.states)
        if self._repeat is not None and not self.started:
            self._repeat.note(self._bound)
        if self.executable.keeps_values_for_other_backwards:
            self._versions = [getattr(item, "_version", None) for item in self._bound]
        elif self.executable.low_memory_plan is None:
            self._bound = []
        return returned, self._with_droppable(saved)

    def run_forward_again(self) -> list[torch.Tensor]:
        """Run the forward again, for another backward; give what that backward reads.

        Raises:
            BackwardError: if the graph was not kept, or the forward cannot run again.
            BudgetExceeded: if there is no room, and nobody is told instead.
        """
        repeat = self._repeat
        if repeat is None or not repeat.is_kept:
            raise BackwardError(
                "backward runs a second time over the same forward, but its memory is given back "
                "as it goes; run forward again, or add the losses up and run backward once"
                + (_WITHIN if repeat is None else "")
            )
        self._bound = repeat.inputs()
        room, given = self.executable.room, repeat.given_bytes
        self._tell_if_exceeded(lambda: room.check_running_again(given, repeat.planned_bytes))
        with self._own_casts(), repeat.drawing():
            _, saved = self._run()
        return saved

    def _tell_if_exceeded(self, check: Callable[[], None]) -> None:
        """Tell of what goes over the budget, or raise it if nobody is told."""
        try:
            check()
        except BudgetExceeded as error:
            if self.observers.exceeded is None:
                raise
            self.observers.exceeded(error)

    def _on_demand(self) -> OnDemand | None:
        """Note what outputs that this forward does not make are made of; it is not held here."""
        recipes = self.executable.recipes
        if not recipes:
            return None
        program = self.executable.capture.whole_program
        read = functools.partial(_is_read, weakref.ref(self), self.observers.read)
        return OnDemand(program, recipes, self._bound, self.states, self._made_later, read)

    def _defer(self, returned: list[Any], later: OnDemand | None) -> None:
        """Put what is made when it is read, or seen to be, in the place of outputs."""
        if later is not None:
            for recipe in self.executable.recipes:
                returned[recipe.position] = later.output(recipe)
        for position in self.observers.watched:
            tensor = returned[position]
            self._handed[position] = _weak(tensor.untyped_storage())
            seen = functools.partial(_see_read, self.observers.read, position)
            returned[position] = watched(tensor.detach(), seen)  # held apart from what is saved

    def check_reading(self, recipe: Recipe) -> None:
        """Tell of a budget that has no room for an output that is to be made.

        Raises:
            BudgetExceeded: if nobody is told instead.
        """
        if not self.started:
            self._tell_if_exceeded(functools.partial(self.executable.room.check_reading, recipe))

    def _with_droppable(self, saved: list[Any]) -> list[Any]:
        """Keep apart what a leaner backward can do without; give what autograd is to save."""
        low_memory_plan, names = self.executable.low_memory_plan, self.executable.code.saved
        if low_memory_plan is None:
            self._names = names
            return saved
        program = self.executable.capture.program
        inputs = program.taken
        tensors = dict(zip(inputs, self._bound, strict=True))
        values = dict(zip(names, saved, strict=True))
        values.update(
            {name: tensors[name] for name in low_memory_plan.code.saved if name in tensors}
        )
        outside = {*inputs, *program.held}
        self._droppable = {name: item for name, item in values.items() if name not in outside}
        self._names = tuple(name for name in values if name in outside)
        if not self.executable.keeps_values_for_other_backwards:
            self._bound = []
        return [values[name] for name in self._names]

    def drop(self) -> None:
        """Give memory back before the backward, which then is that of the leaner plan."""
        if self.executable.low_memory_plan is None or self.started or self._is_lean:
            return
        self._is_lean = True
        needed = self.executable.low_memory_plan.code.saved
        self._droppable = {n: item for n, item in self._droppable.items() if n in needed}

    def start(self, node: Any, saved: list[Any], gradients: list[torch.Tensor | None]) -> None:
        """Choose the backward for the gradients that came, and let it take them over.

        `node` is that of the forward in autograd's graph.
        """
        is_first, self.started = not self.started, True
        if self._repeat is not None:
            self._repeat.begin_backward()
        executable = self.executable
        missing = frozenset(p for p in executable.differentiable if gradients[p] is None)
        released_outputs = executable.capture.released_outputs
        if self.observers.started is not None:
            if is_first:
                self._released, self._handed = self._released_outputs(saved), {}
            released_outputs = self._released
            self.observers.started(missing, released_outputs)
        if self._is_lean and executable.low_memory_plan is not None:
            executable = executable.low_memory_plan
        unwanted = unwanted_inputs(node, self.executable.groups)
        variant = executable.variant(missing, autocast_type(executable.device), unwanted)
        staying = any_stays(node, self.executable.groups, variant.program.leaving)
        check = functools.partial(executable.room.check, variant, released_outputs, staying=staying)
        self._tell_if_exceeded(check)
        if variant.code is not self.executable.code or self._droppable:
            saved = self._saved_for(variant, saved)
        with self._own_casts():
            tangents = tangents_of(variant.whole_program, variant.tangents, gradients)
            self._bound, self._versions = [], []
            self._read_until_final = {
                name: (item, item._version)
                for name, item in zip(variant.code.saved, saved, strict=False)
                if isinstance(item, torch.Tensor) and item.is_leaf and item.requires_grad
            }
            self._upcoming = list(variant.code.groups)
            self._backward = variant.code.backward(saved, tangents, self.states)
            next(self._backward)

    def _own_casts(self) -> torch.autocast:
        """Switch autocast off: the casts of a plan are operators of its own."""
        return torch.autocast(self.executable.device.type, enabled=False)

    def _saved_for(self, variant: Variant, saved: list[Any]) -> list[Any]:
        """Pick what an unplanned backward reads: it may want other inputs than the planned one."""
        program = variant.program
        names = program.taken
        kept = {**self._droppable, **dict(zip(self._names, saved, strict=True))}
        self._droppable = {}
        for name, item, version in zip(names, self._bound, self._versions, strict=False):
            if name in variant.code.saved and name not in kept:
                if version is not None and item._version != version:
                    raise BackwardError(
                        f"{name}, a parameter or input, was changed in place between forward and "
                        f"backward; run backward before changing it"
                    )
                kept[name] = item
        return [kept[name] for name in variant.code.saved]

    def take(self, index: int) -> tuple[torch.Tensor | None, ...]:
        """Run on until the gradients of group `index` are final, and let go of them."""
        wanted = self.executable.groups[index]
        to_come = {name for group in self._upcoming for name in group.inputs}
        while to_come.intersection(wanted):
            if self._backward is None:
                raise BackwardError("the backward ended early; please report it")
            group = self._upcoming.pop(0)
            to_come.difference_update(group.inputs)
            with self._own_casts():
                gradients = next(self._backward) or []
            self._check_unchanged(group.inputs)
            self._final.update(zip(group.inputs, gradients, strict=True))
            if self._repeat is not None:
                self._repeat.see_given(gradients)
            gradients.clear()
        if not self._upcoming and self._backward is not None:
            self._backward = None
            if self.observers.finished is not None:
                self.observers.finished()
        return tuple(self._final.pop(name, None) for name in wanted)

    def _check_unchanged(self, names: Sequence[str]) -> None:
        """Raise a `BackwardError` if a hook changed parameters before their own gradients came."""
        for name in names:
            item, version = self._read_until_final.pop(name, (None, 0))
            if item is not None and item._version != version:
                raise BackwardError(
                    f"a hook changed a parameter of shape {list(item.shape)} ({name}) before its "
                    f"own gradient was there, and the plan reads it: gradients of this step may "
                    f"be wrong; change a parameter in its own hook, or after backward"
                )


def _is_read(step: weakref.ref[StepRun], read: Read | None, recipe: Recipe) -> None:
    """Tell of an output that is to be made; a step that is over is not asked whether it fits."""
    if read is not None:
        read(recipe.position)
    under_way = step()
    if under_way is not None:
        under_way.check_reading(recipe)


def _see_read(read: Read | None, position: int) -> None:
    if read is not None:
        read(position)
