"""Which ways of running its ops a program has, beside the one that was traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat_graph.graph import Numerics
from remat_graph.torch.fusing.groups import find_groups
from remat_graph.torch.fusing.norms import norms_apart
from remat_graph.torch.fusing.program import fused
from remat_graph.torch.program import Program
from remat_graph.torch.ways.alternatives import add_alternatives
from remat_graph.torch.ways.cross_entropy import with_cross_entropies
from remat_graph.torch.ways.cuts import Cut
from remat_graph.torch.ways.layouts import lay_out
from remat_graph.torch.ways.slicing import chosen_cuts, in_slices

__all__ = ["Choice"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What differs from the program that was traced.

    `numerics` says how exact the alternatives of ops are. `laid` are ops that run in channels_last,
    `sliced` kinds of cuts with numbers of slices. `unfused` are the ops that are in no compiled
    group; with `None` there are no groups. Where it `gives_again`, groups of the backward half give
    out what they make again and others read, so that it is not stored.
    """

    numerics: Numerics
    laid: frozenset[str] = frozenset()
    sliced: tuple[tuple[int, int], ...] = ()
    unfused: frozenset[str] | None = None
    gives_again: bool = False

    def of(self, program: Program, cuts: Sequence[Sequence[Cut]]) -> Program:
        """Write a program without alternatives as chosen; `cuts` are those of it, prepared."""
        return self.finished(self.in_groups(self.before_groups(program, cuts)))

    def in_groups(self, program: Program) -> Program:
        """Write one that is in its slices and layouts in groups, if there are to be any."""
        if self.unfused is None:
            return program
        program, _ = norms_apart(program, self.unfused)
        groups = find_groups(program, self.unfused, give_again=self.gives_again)
        return fused(program, groups)

    def finished(self, program: Program) -> Program:
        """Write it with the alternatives of its ops."""
        return add_alternatives(program, self.numerics)

    def before_groups(self, program: Program, cuts: Sequence[Sequence[Cut]]) -> Program:
        """Write it in these slices and layouts alone."""
        chosen = chosen_cuts(cuts, self.sliced) if self.sliced else []
        return lay_out(in_slices(self.prepare(program), chosen), self.laid)

    def prepare(self, program: Program) -> Program:
        """Write it with what is better in any case, where rounding may differ."""
        may_round = self.numerics.allows(Numerics.ROUNDING)
        return with_cross_entropies(program) if may_round else program
