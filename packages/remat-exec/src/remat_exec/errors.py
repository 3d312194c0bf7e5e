"""What execution raises."""

from __future__ import annotations

from remat_graph import RematError

__all__ = [
    "BackwardError",
    "BrokenExecutor",
    "BudgetExceeded",
    "DuplicateExecutor",
    "ExecutionError",
    "LossError",
    "MemoryChanged",
    "SecondDerivative",
    "UnknownExecutor",
]


class ExecutionError(RematError, RuntimeError):
    """Base of the errors of this package."""


class BackwardError(ExecutionError):
    """A backward pass that cannot be run: a second one, or one over gradients not planned for."""


class MemoryChanged(BackwardError):
    """Memory that was written to between forward and backward, and that the plan reads again."""


class SecondDerivative(BackwardError):
    """A gradient of a gradient, which a plan does not give."""


class LossError(ExecutionError):
    """A loss, handed over to be measured, that cannot be run or differentiated."""


class BudgetExceeded(ExecutionError):
    """A step that takes, or would take, more memory than its budget.

    `budget_bytes` and `peak_bytes` are the two figures.
    """

    def __init__(self, message: str, budget_bytes: int, peak_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.peak_bytes = peak_bytes


class UnknownExecutor(ExecutionError):
    """No installed distribution offers an executor of this name."""


class DuplicateExecutor(ExecutionError):
    """Two distributions offer an executor of the same name."""


class BrokenExecutor(ExecutionError):
    """An executor that cannot be loaded, or takes other arguments than an `Executor`."""
