"""The names of `remat`, each from where it is defined."""

from remat.__about__ import __version__
from remat.budgets.budget import Budget
from remat.errors import BudgetError, BudgetWarning, PlanMismatch, RematError
from remat.front.wrapping import rematerialize
from remat.planning.tradeoff_files import plot_tradeoff, save_tradeoff
from remat.planning.tradeoffs import tradeoff
from remat.planning.whole_module import plan
from remat.report.readable_plan import ReadablePlan as Plan
from remat_exec import (
    BackwardError,
    BudgetExceeded,
    ExecutionError,
    LossError,
    OutputGone,
    list_executors,
    measure_peak,
)
from remat_graph.torch import DEVICES, CaptureError, DeviceSpec, allow_recompute, list_captures
from remat_partition import Partitioner, PartitionError, list_partitioners
from remat_solvers import BudgetTooSmall, Solver, SolverError, Tradeoff, TradeoffPoint, list_solvers

__all__ = [
    "DEVICES",
    "BackwardError",
    "Budget",
    "BudgetError",
    "BudgetExceeded",
    "BudgetTooSmall",
    "BudgetWarning",
    "CaptureError",
    "DeviceSpec",
    "ExecutionError",
    "LossError",
    "OutputGone",
    "PartitionError",
    "Partitioner",
    "Plan",
    "PlanMismatch",
    "RematError",
    "Solver",
    "SolverError",
    "Tradeoff",
    "TradeoffPoint",
    "__version__",
    "allow_recompute",
    "list_captures",
    "list_executors",
    "list_partitioners",
    "list_solvers",
    "measure_peak",
    "plan",
    "plot_tradeoff",
    "rematerialize",
    "save_tradeoff",
    "tradeoff",
]
