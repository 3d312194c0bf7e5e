"""The program of one size, read as one of all sizes: which of its numbers are sizes of the trace.

The passes between trace and program take a tenth of a second for a hundred operators. They decide
by equal sizes, by names and by operators. So where all sizes that the trace knows differ from one
another, and from every number that is no size (`JointOfSizes.is_generic`), they decide the same for
all sizes. Then each call of the program is a call of the trace, with slots for some arguments; what
is not, as a mask that was looked at and named, or a layout that only a run shows, has no such
program.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from remat_graph.torch.calls import Call, TensorFacts, Variable, at_numbers, spanned_bytes
from remat_graph.torch.capturing.later import Later
from remat_graph.torch.capturing.value_bytes import ValueBytes, bytes_of_sum
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.lowering import equivalence_of, with_workspace
from remat_graph.torch.operators import operator_of
from remat_graph.torch.program import Generic, Program
from remat_graph.torch.rewrites.attention import MasksOfSizes, named_causally
from remat_graph.torch.tracing.joint_of_sizes import (
    JointOfSizes,
    Numbers,
    Slot,
    Traced,
    filled,
    layout_at,
    slots_in,
)

__all__ = ["NotOfSizes", "ProgramOfSizes", "classes"]

_DECIDED = frozenset({torch.ops.aten.constant_pad_nd.default})  # where they are run without data
_WORTH = 0.01  # of the largest value of a program, to say how it grows


class NotOfSizes(CaptureError):
    """A program is that of its own sizes alone, or nothing shows that it is not."""


class ProgramOfSizes:
    """A program for these `numbers` of a trace, all generic, which gives that for others.

    `masks` knows those of the trace.

    Raises:
        NotOfSizes: if it is not shown to be the same for other numbers.
    """

    def __init__(
        self, joint: JointOfSizes, program: Program, numbers: Numbers, masks: MasksOfSizes
    ) -> None:
        if program.alternatives or program.rounding:
            raise NotOfSizes("it has alternatives")
        self._joint, self._program, self._numbers, self._masks = joint, program, numbers, masks
        self._arguments: dict[str, Any] = {}
        self._facts: dict[str, Traced] = {}
        self._added: dict[str, Traced] = {}
        self._slot_of = {numbers[at]: Slot(at) for at in joint.distinct}
        names = {at: f"size_{at}__" for at in joint.distinct}
        self._names = {numbers[at]: name for at, name in names.items()}
        self._formulas = joint.formulas(names)
        self._texts: dict[Any, Any] = {}
        self._terms: dict[str, tuple[str, ...]] = {}
        self._causal: dict[Node, None] = {}
        self._made_by = program.calls_by_variable()
        for name, facts in program.facts.items():
            self._read_facts(name, facts)
        for calls in (program.calls, program.views):
            for name, call in calls.items():
                self._read_call(name, call)
        for output, layout in zip(program.outputs, joint.layouts, strict=True):
            if layout_at(layout, numbers) != output.layout:
                raise NotOfSizes("an output lies otherwise than traced")
        self._of_facts = sorted({slot.index for slot in slots_in(tuple(self._facts.values()))})
        sized = self._arguments.keys() | self._facts.keys()
        self._sized_calls = frozenset(
            name
            for name, call in program.calls.items()
            if not sized.isdisjoint((name, *call.reads))
        )

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
            call, known = self._made_by.get(name), self._program.facts
            terms = () if call is None else _terms_of(call)
            shapes = [known[term].shape for term in terms]
            if not terms or bytes_of_sum(facts.dtype, *shapes) != facts.storage_bytes:
                raise NotOfSizes(f"{name} takes other memory than its sizes say")
            self._terms[name] = terms
        if self._is_sized(name):
            self._facts[name] = traced

    def _slots_of(self, item: Any) -> Any:
        """Put slots in the place of numbers of what a pass has added: all sizes are different."""
        return at_numbers(item, self._slot_of)

    def _is_sized(self, name: str) -> bool:
        """Whether a variable of the trace, or the memory that it is in, has a size for a slot."""
        for each in {name, self._program.storage.get(name, name)}:
            node = self._joint.named.get(each)
            traced = self._added.get(each) if node is None else self._joint.traced(node)
            if isinstance(traced, Traced) and slots_in(traced):
                return True
        return name in self._terms

    @staticmethod
    def _dense(traced: Traced, numbers: Numbers) -> tuple[Any, ...]:
        """Give shape, strides, offset, and the bytes of a tensor alone in its memory."""
        shape, stride = filled(traced.shape, numbers), filled(traced.stride, numbers)
        offset = filled(traced.offset, numbers)
        return shape, stride, offset, spanned_bytes(shape, stride, offset, traced.dtype)

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
            if slots_in(planned) or operator_of(call.target).workspace is not None:
                self._arguments[name] = planned
            return
        if node.target is not call.target:
            raise NotOfSizes(f"{name} is traced as {node.target}")
        traced = self._joint.arguments[node]
        named = named_causally(call.target, *traced)
        if named is not None and call.argument("is_causal"):  # a pass has looked at its mask
            traced = named[0]
            self._causal[named[1]] = None
        planned = _matched(traced, (call.args, dict(call.kwargs)), self._numbers)
        by_number = self._slots_of((call.args, dict(call.kwargs)))
        if not _same_slots(planned, by_number, self._numbers):
            raise NotOfSizes(f"an argument of {name} has the number of a size, and is none")
        if slots_in(planned):
            if call.replay is not None:
                raise NotOfSizes(f"{name} is made again by another operator")
            self._arguments[name] = planned

    @property
    def order(self) -> tuple[str, ...]:
        """The ops, which for some sizes are others: where a pass looks at a mask made of sizes."""
        return self._program.order

    def at(self, numbers: Numbers) -> Program:
        """Give the program for other numbers of the trace; its parts are made when they are read.

        Where two sizes are equal that are not always, more ops can run in place than for others.
        """
        generic = self._program

        def fact(name: str) -> TensorFacts:
            return self._facts_of(name, numbers, facts)

        def call(name: str) -> Call:
            args, kwargs = filled(self._arguments[name], numbers)
            other = generic.views[name] if name in generic.views else generic.calls[name]
            return with_workspace(dataclasses.replace(other, args=args, kwargs=kwargs), facts)

        facts = Later(generic.facts, self._facts.keys(), fact)
        calls = Later(generic.calls, self._arguments.keys(), call)
        parts: dict[str, Any] = {
            "calls": calls,
            "views": Later(generic.views, self._arguments.keys(), call),
            "facts": facts,
            "outputs": tuple(
                dataclasses.replace(output, layout=layout_at(layout, numbers))
                for output, layout in zip(generic.outputs, self._joint.layouts, strict=True)
            ),
            "equivalence": Later(
                generic.equivalence, self._sized_calls, classes(generic.equivalence, calls, facts)
            ),
        }
        if not self._joint.are_generic(numbers):
            other = dataclasses.replace(generic, **parts)
            if (other.overwrites, other.handed) != (generic.overwrites, generic.handed):
                return other
        other = copy.copy(generic)
        own = {self._names[self._numbers[at]]: numbers[at] for at in self._joint.distinct}
        parts["generic"] = Generic(generic, self._names, self._formulas, own, self._texts)
        for name, part in parts.items():
            object.__setattr__(other, name, part)
        return other

    def holds_for(self, symbols: Mapping[str, Any]) -> bool:
        """Whether it is of such sizes: of some traces only where several inputs have the same.

        Masks that were the causal one, and have no part in it, must be that for these, too.
        """
        return self._joint.holds_for(symbols) and self._masks.are_causal(self._causal, symbols)

    @functools.cached_property
    def in_no_group(self) -> frozenset[str]:
        """The ops that no group of any size has: those of which torch decides each size.

        And those that read a number of the call which is no size, as a temperature.
        """
        return frozenset(
            op
            for op, arguments in self._arguments.items()
            if any(isinstance(self._numbers[slot.index], float) for slot in slots_in(arguments))
        ).union(op for op, call in self._program.calls.items() if call.target in _DECIDED)

    def sizes_in(self, numbers: Numbers) -> tuple[Any, ...]:
        """Pick those of the numbers of a call that all that is known of variables depends on."""
        return tuple(numbers[at] for at in self._of_facts)

    def have_same_sizes(self, numbers: Numbers, others: Numbers) -> bool:
        """Whether all that is known of variables is the same for two calls."""
        return all(numbers[at] == others[at] for at in self._of_facts)

    @functools.cached_property
    def value_bytes(self) -> ValueBytes:
        """What the values take, by the numbers of a call."""
        program = self._program
        terms = {value: tuple(map(self._traced, of)) for value, of in self._terms.items()}
        values = {value: self._traced(value) for value in program.storage.values()}
        return ValueBytes(values, terms, program.device)

    def growth(self, numbers: Numbers, before: Numbers) -> float:
        """Say how many times as large a value is as for other numbers, the most of any.

        Small ones do not count.
        """
        known, new = self.value_bytes(before), self.value_bytes(numbers)
        least = max(1.0, _WORTH * max(known, default=0))
        pairs = zip(new, known, strict=True)
        return max((a / max(1, b) for a, b in pairs if max(a, b) >= least), default=1.0)

    def _traced(self, name: str) -> Traced:
        known = self._program.facts[name]
        of_no_size = Traced(known.shape, known.stride, known.offset, known.dtype, known.device)
        return self._facts.get(name, of_no_size)

    def _facts_of(
        self, name: str, numbers: Numbers, facts: Mapping[str, TensorFacts]
    ) -> TensorFacts:
        """Give what is known of a variable; of views, the memory of what they are views of."""
        known, root = self._program.facts[name], self._program.storage[name]
        shape, stride, offset, storage_bytes = self._dense(self._facts[name], numbers)
        if root != name:
            storage_bytes = facts[root].storage_bytes
        elif name in self._terms:
            shapes = (facts[term].shape for term in self._terms[name])
            storage_bytes = bytes_of_sum(known.dtype, *shapes)
        return TensorFacts(shape, stride, offset, known.dtype, known.device, storage_bytes)


def classes(
    of_all: Mapping[str, str], calls: Mapping[str, Call], facts: Mapping[str, TensorFacts]
) -> Callable[[str], str]:
    """Give what names the class of a call for some size: what is equal for all sizes is here."""
    alike: dict[str, str] = {}

    def of(op: str) -> str:
        if of_all[op] not in alike:
            alike[of_all[op]] = equivalence_of(calls[op], facts)
        return alike[of_all[op]]

    return of


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


def _terms_of(call: Call) -> tuple[str, ...]:
    """Name the terms in whose memory a sum lies; none if a call makes no such sum."""
    is_sum = operator_of(call.target).sum_in_terms and len(call.reads) > 1
    return call.reads[:2] if is_sum and call.results != (None,) else ()
