"""Breaks in a loop over modules, where TorchDynamo leaves the whole function alone.

So an `nn.Sequential` with a hook in one layer would be as many graphs as it has layers, and what a
forward does outside such a loop would be in none. Where a loop is over a list or dict of modules,
or positions or names of them, tracing goes on behind the break with what is left of the loop. For
that its iterator is one over a tuple, which Dynamo can hand over: so it may be over nothing else
that can change meanwhile. That modules do not change is looked at.

What goes on behind a break is called by what came before, whose values are held until it returns.
So few turns of a loop go on; the rest is left, as a loop of any other kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch._dynamo.exc import ObservedUserStopIteration, handle_observed_exception
from torch._dynamo.variables import (
    ConstantVariable,
    IteratorVariable,
    TupleVariable,
)
from torch._dynamo.variables import iter as iterators
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.dicts import DictViewVariable
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.lists import (
    ListIteratorVariable,
    RangeIteratorVariable,
    RangeVariable,
    TupleIteratorVariable,
)

from remat.dynamo.nested_breaks import MODULES
from remat.errors import RematError

__all__ = ["Loops", "check_lists", "lists_of_modules"]

# Of a dict's view; torch 2.11 has an iterator over a list.
_VIEWS = getattr(iterators, "DictViewIterator", ListIteratorVariable)
_LISTS = torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential
_ITERATORS = IteratorVariable, LocalGeneratorObjectVariable
_UNCHANGING = RangeVariable, TupleVariable, ConstantVariable
_MAKERS = frozenset({"zip", "enumerate"})
_MADE, _CALLED = "remat_made", "remat_last_called"
_MOST = 64  # turns that are left
_MOST_BREAKS = 3
_RETURNS = "RETURN_VALUE", "RETURN_CONST"
_GET, _FOR, _BRANCH = "GET_ITER", "FOR_ITER", "JUMP"


def lists_of_modules(model: torch.nn.Module) -> list[tuple[torch.nn.Module, ...]]:
    """List what the lists and dicts of modules of a model have."""
    return [tuple(part.children()) for part in model.modules() if isinstance(part, _LISTS)]


def check_lists(before: list[tuple[torch.nn.Module, ...]], model: torch.nn.Module) -> None:
    """Refuse a forward that has changed them, where loops went on with a copy.

    Raises:
        RematError: if it has.
    """
    if before != lists_of_modules(model):
        raise RematError(
            "the forward changes a list or dict of modules, and a graph breaks in a loop over "
            "modules: the loop has gone on with those that there were. Take the break out, or "
            "change the list elsewhere"
        )


class Loops:
    """Where loops of a model go on behind breaks, and after how many."""

    def __init__(self) -> None:
        self._breaks = defaultdict[Hashable, set[int]](set)

    @property
    def went_on(self) -> bool:
        """Whether one did."""
        return bool(self._breaks)

    def iterate_over_tuples(self, original: Any) -> Any:
        """Let a loop over modules be one over a tuple of them.

        Of what `zip` and `enumerate` give, that which is made for the loop, of lists of modules and
        what does not change.
        """

        def call_function(frame: Any, called: Any, args: Any, named: Any) -> None:
            made = getattr(frame, _MADE, None)
            setattr(frame, _MADE, None)
            setattr(frame, _CALLED, called)
            original(frame, called, args, named)
            if frame.current_instruction.opname == _GET:
                found, over = frame.stack[-1].realize(), args[0].realize()
                before = frame.instructions[frame.instruction_pointer - 2]
                is_made = found is made and before.opname.startswith("CALL")
                if is_made or (isinstance(found, _VIEWS) and _is_list(over)):
                    left = list(_left(frame, found))
                    frame.stack[-1] = TupleIteratorVariable(left, mutation_type=ValueMutationNew())
            elif getattr(getattr(called, "fn", None), "__name__", "") in _MAKERS:
                given = [each.realize() for each in (*args, *named.values())]
                lists = [each for each in given if _is_list(each)]
                others = [each for each in given if not isinstance(each, _UNCHANGING)]
                if lists and len(lists) == len(others):
                    setattr(frame, _MADE, frame.stack[-1].realize())

        return call_function

    def go_on(self, original: Any) -> Any:
        """Let a break in a loop over modules be as one outside of loops, if it is no branch.

        A branch by data, as where layers are left out by chance, is in each turn again.
        """

        def maybe_has_backedge(frame: Any) -> bool:
            caller, loops = frame, list[Any]()
            while caller is not None:
                found = _loops_around(caller)
                if found is None:
                    return bool(original(frame))
                loops += found
                caller = caller.parent
            if _BRANCH in frame.current_instruction.opname or not all(map(self._has_few, loops)):
                return bool(original(frame))
            return False

        return maybe_has_backedge

    def _has_few(self, loop: tuple[Hashable, int]) -> bool:
        name, left = loop
        if left > _MOST:
            return False
        self._breaks[name].add(left)
        return len(self._breaks[name]) <= _MOST_BREAKS


def _loops_around(frame: Any) -> list[tuple[Hashable, int]] | None:
    """Give the loops that a frame is in, by a name, and how many turns are left of each.

    `None` if one of them is over something else.
    """
    starts = _starts(frame)
    if any(start.opname != _FOR for start in starts.values()):
        return None
    found = [each.realize() for each in frame.stack]
    iterators = [each for each in found if isinstance(each, _ITERATORS)]
    calls_an_item = _calls_an_item(frame)
    loops = [_loop(frame, each, positions=calls_an_item) for each in iterators]
    if len(loops) != len(starts) or None in loops:
        return None
    return [loop for loop in loops if loop is not None]


def _loop(frame: Any, iterator: Any, *, positions: bool) -> tuple[Hashable, int] | None:
    """Give a name of a loop over modules, or `positions` of them, and how many turns are left."""
    if isinstance(iterator, RangeIteratorVariable):
        return ((frame.f_code.co_filename, iterator.stop), iterator.len) if positions else None
    is_of_range = type(iterator) is ListIteratorVariable and iterator.source is not None
    if not (is_of_range or type(iterator) is TupleIteratorVariable) or iterator.is_exhausted:
        return None
    left = [each.realize() for each in iterator.items[iterator.index :]]
    constants = [each for each in left if isinstance(each, ConstantVariable)]
    if len(constants) == len(left):
        name = left[-1].as_python_constant() if left else None
        return ((frame.f_code.co_filename, name), len(left)) if positions or not left else None
    modules = [_module_in(each) for each in left]
    return None if is_of_range or None in modules else (id(modules[-1]), len(left))


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


def _calls_an_item(frame: Any) -> bool:
    """Whether what a frame calls is in a list of modules, or a dict, of a module that it has."""
    last = getattr(frame, _CALLED, None)
    called = None if last is None else _value_of(last.realize())
    if called is None:
        return False
    owners = [each for each in frame.f_locals.values() if isinstance(each, torch.nn.Module)]
    return any(
        each is called for own in owners for own_list in lists_of_modules(own) for each in own_list
    )


def _is_list(variable: Any) -> bool:
    """Whether this is a list or dict of modules, or a view of one."""
    if isinstance(variable, DictViewVariable):
        source = variable.dv_dict.source
        return source is not None and str(source.name).endswith("._modules")
    return isinstance(_value_of(variable), _LISTS)


def _value_of(variable: Any) -> Any:
    """Give a module; `None` of anything else, and where Dynamo knows it by a name alone."""
    return getattr(variable, "value", None) if isinstance(variable, MODULES) else None


def _module_in(variable: Any) -> Any:
    """Give a module, or the one among the items of a tuple, as Dynamo has it."""
    if isinstance(variable, MODULES):
        return getattr(variable, "value", variable)
    items = variable.items if isinstance(variable, TupleVariable) else ()
    found = (_module_in(each.realize()) for each in items)
    return next((module for module in found if module is not None), None)


def _left(frame: Any, iterator: Any) -> Iterator[Any]:
    while True:
        try:
            item = iterator.next_variable(frame)
        except ObservedUserStopIteration:
            handle_observed_exception(frame)
            return
        yield item
