"""Compiled groups for programs of any size: found once, in the program of sizes that all differ.

What passes make of that program is what they make of every size, with its numbers in the places of
the others. So groups are the same for all sizes, and each is compiled once, with symbols.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from remat_graph.torch.calls import Call, TensorFacts, at_numbers
from remat_graph.torch.capturing.choice_of_sizes import ChoiceOfSizes, Cuts
from remat_graph.torch.capturing.later import Later
from remat_graph.torch.capturing.program_of_sizes import classes
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.fusing.choosing import ops_left_out
from remat_graph.torch.fusing.kernel import Kernel, run_fused
from remat_graph.torch.fusing.sized_code import SizedCode, facts_at
from remat_graph.torch.program import Generic, Program
from remat_graph.torch.ways.choice import Choice

__all__ = ["GroupsOfSizes", "GroupsOfTrace"]

logger = logging.getLogger(__name__)

Codes = dict[str, SizedCode | None]
"""Code for all sizes by the key of a kernel of sizes that all differ; `None` if it has no sizes."""


@dataclass(frozen=True, slots=True)
class _OfAllSizes:
    """The program of sizes that all differ, as chosen: without groups, with them, and finished."""

    before: Program
    grouped: Program
    written: Program


@dataclass(frozen=True, slots=True)
class _Before:
    """The program of some sizes in its slices and layouts, and the one of all sizes."""

    program: Program
    cuts: Cuts
    own: Generic
    of_all: _OfAllSizes


@dataclass(frozen=True)
class GroupsOfSizes(ChoiceOfSizes):
    """A choice of groups for the program of one size, which are those of any size.

    They are found in the program of sizes that all differ, and compiled for all: `codes` has what
    is. For two sizes they are compared with those that are found in their own programs.
    """

    codes: Codes = field(default_factory=dict)

    def of(self, plain: Program) -> tuple[Program, Cuts] | None:
        """Write the program of other sizes in groups; `None` if a group has no code for these."""
        found = None if self._kept.get("differs") else super().of(plain)
        if found is not None and "differs" not in self._kept:
            self._kept["differs"] = found[0] != self.choice.of(plain, found[1])
            return self.of(plain)
        return found

    def allows(self, plain: Program) -> bool:
        """Whether it can be written so for the sizes of a program: groups have code, too."""
        return not self._kept.get("differs") and self._written(plain) is not None

    def in_groups(self, plain: Program) -> Program | None:
        """Write the program of other sizes as chosen, whose groups may not be compiled yet."""
        read = self._before_groups(plain)
        return None if read is None else self.choice.finished(self._with_groups(read))

    def gives(self, program: Program, plain: Program) -> bool:
        """Whether a program with groups is the one that this gives for its sizes."""
        try:
            return self.in_groups(plain) == program
        except CaptureError:  # a group reads a number that is no size
            return False

    def ops_left_out(
        self, plain: Program, times: Callable[[Program], Mapping[str, float]]
    ) -> frozenset[str] | None:
        """Find the ops that are better left out of groups, which are measured for these sizes.

        Those that are `unfused` are in any case. `None` where groups of these sizes are their own.
        """
        read = self._before_groups(plain)
        if read is None:
            return None

        def times_of(written: Program) -> Mapping[str, float]:
            return times(at_sizes(written, read.of_all.before, read.program, read.own, self.codes))

        return ops_left_out(read.of_all.before, times_of, self.choice.unfused or frozenset())

    def _written(self, plain: Program) -> tuple[Program, Cuts] | None:
        read = self._before_groups(plain)
        if read is None:
            return None
        program = self._with_groups(read)
        if not _are_compiled(program, read.of_all.grouped):
            return None
        if read.of_all.written is not read.of_all.grouped:  # it has alternatives
            program = self.choice.finished(program)
        return (program, read.cuts) if program.order == self.order else None

    def _with_groups(self, read: _Before) -> Program:
        return at_sizes(read.of_all.grouped, read.of_all.before, read.program, read.own, self.codes)

    def _before_groups(self, plain: Program) -> _Before | None:
        """Write a program in its slices and layouts; as it is, where that of all sizes is."""
        own = plain.generic
        of_all = None if own is None else self._all_sizes(own)
        if own is None or of_all is None:
            return None
        if of_all.before is own.program:
            return _Before(plain, (), own, of_all)
        cuts = self._resized(self.choice.prepare(plain))
        if cuts is None:
            return None
        return _Before(self.choice.before_groups(plain, cuts), cuts, own, of_all)

    def _generic(self, own: Generic) -> Program | None:
        of_all = self._all_sizes(own)
        return None if of_all is None else of_all.written

    def _is_alike(self, generic: Program, program: Program, own: Generic) -> bool:
        of_all = self._all_sizes(own)
        if of_all is not None and of_all.before is own.program and of_all.grouped is generic:
            return True  # all of it was read off that one
        return super()._is_alike(generic, program, own)

    def _all_sizes(self, own: Generic) -> _OfAllSizes | None:
        """Write the program of sizes that all differ, once."""
        if "all sizes" not in self._kept:
            cuts = self._resized(self.choice.prepare(own.program))
            of_all: _OfAllSizes | None = None
            if cuts is not None:
                before = self.choice.before_groups(own.program, cuts)
                grouped = self.choice.in_groups(before)
                of_all = _OfAllSizes(before, grouped, self.choice.finished(grouped))
            self._kept["all sizes"] = of_all
        found: _OfAllSizes | None = self._kept["all sizes"]
        return found

    @cached_property
    def _kept(self) -> dict[str, Any]:
        return {}


class GroupsOfTrace(dict[Hashable, GroupsOfSizes | None]):
    """What writes the programs in groups for all sizes of a trace, by what it is for.

    The code of these groups is shared.
    """

    def __init__(self) -> None:
        super().__init__()
        self._codes: Codes = {}

    def add(
        self, key: Hashable, choice: Choice, cuts: Cuts, plain: Program, grouped: Program
    ) -> None:
        """Add what writes the groups that are chosen, if it gives those that one size has.

        `plain` is the program of that size, and `grouped` what it is in groups of its own.
        """
        found = GroupsOfSizes(choice, cuts, grouped.order, self._codes)
        self[key] = found if found.gives(grouped, plain) else None
        if self[key] is None:
            logger.info("groups are compiled for each size: those of other sizes are others")


def at_sizes(
    written: Program, before: Program, program: Program, own: Generic, codes: Codes
) -> Program:
    """Give what a pass makes of a program, by what it has written of the one for all sizes.

    That is `written` of `before`, in which sizes have `names`; `program` has its `own` numbers in
    their places. Parts are made when they are read.
    """
    numbers = {number: own.numbers[name] for number, name in own.names.items()}
    kernels: dict[str, Kernel] = {}  # equal layers have the same

    def call(op: str) -> Call:
        generic = written.calls[op]
        if before.calls.get(op) is generic:
            return program.calls[op]
        if generic.target is run_fused:
            of_all = generic.args[0]
            if of_all.key not in kernels:
                kernels[of_all.key] = _kernel(of_all, own, codes)
            kernel = kernels[of_all.key]
            return dataclasses.replace(generic, args=(kernel, *generic.args[1:]), body=kernel.body)
        other: Call = at_numbers(generic, numbers)
        return other

    def view(name: str) -> Call:
        generic = written.views[name]
        known = before.views.get(name) is generic
        other: Call = program.views[name] if known else at_numbers(generic, numbers)
        return other

    def fact(name: str) -> TensorFacts:
        if name in before.facts:
            return program.facts[name]
        of_view = facts_at(written.facts[name], numbers)
        root = written.storage[name]
        whole = of_view if root == name else facts[root]
        return dataclasses.replace(of_view, storage_bytes=whole.storage_bytes)

    def equivalence(op: str) -> str:
        if before.calls.get(op) is written.calls[op]:
            return program.equivalence[op]
        return own_class(op)

    facts = Later(written.facts, written.facts.keys(), fact)
    calls = Later(written.calls, written.calls.keys(), call)
    own_class = classes(written.equivalence, calls, facts)
    parts: Mapping[str, Any] = {
        "calls": calls,
        "views": Later(written.views, written.views.keys(), view),
        "facts": facts,
        "equivalence": Later(written.equivalence, written.equivalence.keys(), equivalence),
        "outputs": program.outputs,
        "constants": program.constants,
    }
    other = copy.copy(written)
    for name, part in parts.items():
        object.__setattr__(other, name, part)
    return other


def _kernel(kernel: Kernel, own: Generic, codes: Codes) -> Kernel:
    if kernel.key not in codes:
        generic = {name: number for number, name in own.names.items()}
        codes[kernel.key] = SizedCode.of(
            kernel.body, kernel.facts, own.names, own.formulas, generic
        )
    sized = codes[kernel.key]
    if sized is None:
        return kernel
    return Kernel.of_size(kernel, sized, tuple(own.numbers[name] for name in sized.symbols))


def _are_compiled(program: Program, generic: Program) -> bool:
    """Whether each kernel of a program has code, or there is none for any size.

    Kernels stand where those of the program of all sizes do. One without code, where other sizes
    have some, takes more memory than was planned for these.
    """
    ops = (op for op, call in generic.calls.items() if call.target is run_fused)
    kernels: dict[int, Kernel] = {}
    for op in ops:
        kernel = program.calls[op].args[0]
        kernels[id(kernel)] = kernel
    return all(map(_has_code, kernels.values()))


def _has_code(kernel: Kernel) -> bool:
    if not (kernel.is_settled or kernel.take_code_of_sizes()):
        return False
    return kernel.compiled is not None or kernel.sized is None or not kernel.sized.codes
