"""Execution of re-materialization schedules in PyTorch, and the measure of their peak memory."""

from remat_exec.__about__ import __version__
from remat_exec.errors import (
    BackwardError,
    BudgetExceeded,
    ExecutionError,
    LossError,
    SecondDerivative,
)
from remat_exec.executable import Executable
from remat_exec.loss import Loss, as_handed, loss_gradients, measure_loss, stand_in_loss
from remat_exec.measure import (
    Peak,
    StepProfile,
    generators_restored,
    measure_peak,
    profile_step,
)

__all__ = [
    "BackwardError",
    "BudgetExceeded",
    "Executable",
    "ExecutionError",
    "Loss",
    "LossError",
    "Peak",
    "SecondDerivative",
    "StepProfile",
    "__version__",
    "as_handed",
    "generators_restored",
    "loss_gradients",
    "measure_loss",
    "measure_peak",
    "profile_step",
    "stand_in_loss",
]
