"""What an executor has to offer: all that `remat` uses of one, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from remat_exec.chain import Exceeded, Started
from remat_exec.loss import Loss
from remat_exec.measure import Peak
from remat_graph import Schedule
from remat_graph.torch import Capture

__all__ = ["Executor", "Runnable"]


class Runnable(Protocol):
    """A plan that can be run, again and again; `Executable` is one."""

    @property
    def capture(self) -> Capture:
        """What is run."""
        ...

    @property
    def low_memory_plan(self) -> Runnable | None:
        """The plan whose backward can take over after this forward, if one can."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a step, with what a loss may keep."""
        ...

    @property
    def source(self) -> str:
        """What will be run, to be read."""
        ...

    @property
    def differentiable(self) -> frozenset[int]:
        """The positions, in what the program returns, of all that a gradient may come for."""
        ...

    @property
    def takes_all(self) -> bool:
        """Whether a backward with every gradient can follow, within the budget."""
        ...

    def __call__(
        self,
        module: torch.nn.Module,
        tensors: list[torch.Tensor],
        started: Started | None = None,
        finished: Callable[[], None] | None = None,
        droppable: Callable[[Callable[[], None]], None] | None = None,
        exceeded: Exceeded | None = None,
    ) -> list[torch.Tensor]:
        """Run the forward; give the user's output tensors, connected to autograd.

        `started` is told, when the backward starts, which gradients are missing and which outputs
        nobody holds any more; `finished` is called when it has given out the last of its own.
        `droppable` is handed what gives back, before the backward, all that the leaner plan does
        without. `exceeded` is told of a backward that goes over the budget because it is over other
        outputs, or others are held, than planned for, before it runs; without it, it is refused.

        Raises:
            ExecutionError: if it cannot be run on these tensors.
        """
        ...

    def rehearse(
        self, module: torch.nn.Module, tensors: list[torch.Tensor], loss: Loss | None = None
    ) -> Peak:
        """Run one forward and backward for its peak alone, changing nothing.

        Raises:
            LossError: if the loss cannot be run or differentiated.
        """
        ...


class Executor(Protocol):
    """Makes of a capture and a legal schedule of its graph what can be run.

    `low_memory_plan` is a plan of the same capture that the same executor made; see `Executable`.
    """

    def __call__(
        self,
        capture: Capture,
        schedule: Schedule,
        /,
        *,
        budget_bytes: int | None = None,
        low_memory_plan: Any = None,
    ) -> Runnable:
        """Make what runs a schedule.

        Raises:
            InvalidSchedule: if the simulator rejects the schedule.
        """
        ...


if TYPE_CHECKING:
    from remat_exec.executable import Executable

    _built_in: Executor = Executable
