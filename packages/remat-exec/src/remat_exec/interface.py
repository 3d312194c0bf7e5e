"""What an executor must offer: exactly what `remat` uses of one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol

import torch

from remat_exec.loss import Loss
from remat_exec.measure import Peak
from remat_exec.step_run import Exceeded, Started
from remat_graph import Schedule
from remat_graph.torch import Capture

__all__ = ["Ability", "Executor", "Runnable", "abilities_of"]


class Ability(enum.Enum):
    """What an executor may be able to do beyond running a plan."""

    DEFERS_OUTPUTS = "it takes `read` and `watched`, has `reading_bytes`, makes outputs when read"
    HANDS_OUT = "it takes `hand_out` and `asked`, connects what is handed out by autograd's graph"
    RUNS_OTHER_SIZES = "it has `at`, which gives the same plan for a capture of other sizes"
    KNOWS_OTHER_PEAKS = "it has `peak_without`, the peak of a backward without gradients of outputs"
    REPEATS = "it takes `repeats`, runs a forward again for another backward over a kept graph"
    RELEASES_GRADIENTS = "it hands out gradients where the plan says, and counts those that stay"


class Runnable(Protocol):
    """A plan that can run any number of times; `Executable` is one."""

    @property
    def capture(self) -> Capture:
        """The capture whose program runs."""
        ...

    @property
    def low_memory_plan(self) -> Runnable | None:
        """A plan whose backward can take over after this forward; `None` if there is none."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a step in bytes, with what a loss may keep."""
        ...

    @property
    def staying_peak_bytes(self) -> int:
        """That peak where gradients stay that were to leave at once; the same if none were."""
        ...

    @property
    def source(self) -> str:
        """The code that runs, for people to read."""
        ...

    @property
    def differentiable(self) -> frozenset[int]:
        """The positions, in what the program returns, of outputs that may get a gradient."""
        ...

    @property
    def takes_all(self) -> bool:
        """Whether a backward over all outputs can follow within the budget."""
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
        """Run the forward; return the user's output tensors, connected to autograd.

        When the backward starts, `started` gets the positions of missing gradients, and those of
        outputs that nobody holds any more. `finished` is called when the backward has handed out
        its last gradient. `droppable` gets a function that frees, before the backward, all that
        `low_memory_plan` does without. A backward may go over the budget because it is over other
        outputs than planned for, or more outputs are held: `exceeded` gets the error before that
        backward runs; without `exceeded`, the error is raised.

        Raises:
            ExecutionError: if it cannot be run on these tensors.
        """
        ...

    def rehearse(
        self, module: torch.nn.Module, tensors: list[torch.Tensor], loss: Loss | None = None
    ) -> Peak:
        """Run one forward and backward to measure the peak; change nothing.

        Raises:
            LossError: if the loss cannot be run or differentiated.
        """
        ...


class Executor(Protocol):
    """Makes a `Runnable` from a capture and a legal schedule of its graph.

    `low_memory_plan` is a plan of the same capture by the same executor; see `Executable`. What an
    executor can do beyond running plans it lists as `abilities`, a set of `Ability`; a function, or
    a class that has no such list, is asked for nothing more.
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
        """Make a `Runnable` that runs the schedule.

        Raises:
            InvalidSchedule: if the simulator rejects the schedule.
        """
        ...


def abilities_of(executor: Executor) -> frozenset[Ability]:
    """Read what an executor says that it can do beyond running plans."""
    return frozenset(getattr(executor, "abilities", ()))
