"""The ways of a capture of one size, for the other sizes of its trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Protocol, Self, cast

from remat_graph.torch.capturing.choice_of_sizes import ChoiceOfSizes
from remat_graph.torch.capturing.groups_of_sizes import GroupsOfSizes, GroupsOfTrace
from remat_graph.torch.capturing.late_capture import LateCapture
from remat_graph.torch.capturing.program_of_sizes import ProgramOfSizes
from remat_graph.torch.capturing.ways import Times
from remat_graph.torch.program import Program
from remat_graph.torch.tracing.joint_of_sizes import JointOfSizes, Numbers
from remat_graph.torch.ways.choice import Choice

__all__ = ["SizedWays"]


class Trace(Protocol):
    """What captures of one trace share."""

    joint: JointOfSizes
    groups: GroupsOfTrace

    def __hash__(self) -> int: ...

    def program_of_sizes(self, like: Any) -> ProgramOfSizes | None:
        """Give the program of a capture as one of sizes."""


class SizedWays(LateCapture):
    """A capture of a trace for calls of any size, which is written as was chosen for one size."""

    region: Trace | None
    symbols: Any
    _base: Self | None
    _of_sizes: ChoiceOfSizes | None
    _costs_for: Callable[..., dict[str, Any]]

    @functools.cached_property
    def _numbers(self) -> Numbers:
        assert self.region is not None
        return self.region.joint.numbers(self.symbols)

    def is_of_trace(self, other: object) -> bool:
        """Whether another is of the same trace, and for the same backward: in these slices, too."""
        return isinstance(other, SizedWays) and other.way_of_trace == self.way_of_trace

    @functools.cached_property
    def way_of_trace(self) -> Hashable:
        """What names the trace, and what else all its sizes have in common."""
        program = self.program
        return self.region, self.missing, self.sliced, program.deferred, program.leaving

    @functools.cached_property
    def sizes_of_trace(self) -> Hashable:
        """What names the sizes of its tensors, among captures of the trace.

        Where nothing shows which of its numbers are sizes, these are all.
        """
        of_sizes = None if self.region is None else self.region.program_of_sizes(self._uncut)
        return tuple(self._numbers) if of_sizes is None else of_sizes.sizes_in(self._numbers)

    def _written_for(self, plain: Self) -> Self | None:
        """Write the program of other sizes in the ways of this one; `None` if they do not allow it.

        `plain` is what `_uncut` is for these sizes.
        """
        of_sizes = self._choice_of_sizes
        written = None if of_sizes is None else of_sizes.of(plain.program)
        if written is None:
            return None
        program, cuts = written
        known = {"found": cuts}
        other = plain._later(
            **self._costs_for(program, plain.symbols),
            outline=self.outline,
            program=program,
            _costs=self._costs,
            _measured=self._measured,
            _choice=self._choice,
            _plain=plain._later(plain._graph_later, _cuts=known),
            _base=self._base_in_ways,
            _cuts=known,
            _of_sizes=of_sizes,
        )
        return other.with_released_outputs(self.released_outputs)

    @property
    def _base_in_ways(self) -> Self:
        """The capture off which this one was read together with its ways; else itself."""
        base = self._base
        return self if base is None or (base._choice is None) != (self._choice is None) else base

    @property
    def _base_alike(self) -> Self:
        """That capture, made to leave out the outputs that this one does."""
        base, deferred = self._base_in_ways, self.program.deferred
        if base is self or base.program.deferred == deferred:
            return base
        if deferred not in base._by_deferred:
            base._by_deferred[deferred] = cast("Self", base.with_deferred_outputs(deferred))
        return base._by_deferred[deferred]

    @functools.cached_property
    def _by_deferred(self) -> dict[frozenset[int], Self]:
        return {}

    @functools.cached_property
    def _uncut(self) -> Self:
        """The same capture as it was traced, with costs as this one has them."""
        return self.without_alternatives()

    @functools.cached_property
    def _choice_of_sizes(self) -> ChoiceOfSizes | None:
        choice = self._choice
        if self._of_sizes is not None or choice is None:
            return self._of_sizes
        if choice.unfused is not None:
            return self._uncut._groups(choice)
        return ChoiceOfSizes(choice, self.cuts if choice.sliced else (), self.program.order)

    @functools.cached_property
    def _unsliced(self) -> Self:
        return self.in_slices(())

    @property
    def unsliced(self) -> Self | None:
        """The same with nothing in slices, of one that was read off; `None` if nothing is so."""
        base, plain = self._base_in_ways, self._plain
        if base is self or not self.sliced or plain is None:
            return None
        return base._unsliced._written_for(cast("Self", plain))

    @property
    def kernels_are_for(self) -> Hashable | None:
        """The trace of all sizes that the kernels of its groups are for, if they are."""
        if self._choice is None:
            return None
        choice = replace(self._choice, unfused=self._uncut._in_no_group, gives_again=False)
        return None if self._uncut._groups(choice) is None else self.region

    @property
    def _in_no_group(self) -> frozenset[str]:
        of_sizes = None if self.region is None else self.region.program_of_sizes(self)
        return frozenset() if of_sizes is None else of_sizes.in_no_group

    def _program_of(self, choice: Choice) -> Program:
        groups = self._groups(choice) if choice.unfused is not None else None
        program = None if groups is None else groups.in_groups(self._of_all_sizes)
        return super()._program_of(choice) if program is None else program

    def _ops_left_out(self, choice: Choice, times: Times) -> frozenset[str]:
        groups = self._groups(replace(choice, unfused=self._in_no_group))
        found = None if groups is None else groups.ops_left_out(self._of_all_sizes, times)
        return super()._ops_left_out(choice, times) if found is None else found

    def _groups(self, choice: Choice) -> GroupsOfSizes | None:
        """Give what writes the programs of all sizes in groups, of one without alternatives.

        `None` if nothing shows that the groups of other sizes are these.
        """
        region = self.region
        if region is None or region.program_of_sizes(self) is None:
            return None
        key = self.missing, self.program.deferred, self.leaving_gradients, choice
        if key not in region.groups and self._of_all_sizes.generic is not None:
            own = super()._program_of(choice)
            region.groups.add(
                key, choice, self.cuts if choice.sliced else (), self._of_all_sizes, own
            )
        return region.groups.get(key)

    @functools.cached_property
    def _of_all_sizes(self) -> Program:
        """The program of one without alternatives, read off that of all sizes."""
        of_sizes = None if self.region is None else self.region.program_of_sizes(self)
        return self.program if of_sizes is None else of_sizes.at(self._numbers)
