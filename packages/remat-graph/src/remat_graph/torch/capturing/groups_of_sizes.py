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

from remat_graph.torch.calls import Call, TensorFacts
from remat_graph.torch.capturing.choice_of_sizes import ChoiceOfSizes, Cuts
from remat_graph.torch.capturing.later import Later
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.fusing.choosing import ops_left_out
from remat_graph.torch.fusing.kernel import Kernel, run_fused
from remat_graph.torch.fusing.sized_code import SizedCode, at_numbers, facts_at
from remat_graph.torch.lowering import equivalence_of
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

    def in_groups(self, plain: Program) -> Program | None:
        """Write the program of other sizes as chosen, whose groups may not be compiled yet."""
        written = self._with_groups(plain)
        return None if written is None else self.choice.finished(written[0])

    def gives(self, program: Program, plain: Program) -> bool:
        """Whether a program with groups is the one that this gives for its sizes."""
        try:
            return self.in_groups(plain) == program
        except CaptureError:  # a group reads a number that is no size
            return False

    def ops_left_out(
        self, plain: Program, times: Callable[[Program], Mapping[str, float]]
    ) -> frozenset[str]:
        """Find the ops that are better left out of groups, which are measured for these sizes.

        Those that are `unfused` are in any case.
        """
        alone, own = self._before_groups(plain), plain.generic
        of_all = None if own is None else self._all_sizes(own)
        unfused = self.choice.unfused or frozenset()
        if alone is None or own is None or of_all is None:
            return unfused

        def times_of(written: Program) -> Mapping[str, float]:
            return times(at_sizes(written, of_all.before, alone[0], own, self.codes))

        return ops_left_out(of_all.before, times_of, unfused)

    def _written(self, plain: Program) -> tuple[Program, Cuts] | None:
        written, own = self._with_groups(plain), plain.generic
        of_all = None if own is None else self._all_sizes(own)
        if written is None or of_all is None or not _are_compiled(written[0], of_all.grouped):
            return None
        program, cuts = written
        if of_all.written is not of_all.grouped:  # it has alternatives
            program = self.choice.finished(program)
        return (program, cuts) if program.order == self.order else None

    def _with_groups(self, plain: Program) -> tuple[Program, Cuts] | None:
        before, own = self._before_groups(plain), plain.generic
        of_all = None if own is None else self._all_sizes(own)
        if before is None or own is None or of_all is None:
            return None
        program, cuts = before
        return at_sizes(of_all.grouped, of_all.before, program, own, self.codes), cuts

    def _before_groups(self, plain: Program) -> tuple[Program, Cuts] | None:
        """Write a program in its slices and layouts; as it is, where that of all sizes is."""
        own = plain.generic
        if own is not None and not self.cuts:
            of_all = self._all_sizes(own)
            if of_all is not None and of_all.before is own.program:
                return plain, ()
        cuts = self._resized(self.choice.prepare(plain))
        return None if cuts is None else (self.choice.before_groups(plain, cuts), cuts)

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
    kernels, alike = dict[str, Kernel](), dict[str, str]()  # equal layers have the same

    def call(op: str) -> Call:
        generic = written.calls[op]
        if before.calls.get(op) is generic:
            return program.calls[op]
        if generic.target is run_fused:
            of_all = generic.args[0]
            kernel = kernels.get(of_all.key) or _kernel(of_all, own, codes)
            kernels[of_all.key] = kernel
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
        of_all = written.equivalence[op]
        if of_all not in alike:
            alike[of_all] = equivalence_of(calls[op], facts)
        return alike[of_all]

    facts = Later(written.facts, written.facts.keys(), fact)
    calls = Later(written.calls, written.calls.keys(), call)
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
    """Whether the kernels of a program have code, or those of no size have any.

    They stand where those of the program of all sizes do. One that has no code where others have
    takes more memory than was planned for these.
    """
    ops = (op for op, call in generic.calls.items() if call.target is run_fused)
    kernels = {id(kernel): kernel for op in ops if (kernel := program.calls[op].args[0])}
    return all(
        (kernel.is_settled or kernel.take_code_of_sizes())
        and (kernel.compiled is not None or kernel.sized is None or not kernel.sized.codes)
        for kernel in kernels.values()
    )
