"""Backwards for other gradients than planned for."""

from __future__ import annotations

from dataclasses import dataclass

from remat_exec.codegen import Code
from remat_graph.torch import Program

__all__ = ["Variant"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A backward for other gradients in or out, over the forward of the planned one.

    `whole_program` has outputs that its program does not make, whose gradients may come.
    """

    missing: frozenset[int]
    code: Code
    program: Program
    whole_program: Program

    @property
    def tangents(self) -> dict[str, int]:
        """The gradients that this backward reads: variables, and positions of what was returned."""
        tangents = self.program.tangents.items()
        return {name: position for name, position in tangents if position not in self.missing}
