"""Execution of re-materialization schedules in PyTorch, and the measure of their peak memory."""

from remat_exec.__about__ import __version__
from remat_exec.errors import BackwardError, BudgetExceeded, ExecutionError
from remat_exec.executable import Executable, stand_in_loss
from remat_exec.measure import (
    Peak,
    StepProfile,
    generators_restored,
    measure_peak,
    profile_step,
)
from remat_exec.module import RematModule

__all__ = [
    "BackwardError",
    "BudgetExceeded",
    "Executable",
    "ExecutionError",
    "Peak",
    "RematModule",
    "StepProfile",
    "__version__",
    "generators_restored",
    "measure_peak",
    "profile_step",
    "stand_in_loss",
]
