"""Where the calls of periods that do the same are in a program, and what they make.

Of a row of blocks four periods were traced (`repeats`), two at each end: A, B, C and D. Sections of
calls begin with the first that touches a period's own inputs, and so may hold the end of one block
and the start of the next; what counts is that they repeat. Everything gets a label: its period, and
a place that is the same in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torch.utils import _pytree as pytree

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.program import LOSS, Call, Program, Variable
from remat_graph.torch.repeats.blocks import Repeat

__all__ = ["A", "B", "C", "D", "Irregular", "Label", "Periods", "Place", "constants_of"]

A, B, C, D = range(4)
Place: TypeAlias = "tuple[Any, ...]"  # the same in each period
Label: TypeAlias = "tuple[int, Place]"  # a period, and a place in it


class Irregular(CaptureError):
    """The program does not say what more periods would be."""


class Periods:
    """Where the calls of the periods that were traced are in a program."""

    def __init__(self, program: Program, repeat: Repeat) -> None:
        self.program, self.repeat = program, repeat
        named = {(item.kind, item.key): item.variable for item in program.inputs}
        self.own = [[named[key] for key in keys] for keys in repeat.own]
        self.labels: dict[str, Label] = {
            variable: (period, ("own", position))
            for period, index in enumerate(repeat.kept)
            for position, variable in enumerate(self.own[index])
        }
        self.op_labels: dict[str, Label] = {}
        self._chains: dict[str, int] = {}
        self._numbers: dict[Any, int] = {}
        boundary = program.order.index(LOSS)
        forward = [op for op in program.order[:boundary] if op in program.calls]
        backward = list(program.order[boundary + 1 :])
        there, back = self._section(forward, B, C), self._section(backward, C, B)
        if there is None:
            raise Irregular("blocks have no inputs of their own")
        self.pairs = list(self._label(forward, *there, "forward"))  # of ops of B and C
        if back is not None:  # else no gradient passes here
            of_backward = self._label(backward, *back, "backward")
            self.pairs += [(mine, its) for its, mine in of_backward]

    def root(self, variable: str) -> str:
        """Find what a view is of."""
        while variable in self.program.views:
            variable = self.base(variable)
        return variable

    def base(self, view: str) -> str:
        """Find what a view is made from."""
        reads = self.program.views[view].reads
        if len(reads) != 1:
            raise Irregular(f"{view} is a view of several tensors")
        return reads[0]

    def chain(self, variable: str) -> int:
        """Give a number to how a view is made of its root: the same for the same."""
        if variable not in self._chains:
            form: Any = ()
            view = self.program.views.get(variable)
            if view is not None:
                base = self.chain(self.base(variable))
                form = (view.target, constants_of(view), view.results.index(variable), base)
            self._chains[variable] = self._numbers.setdefault(form, len(self._numbers))
        return self._chains[variable]

    def _section(self, ops: Sequence[str], first: int, second: int) -> tuple[int, int] | None:
        """Find the first op of one period, and how many there are to that of the next.

        `None` if nothing touches what is of either.
        """
        gradient_of = {gradient: leaf for leaf, gradient in self.program.gradients.items()}
        begin: dict[int, int] = {}
        for position, op in enumerate(ops):
            call = self.program.calls[op]
            touched = [
                *map(self.root, call.reads),
                *(gradient_of[result] for result in call.results if result in gradient_of),
            ]
            for variable in touched:
                if variable in self.labels:
                    begin.setdefault(self.labels[variable][0], position)
        if first not in begin and second not in begin:
            return None
        if first not in begin or second not in begin:
            raise Irregular("only one of two blocks has inputs of its own")
        start, length = begin[first], begin[second] - begin[first]
        if length <= 0 or start + 2 * length > len(ops):
            raise Irregular("blocks are not one after another")
        return start, length

    def _label(
        self, ops: Sequence[str], start: int, length: int, half: str
    ) -> Iterator[tuple[str, str]]:
        """Label the ops of four sections, and what they make; give the pairs of the two within."""
        periods = (A, B, C, D) if half == "forward" else (D, C, B, A)
        for number, period in enumerate(periods):
            begin = start + (number - 1) * length
            for index in range(max(0, begin), min(begin + length, len(ops))):
                op, position = ops[index], index - begin
                self.op_labels[op] = period, (half, position)
                for output, variable in enumerate(self.program.calls[op].results):
                    if variable is not None:
                        self.labels[variable] = period, (half, position, output)
        return zip(ops[start : start + length], ops[start + length :], strict=False)


def constants_of(call: Call) -> tuple[Any, ...]:
    """Describe what else the arguments of a call are."""
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)), is_leaf=_is_variable)
    # 1, 1.0 and True are equal, and not the same argument
    return structure, *((None if _is_variable(x) else (type(x), repr(x))) for x in leaves)


def _is_variable(item: Any) -> bool:
    return isinstance(item, Variable)
