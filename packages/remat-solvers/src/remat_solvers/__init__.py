"""Solvers for re-materialization: schedules under a memory budget, with certified bounds.

`solve` turns a `remat_graph.Graph` and a budget in bytes into a checked `Solution`. Needs no torch.
Solvers are found through the entry-point group `remat.solvers`.

From the ground up, each room importing only from those before it: `core` (the protocol, a graph as
arrays, integer programs), `bounds` (lower bounds), `search` (schedules without a program), `chains`
(those of chains of blocks), `refine`, our own solver; then `minimal_peak`, `registry` and `solve`,
which ask solvers by name, and on top `queries` and `step`, which ask many times. `published` has
the methods of papers, which nothing of ours needs. Public beside this module are `step` (several
regions under one budget), `toolkit` (what a solver is built of), `verdicts` (claims held against
schedules) and `testing` (what a solver must pass).
"""

from remat_solvers.__about__ import __version__
from remat_solvers.core.problem import Limit, Problem, Progress, Report, Solver, check_progress
from remat_solvers.core.store_all import store_all
from remat_solvers.errors import (
    BackEndFailed,
    BrokenSolver,
    BudgetTooSmall,
    DuplicateSolver,
    InvalidProblem,
    SolverError,
    UnknownSolver,
    UnsuitableSolver,
    WorkerDied,
)
from remat_solvers.minimal_peak.budget import SmallestBudget, smallest_budget
from remat_solvers.queries.batch import LargestBatch, max_batch_size, with_batch
from remat_solvers.queries.tradeoff import Tradeoff, TradeoffPoint, check_tradeoff, tradeoff
from remat_solvers.registry import cite, get_solver, list_solvers, resolve_solver
from remat_solvers.solve import solve

__all__ = [
    "BackEndFailed",
    "BrokenSolver",
    "BudgetTooSmall",
    "DuplicateSolver",
    "InvalidProblem",
    "LargestBatch",
    "Limit",
    "Problem",
    "Progress",
    "Report",
    "SmallestBudget",
    "Solver",
    "SolverError",
    "Tradeoff",
    "TradeoffPoint",
    "UnknownSolver",
    "UnsuitableSolver",
    "WorkerDied",
    "__version__",
    "check_progress",
    "check_tradeoff",
    "cite",
    "get_solver",
    "list_solvers",
    "max_batch_size",
    "resolve_solver",
    "smallest_budget",
    "solve",
    "store_all",
    "tradeoff",
    "with_batch",
]
