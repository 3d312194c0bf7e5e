"""What a step asks of what it runs by."""

from __future__ import annotations

from typing import Protocol

import torch

from remat_exec.codegen import Code
from remat_exec.on_demand import Recipe
from remat_exec.room import Room
from remat_exec.variant import Variant
from remat_graph.torch import Capture, Program

__all__ = ["StepCode"]


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

    @property
    def room(self) -> Room:
        """What a backward may take."""
