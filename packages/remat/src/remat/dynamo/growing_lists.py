"""Lists that grow by each step, such as what a hook collects.

TorchDynamo guards the length of a list, and traces anew where it has changed: each time, if nobody
empties it. Once a list was seen to grow twice, what the forward appends to it is appended behind
the graph, and how long it is, is not asked. Where the forward reads it, it is a list as any other.
"""

from __future__ import annotations

from types import CodeType
from typing import Any, NoReturn

from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    ListVariable,
    TensorVariable,
    TupleVariable,
    misc,
)
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._guards import Source

__all__ = ["GrowingLists"]

_TIMES = 2
_SEQUENCES = ListVariable, TupleVariable

_Place = tuple[CodeType, str]


class GrowingLists:
    """What is known of lists by the code that is traced, and the name that they have there."""

    def __init__(self) -> None:
        self._seen: dict[_Place, tuple[int, int]] = {}
        self._read: set[_Place] = set()

    def wrap(self, original: Any) -> Any:
        """Have Dynamo take a list that grows for one that is appended to alone."""

        def _wrap(builder: Any, value: Any) -> Any:
            if type(value) is not list or builder.source is None:
                return original(builder, value)
            output = builder.tx.output
            place = output.root_tx.f_code, str(builder.source.name)
            if not self._grows(place, len(value)):
                return original(builder, value)
            builder.install_guards(GuardBuilder.TYPE_MATCH)
            made = _AppendedTo(self._read, place, source=builder.source)
            return output.side_effects.track_mutable(value, made)

        return _wrap

    def _grows(self, place: _Place, length: int) -> bool:
        last, times = self._seen.get(place, (length, 0))
        times = 0 if length < last else times + (length > last)
        self._seen[place] = length, times
        return times >= _TIMES and place not in self._read


class _AppendedTo(ListVariable):
    """A list whose items are not known; whoever asks for them has it traced as any other list."""

    def __init__(self, read: set[_Place], place: _Place, source: Source) -> None:
        self._reads, self._place, self._appending = read, place, AttrSource(source, "append")
        super().__init__([], source=source)

    @property  # type: ignore[override]
    def items(self) -> NoReturn:
        """There are none to give.

        Raises:
            UnspecializeRestartAnalysis: always.
        """
        self._reads.add(self._place)
        raise UnspecializeRestartAnalysis(restart_reason="a list that grows is read")

    @items.setter
    def items(self, _: Any) -> None: ...

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Append, or extend, as `+=` does, behind the graph; anything else asks for the items."""
        if name == "append" and len(args) == 1 and not kwargs:
            self._append(tx, args)
        elif name == "extend" and len(args) == 1 and not kwargs:
            self._append(tx, _items_of(args[0]))
        else:
            return self.items
        return ConstantVariable.create(None)

    def _append(self, tx: Any, items: Any) -> None:
        """Append what is there behind the graph, as what is printed is printed there."""
        is_within = tx.output.current_tracer.parent is not None
        if items is None or is_within or not all(map(_is_there, items)):
            self.items  # noqa: B018 - asks for them
        later = misc.DebuggingVariable(list.append, source=self._appending)
        tx.debug_locals += [(later, [item]) for item in items]


def _items_of(other: Any) -> Any:
    """Give the items of a list or tuple; `None` of anything else."""
    other = other.realize()
    return other.items if type(other) in _SEQUENCES else None


def _is_there(item: Any) -> bool:
    """Whether an item is a tensor, a constant, was there before, or is made of such.

    What is made in the forward, such as a dict, is made behind the graph, once.
    """
    item = item.realize()
    if isinstance(item, TensorVariable | ConstantVariable | SymNodeVariable):
        return True
    if item.source is not None:
        return True
    if type(item) in _SEQUENCES:
        return all(map(_is_there, item.items))
    return type(item) is ConstDictVariable and all(map(_is_there, item.items.values()))
