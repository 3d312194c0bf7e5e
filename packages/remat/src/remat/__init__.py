"""Train PyTorch models in less memory: a budget in bytes, the same gradients, a certified plan."""

from remat.__about__ import __version__
from remat.budget import Budget
from remat.errors import BudgetError, BudgetWarning, PlanMismatch, RematError
from remat.planning import plan
from remat.plans import Plan
from remat.tradeoff import plot_tradeoff, save_tradeoff, tradeoff
from remat.wrapping import rematerialize
from remat_exec import (
    BackwardError,
    BudgetExceeded,
    ExecutionError,
    LossError,
    list_executors,
    measure_peak,
)
from remat_graph.torch import DEVICES, CaptureError, DeviceSpec, allow_recompute, list_captures
from remat_solvers import BudgetTooSmall, SolverError, Tradeoff, TradeoffPoint, list_solvers

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
    "Plan",
    "PlanMismatch",
    "RematError",
    "SolverError",
    "Tradeoff",
    "TradeoffPoint",
    "__version__",
    "allow_recompute",
    "list_captures",
    "list_executors",
    "list_solvers",
    "measure_peak",
    "plan",
    "plot_tradeoff",
    "rematerialize",
    "save_tradeoff",
    "tradeoff",
]
