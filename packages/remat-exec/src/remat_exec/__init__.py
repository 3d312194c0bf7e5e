"""Run re-materialization schedules in PyTorch, and measure their peak memory."""

from remat_exec.__about__ import __version__
from remat_exec.autocast import autocast_type
from remat_exec.checksums import checksum
from remat_exec.deferred import DeferredTensor
from remat_exec.errors import (
    BackwardError,
    BrokenExecutor,
    BudgetExceeded,
    DuplicateExecutor,
    ExecutionError,
    LossError,
    MemoryChanged,
    OutputGone,
    PartialGradientAsked,
    RepeatExceeded,
    SecondDerivative,
    UnknownExecutor,
)
from remat_exec.executable import Executable
from remat_exec.interface import Ability, Executor, Runnable, abilities_of
from remat_exec.loss import (
    Loss,
    as_handed,
    loss_gradients,
    measure_loss,
    stand_in_loss,
    with_call,
)
from remat_exec.measure import (
    Peak,
    StepProfile,
    measure_peak,
    profile_step,
)
from remat_exec.outputs import HandOut
from remat_exec.registry import get_executor, list_executors
from remat_exec.repeats import Repeats, keeps_graph

__all__ = [
    "Ability",
    "BackwardError",
    "BrokenExecutor",
    "BudgetExceeded",
    "DeferredTensor",
    "DuplicateExecutor",
    "Executable",
    "ExecutionError",
    "Executor",
    "HandOut",
    "Loss",
    "LossError",
    "MemoryChanged",
    "OutputGone",
    "PartialGradientAsked",
    "Peak",
    "RepeatExceeded",
    "Repeats",
    "Runnable",
    "SecondDerivative",
    "StepProfile",
    "UnknownExecutor",
    "__version__",
    "abilities_of",
    "as_handed",
    "autocast_type",
    "checksum",
    "get_executor",
    "keeps_graph",
    "list_executors",
    "loss_gradients",
    "measure_loss",
    "measure_peak",
    "profile_step",
    "stand_in_loss",
    "with_call",
]
