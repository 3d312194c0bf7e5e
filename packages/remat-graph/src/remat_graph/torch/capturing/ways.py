"""The ways in which a captured step can run: alternatives, layouts, slices, compiled groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from remat_graph.graph import Numerics
from remat_graph.torch.cost.costs import Cost, Costs, measure_costs
from remat_graph.torch.errors import CaptureError
from remat_graph.torch.fusing.choosing import ops_left_out
from remat_graph.torch.fusing.compiling import compile_kernels
from remat_graph.torch.fusing.kernel import Kernel, run_fused
from remat_graph.torch.fusing.missing import raise_missing
from remat_graph.torch.fusing.program import kernels_of
from remat_graph.torch.kernels.cross_entropy import cross_entropy
from remat_graph.torch.program import LossCost, Program
from remat_graph.torch.tracing.fakes import own_modes
from remat_graph.torch.ways.choice import Choice
from remat_graph.torch.ways.cuts import Cut, cuts_of
from remat_graph.torch.ways.layouts import choose_layouts
from remat_graph.torch.ways.slicing import bytes_of_cut, same_cuts

if TYPE_CHECKING:
    from remat_graph.graph import Graph

__all__ = ["Times", "Ways"]

Times = Callable[[Program], Mapping[str, float]]
"""Gives the seconds of each op of a program."""


class Ways:
    """What a `Capture` says of the ways in which it can run, and the same step in other ways."""

    graph: Graph
    program: Program
    loss: LossCost
    dry: bool
    released_outputs: frozenset[int]
    _costs: Costs
    _measured: dict[str, Cost]
    _choice: Choice | None
    _plain: Self | None
    _cuts: dict[str, tuple[tuple[Cut, ...], ...]]

    if TYPE_CHECKING:
        _with: Callable[..., Self]
        costed: Callable[..., Self]
        with_loss: Callable[[LossCost], Self]
        with_released_outputs: Callable[[frozenset[int]], Self]

    @property
    def numerics(self) -> Numerics | None:
        """How exact its alternatives are; `None` if it has none."""
        return None if self._choice is None else self._choice.numerics

    @property
    def sliced(self) -> tuple[tuple[int, int], ...]:
        """Which kinds of `cuts` run in how many slices."""
        return () if self._choice is None else self._choice.sliced

    @property
    def has_other_ops(self) -> bool:
        """Whether it runs other ops than were traced: in slices, in groups, losses of scores."""
        calls = self.program.calls.values()
        is_grouped = bool(self.sliced) or self.unfused is not None
        return is_grouped or any(call.target is cross_entropy for call in calls)

    @property
    def laid_out(self) -> tuple[int, ...]:
        """Which ops run in channels_last, by their place among the calls without alternatives."""
        return () if self._choice is None else self._places(self._choice.laid)

    def without_alternatives(self) -> Self:
        """Give the same graph with one maker of each value, all in the layouts that were traced."""
        if self._plain is None:
            return self
        plain = self._plain
        if self._costs != plain._costs:
            plain = plain.costed(self._costs, self._measured)
        return plain.with_loss(self.loss).with_released_outputs(self.released_outputs)

    def in_traced_layouts(self) -> Self:
        """Give the same graph with its alternatives, but every op in the layout that was traced."""
        if self._choice is None or not self._choice.laid:
            return self
        return self.without_alternatives()._chosen(replace(self._choice, laid=frozenset()))

    @property
    def unfused(self) -> tuple[int, ...] | None:
        """Which ops are in no compiled group, by their place as `laid_out` has it.

        `None` if there are no groups.
        """
        if self._choice is None or self._choice.unfused is None:
            return None
        return self._places(self._choice.unfused)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Name the ops that are in no compiled group for they are slower so, or do not compile."""
        if self._choice is None or self._choice.unfused is None:
            return ()
        failed = (
            op
            for op, call in self.program.calls.items()
            if call.target is run_fused and call.args[0].failure is not None
        )
        return (*(op for op in self.program.calls if op in self._choice.unfused), *failed)

    def _places(self, ops: Collection[str]) -> tuple[int, ...]:
        calls = enumerate((self._plain or self).program.calls)
        return tuple(at for at, op in calls if op in ops)

    @property
    def gives_again(self) -> bool:
        """Whether its groups of the backward half give out what others read of the forward."""
        return self._choice is not None and self._choice.gives_again

    def giving_again(self) -> Self:
        """Give the same graph with such groups; itself if it has none, or they give nothing."""
        if self._choice is None or self._choice.unfused is None or self._choice.gives_again:
            return self
        other = self.without_alternatives()._chosen(replace(self._choice, gives_again=True))
        return self if other.program.storage.keys() == self.program.storage.keys() else other

    def in_groups(
        self, unfused: Collection[int] | None = None, *, give_again: bool = False
    ) -> Self:
        """Give the same graph with compiled groups of ops.

        They are of all ops but those `unfused`, as another capture has them, or as is fastest.

        Raises:
            CaptureError: if rounding may not differ, or an operator cannot be measured.
        """
        choice = self._rounding("compiled groups round otherwise")
        plain = self.without_alternatives()
        left_out = plain._in_no_group
        if unfused is not None:
            left_out = frozenset(op for at, op in enumerate(plain.program.calls) if at in unfused)
        elif self._costs == "measure" and not self.dry:
            with own_modes():
                left_out = plain._ops_left_out(choice, times_by(self._measured))
        return plain._chosen(replace(choice, unfused=left_out, gives_again=give_again))

    def may_be_in_groups(self, unfused: Collection[int]) -> bool:
        """Whether groups of all ops but those `unfused`, as another capture has them, may be its.

        Not where they have an op that is never in a group here, as one that reads a number which
        changes: the other was traced with that number.
        """
        plain = self.without_alternatives()
        return plain._in_no_group.isdisjoint(
            op for at, op in enumerate(plain.program.calls) if at not in unfused
        )

    @property
    def _in_no_group(self) -> frozenset[str]:
        """The ops of a capture without alternatives that are never in a group."""
        return frozenset()

    def _ops_left_out(self, choice: Choice, times: Times) -> frozenset[str]:
        """Find the ops of a capture without alternatives that are better left out of groups."""
        cuts = self.cuts if choice.sliced else ()
        return ops_left_out(choice.before_groups(self.program, cuts), times)

    @property
    def kernels_are_for(self) -> Hashable | None:
        """What kernels of groups are for, beside this size: a trace of all sizes, if any."""
        return None

    @property
    def group_kernels(self) -> tuple[Kernel, ...]:
        """What its groups would run, if all ops were in groups that can be."""
        choice = self._rounding("compiled groups round otherwise")
        plain, kernels = self.without_alternatives(), dict[str, Kernel]()
        for again in (False, True):
            grouped = replace(choice, unfused=plain._in_no_group, gives_again=again)
            kernels |= kernels_of(plain._program_of(grouped))
        return tuple(kernels.values())

    def compile_groups(self) -> None:
        """Compile the groups that have not been; one that cannot be runs op by op."""
        if not self.dry:
            with own_modes():
                compile_kernels(kernels_of(self.program).values())
            raise_missing()

    def without_groups(self) -> Self:
        """Give the same graph with every op by itself."""
        if self._choice is None or self._choice.unfused is None:
            return self
        return self.without_alternatives()._chosen(
            replace(self._choice, unfused=None, gives_again=False)
        )

    @property
    def cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """Where the program can be cut into slices, by kinds: first what holds most."""
        if "found" not in self._cuts:
            self._cuts["found"] = cuts_of(self._program_to_cut)
        return self._cuts["found"]

    @property
    def _program_to_cut(self) -> Program:
        """The program that slices are cut of: rounding may differ."""
        plain = self if self._plain is None else self._plain
        return Choice(Numerics.ROUNDING).prepare(plain.program)

    def bytes_of_slices(self, kind: int, slices: int) -> int:
        """Predict the most that a cut of this kind needs in so many slices: with its border."""
        kept = self.graph.resident | self.graph.results
        return bytes_of_cut(self._program_to_cut, self.cuts[kind][0], slices, kept)

    def has_cuts(self, sliced: Sequence[tuple[int, int]]) -> bool:
        """Whether there are these kinds of cuts: with other outputs there may be others."""
        return all(0 <= kind < len(self.cuts) and slices > 0 for kind, slices in sliced)

    def in_slices(self, sliced: Sequence[tuple[int, int]]) -> Self:
        """Give the same graph, with each of these kinds of cuts in so many slices.

        Each is a position in `cuts` and a number of slices; more than there can be are as many as
        there can be. A cut that shares an op with one before it is left out. None at all gives back
        the graph without slices.

        Raises:
            CaptureError: if rounding may not differ, or there is no such kind.
        """
        choice = self._rounding("slices add up in another order")
        if not self.has_cuts(sliced):
            raise CaptureError(
                f"sliced={sliced!r}; this capture has {len(self.cuts)} kinds of cuts"
            )
        return self.without_alternatives()._chosen(replace(choice, sliced=tuple(sliced)))

    def with_alternatives(
        self,
        numerics: Numerics = Numerics.BITWISE,
        *,
        measured: dict[str, Cost] | None = None,
        laid_out: Collection[int] | None = None,
    ) -> Self:
        """Give the same graph with other makers of its values, as exact as asked for or more.

        Where rounding may differ, ops run in the layouts in which the step is fastest, if that can
        be measured: costs are measured, or `measured` is given, to which what is measured is added.
        With `laid_out`, as another capture has it, they are those that can of these.

        Raises:
            CaptureError: if it has alternatives, or an operator cannot be measured.
        """
        if self.numerics is not None:
            raise CaptureError(
                f"this capture has alternatives with numerics={self.numerics.value!r}; ask for "
                f"others of the one without"
            )
        if measured is None and self._costs == "measure":
            measured = self._measured
        laid: frozenset[str] = frozenset()
        if laid_out is not None:
            laid = frozenset(op for at, op in enumerate(self.program.calls) if at in laid_out)
        elif numerics.allows(Numerics.ROUNDING) and measured is not None and not self.dry:
            with own_modes():
                laid = choose_layouts(self.program, times_by(measured))
        return self._chosen(Choice(numerics, laid))

    def _rounding(self, why: str) -> Choice:
        """Give what was chosen, where rounding may differ.

        Raises:
            CaptureError: if it may not, saying why it must.
        """
        if self._choice is None or not self._choice.numerics.allows(Numerics.ROUNDING):
            raise CaptureError(f"{why}: capture with_alternatives(Numerics.ROUNDING) first")
        return self._choice

    def _program_of(self, choice: Choice) -> Program:
        """Write the program of a capture without alternatives as chosen."""
        return choice.of(self.program, self.cuts if choice.sliced else ())

    def _chosen(self, choice: Choice) -> Self:
        program = self._program_of(choice)
        return self._with(program=program, _choice=choice, _plain=self).costed(self._costs)

    def _as_this(self, other: Self, laid: frozenset[str]) -> Self:
        """Give a capture of the same forward the alternatives, layouts and slices of this one."""
        assert self._choice is not None
        sliced = same_cuts(self.cuts, self.sliced, other.cuts) if self.sliced else ()
        return other._chosen(replace(self._choice, laid=laid, sliced=sliced))


def times_by(measured: dict[str, Cost]) -> Times:
    """Give what measures the seconds of each op of a program."""
    return lambda program: {op: cost.time for op, cost in measure_costs(program, measured).items()}
