"""Solvers for re-materialization: schedules under a memory budget, with certified bounds.

`solve` turns a `remat_graph.Graph` and a budget in bytes into a checked `Solution`. Needs no torch.
Solvers are found through the entry-point group `remat.solvers`.

From the ground up, each room importing only from those before it: `core` (the protocol, a graph as
arrays, integer programs), `bounds` (what no schedule beats), `search` (schedules without a
program); then the solvers, `decompositions`, `rotor`, `checkmate`, `refine`, `baselines` and
`hierarchical`; then `smallest`, the least budget, `registry` and `solve`, which ask them by name,
and on top `queries` and `step`, which ask many times.
"""

from remat_solvers.__about__ import __version__
from remat_solvers.core.problem import Limit, Problem, Progress, Report, Solver
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
from remat_solvers.queries.batch import LargestBatch, max_batch_size, with_batch
from remat_solvers.queries.tradeoff import Tradeoff, TradeoffPoint, tradeoff
from remat_solvers.registry import cite, get_solver, list_solvers
from remat_solvers.smallest import SmallestBudget, smallest_budget
from remat_solvers.solve import solve
from remat_solvers.step import (
    ANY_BYTES,
    Moment,
    RegionBound,
    RegionFront,
    RegionOption,
    StepChoice,
    StepTooLarge,
    choose,
    measure_option,
    refined_options,
    region_front,
    region_options,
    step_bound,
)

__all__ = [
    "ANY_BYTES",
    "BackEndFailed",
    "BrokenSolver",
    "BudgetTooSmall",
    "DuplicateSolver",
    "InvalidProblem",
    "LargestBatch",
    "Limit",
    "Moment",
    "Problem",
    "Progress",
    "RegionBound",
    "RegionFront",
    "RegionOption",
    "Report",
    "SmallestBudget",
    "Solver",
    "SolverError",
    "StepChoice",
    "StepTooLarge",
    "Tradeoff",
    "TradeoffPoint",
    "UnknownSolver",
    "UnsuitableSolver",
    "WorkerDied",
    "__version__",
    "choose",
    "cite",
    "get_solver",
    "list_solvers",
    "max_batch_size",
    "measure_option",
    "refined_options",
    "region_front",
    "region_options",
    "smallest_budget",
    "solve",
    "step_bound",
    "tradeoff",
    "with_batch",
]
