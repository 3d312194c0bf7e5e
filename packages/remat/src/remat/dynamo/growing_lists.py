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
    ListVariable,
    TensorVariable,
    TupleVariable,
    misc,
)
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._guards import Source

__all__ = ["GrowingLists"]

_TIMES = 2
_APPEND = "append"

Place = tuple[CodeType, str]


class GrowingLists:
    """What is known of lists by the code that is traced, and the name that they have there."""

    def __init__(self) -> None:
        self._seen: dict[Place, tuple[int, int]] = {}
        self._read: set[Place] = set()

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

    def _grows(self, place: Place, length: int) -> bool:
        last, times = self._seen.get(place, (length, 0))
        times = 0 if length < last else times + (length > last)
        self._seen[place] = length, times
        return times >= _TIMES and place not in self._read


class _AppendedTo(ListVariable):
    """A list whose items are not known; whoever asks for them has it traced as any other list."""

    def __init__(self, read: set[Place], place: Place, source: Source) -> None:
        self._reads, self._place, self._append = read, place, AttrSource(source, _APPEND)
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
        """Append behind the graph what is there then; anything else asks for the items."""
        is_outermost = tx.output.current_tracer.parent is None
        if name != _APPEND or kwargs or len(args) != 1 or not (is_outermost and _is_there(args[0])):
            return self.items
        later = misc.DebuggingVariable(list.append, source=self._append)
        tx.debug_locals.append((later, list(args)))
        return ConstantVariable.create(None)


def _is_there(item: Any) -> bool:
    """Whether an item is a tensor, a constant, a tuple of such, or was there before.

    Of what is made in the forward, such as a dict, this would append another one.
    """
    item = item.realize()
    if isinstance(item, TupleVariable):
        return all(map(_is_there, item.items))
    is_value = isinstance(item, TensorVariable | ConstantVariable | SymNodeVariable)
    return is_value or item.source is not None
