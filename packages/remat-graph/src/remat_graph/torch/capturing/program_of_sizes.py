"""The program of one size, read as one of all sizes: which of its numbers are sizes of the trace.

The passes between trace and program take a tenth of a second for a hundred operators. They decide
by equal sizes, by names and by operators. So where all sizes that the trace knows differ from one
another, and from every number that is no size (`JointOfSizes.is_generic`), they decide the same for
all sizes. Then each call of the program is a call of the trace, with slots for some arguments; what
is not, as a mask that was looked at and named, or a layout that only a run shows, has no such
program.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from remat_graph.torch.calls import Call, TensorFacts, Variable
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.lowering import equivalence_of
from remat_graph.torch.operators import operator_of
from remat_graph.torch.program import Generic, Program
from remat_graph.torch.tracing.joint_of_sizes import (
    JointOfSizes,
    Numbers,
    Slot,
    Traced,
    filled,
    layout_at,
    slots_in,
)

__all__ = ["NotOfSizes", "ProgramOfSizes"]

_WORTH = 0.01  # of the largest value of a program, to say how it grows


class NotOfSizes(CaptureError):
    """A program is that of its own sizes alone, or nothing shows that it is not."""


class ProgramOfSizes:
    """A program for these `numbers` of a trace, all generic, which gives that for others.

    Raises:
        NotOfSizes: if it is not shown to be the same for other numbers.
    """

    def __init__(self, joint: JointOfSizes, program: Program, numbers: Numbers) -> None:
        if program.alternatives or program.rounding:
            raise NotOfSizes("it has alternatives")
        self._joint, self._program, self._numbers = joint, program, numbers
        self._arguments: dict[str, Any] = {}
        self._facts: dict[str, Traced] = {}
        self._added: dict[str, Traced] = {}
        self._slot_of = {numbers[at]: Slot(at) for at in joint.distinct}
        self._names = {numbers[at]: f"size_{at}__" for at in joint.distinct}
        self._texts: dict[Any, Any] = {}
        self._of_terms: dict[str, Call] = {}
        self._made_by = program.calls_by_variable()
        for name, facts in program.facts.items():
            self._read_facts(name, facts)
        for calls in (program.calls, program.views):
            for name, call in calls.items():
                self._read_call(name, call)
        for output, layout in zip(program.outputs, joint.layouts, strict=True):
            if layout_at(layout, numbers) != output.layout:
                raise NotOfSizes("an output lies otherwise than traced")
        dense = [(each.shape, each.stride, each.offset) for each in self._facts.values()]
        self._of_facts = sorted({slot.index for slot in _slots_of(dense)})
        self._last: tuple[tuple[Any, ...], dict[str, TensorFacts]] | None = None
        sized = self._arguments.keys() | self._facts.keys()
        self._sized_calls = [
            name
            for name, call in program.calls.items()
            if not sized.isdisjoint((name, *call.reads))
        ]

    def _read_facts(self, name: str, facts: TensorFacts) -> None:
        """Find the sizes among what is known of a variable."""
        node = self._joint.named.get(name)
        if node is None:
            traced = Traced(
                self._slots_of(facts.shape), self._slots_of(facts.stride),
                self._slots_of(facts.offset), facts.dtype, facts.device,
            )  # fmt: skip
            self._added[name] = traced
        else:
            traced = self._joint.traced(node)
        if not isinstance(traced, Traced):
            raise NotOfSizes(f"{name} is no tensor")
        here = self._dense(traced, self._numbers)
        if here[:3] != (facts.shape, facts.stride, facts.offset):
            raise NotOfSizes(f"{name} lies otherwise than traced")
        by_number = self._slots_of((facts.shape, facts.stride, facts.offset))
        if not _same_slots((traced.shape, traced.stride, traced.offset), by_number, self._numbers):
            raise NotOfSizes(f"{name} has the number of a size, and is of none")
        if self._program.storage[name] == name and here[3] != facts.storage_bytes:
            call = self._made_by.get(name)
            if call is None or _bytes_of_terms(call, self._program.facts) != facts.storage_bytes:
                raise NotOfSizes(f"{name} takes other memory than its sizes say")
            self._of_terms[name] = call
        if self._is_sized(name):
            self._facts[name] = traced

    def _slots_of(self, item: Any) -> Any:
        """Put slots in the place of numbers of what a pass has added: all sizes are different."""
        if isinstance(item, (tuple, list)):
            return type(item)([self._slots_of(part) for part in item])
        if isinstance(item, dict):
            return {key: self._slots_of(part) for key, part in item.items()}
        return self._slot_of.get(item, item) if type(item) in (int, float) else item

    def _is_sized(self, name: str) -> bool:
        """Whether a variable of the trace, or the memory that it is in, has a size for a slot."""
        for each in {name, self._program.storage.get(name, name)}:
            node = self._joint.named.get(each)
            traced = self._added.get(each) if node is None else self._joint.traced(node)
            if isinstance(traced, Traced) and slots_in(
                (traced.shape, traced.stride, traced.offset)
            ):
                return True
        return name in self._of_terms

    @staticmethod
    def _dense(traced: Traced, numbers: Numbers) -> tuple[Any, ...]:
        """Give shape, strides, offset, and the bytes of a tensor alone in its memory."""
        shape, stride = filled(traced.shape, numbers), filled(traced.stride, numbers)
        offset = filled(traced.offset, numbers)
        reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        count = 0 if 0 in shape else offset + 1 + reach
        return shape, stride, offset, count * traced.dtype.itemsize

    def _read_call(self, name: str, call: Call) -> None:
        """Find the sizes among the arguments of a call."""
        results = [result for result in call.results if result is not None]
        names = [name, *results]
        node = next((self._joint.named[n] for n in names if n in self._joint.named), None)
        if node is not None and node.target is operator.getitem:  # one of several results
            node = node.all_input_nodes[0]
        if call.body is not None:
            raise NotOfSizes(f"{name} is not traced")
        if node is None:  # a pass has added it
            planned = self._slots_of((call.args, dict(call.kwargs)))
            if slots_in(planned):
                self._arguments[name] = planned
            return
        if node.target is not call.target:
            raise NotOfSizes(f"{name} is traced as {node.target}")
        traced = self._joint.arguments[node]
        planned = _matched(traced, (call.args, dict(call.kwargs)), self._numbers)
        by_number = self._slots_of((call.args, dict(call.kwargs)))
        if not _same_slots(planned, by_number, self._numbers):
            raise NotOfSizes(f"an argument of {name} has the number of a size, and is none")
        if slots_in(planned):
            if call.replay is not None:
                raise NotOfSizes(f"{name} is made again by another operator")
            self._arguments[name] = planned

    def at(self, numbers: Numbers) -> Program:
        """Give the program for other numbers of the trace."""
        program, facts = self._program, self._facts_at(numbers)
        calls = self._with_numbers(program.calls, numbers)
        equivalence, alike = dict(program.equivalence), dict[str, str]()
        for name in self._sized_calls:
            generic = program.equivalence[name]  # what is equal for generic sizes always is
            if generic not in alike:
                alike[generic] = equivalence_of(calls[name], facts)
            equivalence[name] = alike[generic]
        other = dataclasses.replace(
            program,
            calls=calls,
            views=self._with_numbers(program.views, numbers),
            facts=facts,
            outputs=tuple(
                dataclasses.replace(output, layout=layout_at(layout, numbers))
                for output, layout in zip(program.outputs, self._joint.layouts, strict=True)
            ),
            equivalence=equivalence,
        )
        if (other.overwrites, other.handed) == (program.overwrites, program.handed):
            own = {self._names[self._numbers[at]]: numbers[at] for at in self._joint.distinct}
            for_all = Generic(program, self._names, own, self._texts)
            object.__setattr__(other, "generic", for_all)
        return other

    def holds_for(self, symbols: Mapping[str, Any]) -> bool:
        """Whether it is of such sizes: of some traces only where several inputs have the same."""
        return self._joint.holds_for(symbols)

    def growth(self, program: Program, symbols: Mapping[str, Any]) -> float:
        """Say how many times as large a value is as in a program that it gave, the most of any.

        Small ones do not count.
        """
        facts = self._facts_at(self._joint.numbers(symbols))
        known = {value: program.facts[value].storage_bytes for value in program.storage.values()}
        least = max(1.0, _WORTH * max(known.values(), default=0))
        pairs = ((facts[value].storage_bytes, size) for value, size in known.items())
        return max(
            (new / max(1, size) for new, size in pairs if max(new, size) >= least), default=1.0
        )

    def _facts_at(self, numbers: Numbers) -> dict[str, TensorFacts]:
        """Give what is known of variables; as for the last numbers, if their sizes are the same."""
        sizes = tuple(numbers[at] for at in self._of_facts)
        if self._last is not None and self._last[0] == sizes:
            return self._last[1]
        program = self._program
        facts = dict(program.facts)
        for name, traced in self._facts.items():
            shape, stride, offset, storage_bytes = self._dense(traced, numbers)
            known = facts[name]
            facts[name] = TensorFacts(
                shape, stride, offset, known.dtype, known.device, storage_bytes
            )
        for name, call in self._of_terms.items():
            of_terms = _bytes_of_terms(call, facts)
            assert of_terms is not None
            facts[name] = dataclasses.replace(facts[name], storage_bytes=of_terms)
        for name in self._facts:  # of views, those of what they are views of
            root = program.storage[name]
            if root != name:
                storage_bytes = facts[root].storage_bytes
                facts[name] = dataclasses.replace(facts[name], storage_bytes=storage_bytes)
        self._last = sizes, facts
        return facts

    def _with_numbers(self, calls: Mapping[str, Call], numbers: Numbers) -> dict[str, Call]:
        made = dict(calls)
        for name, call in calls.items():
            planned = self._arguments.get(name)
            if planned is not None:
                args, kwargs = filled(planned, numbers)
                made[name] = dataclasses.replace(call, args=args, kwargs=kwargs)
        return made


def _slots_of(item: Any) -> Iterator[Slot]:
    """Yield the slots in something."""
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from _slots_of(part)
    elif isinstance(item, Slot):
        yield item


def _matched(traced: Any, planned: Any, numbers: Numbers) -> Any:
    """Give the arguments of a call with slots where those of the trace have them.

    Tensors may be others: passes use one in the place of another that is equal, or `None` for one
    that is not looked at.
    """
    if isinstance(traced, Slot):
        number = numbers[traced.index]
        if type(planned) is not type(number) or planned != number:
            raise NotOfSizes(f"{planned!r} stands where a size is {number!r}")
        return traced
    if isinstance(traced, Node):
        if planned is not None and not isinstance(planned, Variable):
            raise NotOfSizes(f"{planned!r} stands for {traced}")
        return planned
    if isinstance(traced, (tuple, list)) and isinstance(planned, (tuple, list)):
        if len(traced) != len(planned):
            raise NotOfSizes("other arguments than traced")
        pairs = zip(traced, planned, strict=True)
        return type(planned)([_matched(a, b, numbers) for a, b in pairs])
    if isinstance(traced, dict) and isinstance(planned, dict):
        if traced.keys() != planned.keys():
            raise NotOfSizes("other arguments than traced")
        return {key: _matched(traced[key], planned[key], numbers) for key in planned}
    if type(traced) is not type(planned) or (traced is not planned and traced != planned):
        raise NotOfSizes(f"{planned!r} stands for {traced!r}")
    return planned


def _same_slots(one: Any, other: Any, numbers: Numbers) -> bool:
    """Whether slots stand in the same places of two structures, for equal numbers."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        pairs = zip(one, other, strict=True)
        return all(_same_slots(a, b, numbers) for a, b in pairs)
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_same_slots(one[key], other[key], numbers) for key in one)
    if isinstance(one, Slot) and isinstance(other, Slot):
        return bool(numbers[one.index] == numbers[other.index])
    return not (isinstance(one, Slot) or isinstance(other, Slot))


def _bytes_of_terms(call: Call, facts: Mapping[str, TensorFacts]) -> int | None:
    """Give the bytes of a sum that lies in the memory of its terms; `None` if a call makes none."""
    if not operator_of(call.target).sum_in_terms or len(call.reads) < 2:
        return None
    shapes = [facts[name].shape for name in call.reads[:2]]
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    (result,) = call.results
    return None if result is None else max(1, math.prod(shape)) * facts[result].dtype.itemsize
