"""Backwards for other gradients than planned for, and what a step asks of what it runs by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from remat_exec.codegen import Code
from remat_exec.on_demand import Recipe
from remat_graph.torch import Capture, Program

__all__ = ["StepCode", "Variant"]


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


class StepCode(Protocol):
    """What one step runs by, from its forward to its backward: an `Executable`."""

    capture: Capture
    code: Code
    device: torch.device
    differentiable: frozenset[int]
    groups: tuple[tuple[str, ...], ...]
    keeps_values_for_other_backwards: bool
    recipes: tuple[Recipe, ...]
    not_differentiable: tuple[int, ...]

    @property
    def low_memory_plan(self) -> StepCode | None:
        """What it can go on as, if memory runs short."""

    @property
    def whole_program(self) -> Program:
        """The program by which outputs are made of what is handed over, also deferred ones."""

    def variant(
        self,
        missing: frozenset[int],
        autocast: torch.dtype | None = None,
        unwanted: frozenset[str] = ...,
    ) -> Variant:
        """Find the backward for when the gradients at these positions do not come."""

    def check_reading(self, recipe: Recipe) -> None:
        """See that there is room to make an output between the halves."""

    def check_room(
        self, variant: Variant, released_outputs: frozenset[int], *, staying: bool = False
    ) -> None:
        """See that there is room for a backward while those outputs are gone."""
