"""Execution of re-materialization schedules in PyTorch, and the measurement of their peak memory."""

from remat_exec.__about__ import __version__
from remat_exec.errors import BackwardError, BudgetExceeded, ExecutionError
from remat_exec.executable import Executable
from remat_exec.measure import Peak, StepProfile, measure_peak, profile_step
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
    "measure_peak",
    "profile_step",
]
