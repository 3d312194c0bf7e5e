"""Breaks in a loop over modules, where TorchDynamo leaves the whole function alone.

So an `nn.Sequential` with a hook in one layer would be as many graphs as it has layers, and what a
forward does outside such a loop would be in none. Where a loop is over modules, tracing goes on
behind the break with what is left of the loop. For that its iterator is one over a tuple, which
Dynamo can hand over. So it does where a loop is over their positions or names, and the break in one
of a list or dict of modules. A loop of another kind stays as it is: each turn may run the same
code, and would be traced anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.exc import ObservedUserStopIteration, handle_observed_exception
from torch._dynamo.variables import (
    ConstantVariable,
    IteratorVariable,
    NNModuleVariable,
    UnspecializedNNModuleVariable,
)
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.iter import DictViewIterator
from torch._dynamo.variables.lists import (
    BaseListVariable,
    ListIteratorVariable,
    RangeIteratorVariable,
    TupleIteratorVariable,
)

__all__ = ["go_on_in_loops", "iterate_over_tuples"]

_MODULES = NNModuleVariable, UnspecializedNNModuleVariable
_ITERATORS = IteratorVariable, LocalGeneratorObjectVariable
_MAKERS = frozenset({"zip", "enumerate"})
_MADE, _CALLED = "remat_made", "remat_last_called"
_LISTS = torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential
_MOST = 64  # turns that are left: what goes on behind a break is called by what came before
_RETURNS = "RETURN_VALUE", "RETURN_CONST"
_GET, _FOR, _BRANCH = "GET_ITER", "FOR_ITER", "JUMP"


def iterate_over_tuples(original: Any) -> Any:
    """Let a loop over modules be one over a tuple of them.

    Of what `zip` and `enumerate` give, that which nobody else can read on in: it is made for the
    loop, of what is no iterator itself.
    """

    def call_function(self: Any, called: Any, args: Any, named: Any) -> None:
        made = getattr(self, _MADE, None)
        setattr(self, _MADE, None)
        setattr(self, _CALLED, called)
        original(self, called, args, named)
        if self.current_instruction.opname == _GET:
            found = self.stack[-1].realize()
            before = self.instructions[self.instruction_pointer - 2]
            is_made = found is made and before.opname.startswith("CALL")
            if is_made or (found is not args[0].realize() and isinstance(found, DictViewIterator)):
                left = list(_left(self, found))
                self.stack[-1] = TupleIteratorVariable(left, mutation_type=ValueMutationNew())
        elif getattr(getattr(called, "fn", None), "__name__", "") in _MAKERS:
            given = [each.realize() for each in args]
            if any(map(_holds, given)) and not any(isinstance(each, _ITERATORS) for each in given):
                setattr(self, _MADE, self.stack[-1].realize())

    return call_function


def go_on_in_loops(original: Any) -> Any:
    """Let a break in a loop over modules be as one outside of loops, if it is no branch.

    A branch by data, as where layers are left out by chance, is in each turn again.
    """

    def maybe_has_backedge(self: Any) -> bool:
        frame = self
        while frame is not None:
            if _BRANCH in self.current_instruction.opname or not _can_go_on(frame):
                return bool(original(self))
            frame = frame.parent
        return False

    return maybe_has_backedge


def _can_go_on(frame: Any) -> bool:
    """Whether a frame is in no loop, or in some over modules that are known and few."""
    starts = _starts(frame)
    if any(start.opname != _FOR for start in starts.values()):
        return False
    found = [each.realize() for each in frame.stack]
    loops = [each for each in found if isinstance(each, _ITERATORS)]
    positions = _calls_an_item(frame)
    return len(loops) == len(starts) and all(_is_over(loop, positions) for loop in loops)


def _starts(frame: Any) -> dict[int, Any]:
    """Give where later instructions of a frame jump back to, as Dynamo looks for it."""
    now = frame.current_instruction.offset
    starts = dict[int, Any]()
    for each in frame.instructions[frame.instruction_pointer :]:
        if each.opname in _RETURNS:
            break
        if each.target is not None and each.target.offset < now:
            starts[each.target.offset] = each.target
    return starts


def _is_over(loop: Any, positions: bool) -> bool:
    """Whether a loop is over modules that are known, or over `positions` of such, and has few."""
    if isinstance(loop, RangeIteratorVariable):
        return positions and loop.len <= _MOST
    if not isinstance(loop, ListIteratorVariable) or loop.is_exhausted:
        return False
    left = loop.items[loop.index :]
    of_range = positions and all(isinstance(each, ConstantVariable) for each in left)
    return len(left) <= _MOST and (of_range or all(map(_holds, left)))


def _calls_an_item(frame: Any) -> bool:
    """Whether what a frame calls is in a list of modules, or a dict, of a module that it has."""
    called = getattr(getattr(frame, _CALLED, None), "value", None)
    owners = [each for each in frame.f_locals.values() if isinstance(each, torch.nn.Module)]
    lists = (part for owner in owners for part in owner.modules() if isinstance(part, _LISTS))
    return any(each is called for part in lists for each in part.children())


def _holds(variable: Any) -> bool:
    """Whether this is a module or has one among its items."""
    found = variable.realize()
    if isinstance(found, BaseListVariable):
        return any(isinstance(each.realize(), _MODULES) for each in found.items)
    return isinstance(found, _MODULES)


def _left(frame: Any, iterator: Any) -> Iterator[Any]:
    while True:
        try:
            item = iterator.next_variable(frame)
        except ObservedUserStopIteration:
            handle_observed_exception(frame)
            return
        yield item
