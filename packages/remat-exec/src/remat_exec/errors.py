"""What execution raises."""

from __future__ import annotations

import torch
from torch import distributed

from remat_graph import RematError

__all__ = [
    "BackwardError",
    "BrokenExecutor",
    "BudgetExceeded",
    "DuplicateExecutor",
    "ExecutionError",
    "LossError",
    "MemoryChanged",
    "OutputGone",
    "PartialGradientAsked",
    "RepeatExceeded",
    "SecondDerivative",
    "UnknownExecutor",
]


class ExecutionError(RematError, RuntimeError):
    """Base of the errors of this package."""


class BackwardError(ExecutionError):
    """A backward that cannot run: a second one, or one over gradients that were not planned for."""

    def __init__(self, message: str) -> None:
        super().__init__(message + _left_behind())


class MemoryChanged(BackwardError):
    """Memory that the plan reads again was written to between forward and backward."""


class OutputGone(ExecutionError):
    """An output that no step makes was read when what it is made of had changed."""


class PartialGradientAsked(BackwardError):
    """A gradient was asked for of which autograd has a part; the next forward has the whole."""


class SecondDerivative(BackwardError):
    """A backward asked for a gradient of a gradient, which a plan does not give."""


class LossError(ExecutionError):
    """The `loss` that the user gave cannot be run or differentiated."""


class BudgetExceeded(ExecutionError):
    """A step that takes, or would take, more memory than its budget.

    `peak_bytes` is what it takes, `budget_bytes` what it may take.
    """

    def __init__(self, message: str, budget_bytes: int, peak_bytes: int) -> None:
        super().__init__(message + _left_behind())
        self.budget_bytes = budget_bytes
        self.peak_bytes = peak_bytes


class RepeatExceeded(BudgetExceeded):
    """Another backward over one forward takes, or would take, more memory than the budget.

    `given_bytes` are held of the gradients of those before; a plan that leaves `room_bytes` has
    room for them, and for outputs of the forward that are there twice.
    """

    def __init__(
        self, peak_bytes: int, budget_bytes: int, given_bytes: int, room_bytes: int
    ) -> None:
        super().__init__(
            f"this backward, another one over the same forward, would take {peak_bytes:,} bytes of "
            f"a budget of {budget_bytes:,}: {given_bytes:,} are held of gradients of those before; "
            f"run forward again, it will be planned with room for them",
            budget_bytes,
            peak_bytes,
        )
        self.given_bytes, self.room_bytes = given_bytes, room_bytes


class UnknownExecutor(ExecutionError):
    """No installed distribution offers an executor of this name."""


class DuplicateExecutor(ExecutionError):
    """Two distributions offer an executor of the same name."""


class BrokenExecutor(ExecutionError):
    """An executor cannot be loaded, or does not take the arguments of an `Executor`."""


def _left_behind() -> str:
    """Say what is left where an error ends a backward of several ranks."""
    is_backward = torch._C._current_graph_task_id() != -1
    if not (is_backward and distributed.is_available() and distributed.is_initialized()):
        return ""
    return (
        ". Under FSDP2 go on from a checkpoint in a new process: it adds what a backward that "
        "raised has left to the gradients of later steps"
    )
